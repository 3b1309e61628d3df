// The C ABI of compiled work: packages of AOTInductor, CUDA graphs. Rules as in shim.h.
#pragma once

#include "../shim.h"

#ifdef __cplusplus
extern "C" {
#endif

// --- package.cpp: one model of a package ----------------------------------------------------------
typedef struct od_package od_package;
// Loads `library`, the bytes of an empty one called libtorch.so, unless there is one of that name.
od_status* od_package_name_libtorch(const uint8_t* library, size_t len) OD_NOEXCEPT;
// Unpacks into a temporary folder and loads native code: the caller has looked at the file before.
// `device_index` -1: the current device. With `single_threaded` the caller sees to it that one thread
// runs at a time.
od_status* od_package_open(const char* path, const char* model, int32_t single_threaded,
                           size_t runners, int32_t device_index, od_package** out) OD_NOEXCEPT;
void od_package_free(od_package* package) OD_NOEXCEPT;
// The tree specs of inputs and outputs, JSON; freed with `od_string_free`.
od_status* od_package_call_spec(od_package* package, char** inputs, char** outputs) OD_NOEXCEPT;
// `push` takes each output, an owned handle. As many threads as there are runners may run at a time.
od_status* od_package_run(od_package* package, const od_tensor* inputs, size_t n, void* into,
                          void (*push)(void*, od_tensor)) OD_NOEXCEPT;
// Calls `take` with the name of each constant and its tensor, borrowed: its memory is the package's,
// and may go with the next swap.
od_status* od_package_constants(od_package* package, void* into,
                                void (*take)(void*, const char*, const void*)) OD_NOEXCEPT;
// Makes a second set of constants out of the first with these replaced. `share`: the package uses the
// memory of the tensors given, and keeps it alive; else it copies. Beside `od_package_run`, but not
// beside itself or `od_package_commit`. Names must be there, and kinds and sizes fit.
od_status* od_package_prepare(od_package* package, const char* const* names,
                              const od_tensor* tensors, size_t n, int32_t share) OD_NOEXCEPT;
// Puts the second set in place of the first and frees that. Not beside `od_package_run`.
od_status* od_package_commit(od_package* package) OD_NOEXCEPT;

// --- graph.cpp: CUDA graphs -----------------------------------------------------------------------
typedef struct od_graph od_graph;
// Fails where there is no CUDA device.
od_status* od_graph_new(int32_t device_index, od_graph** out) OD_NOEXCEPT;
void od_graph_free(od_graph* graph) OD_NOEXCEPT;
// The graph's own stream becomes this thread's, after the work that this thread's had to do.
od_status* od_graph_enter(od_graph* graph) OD_NOEXCEPT;
// Back to the stream before, which waits for the graph's. Undoes `od_graph_enter` also after errors.
od_status* od_graph_leave(od_graph* graph) OD_NOEXCEPT;
// From here on work of this thread is captured. With `pool_of` memory comes out of the pool of another
// graph, which must be replayed before this one and not beside it.
od_status* od_graph_begin(od_graph* graph, const od_graph* pool_of) OD_NOEXCEPT;
// Ends the capture and makes the graph ready; `pool_bytes`: what its pool has taken from the device.
od_status* od_graph_end(od_graph* graph, uint64_t* pool_bytes) OD_NOEXCEPT;
// Ends a capture that failed. Never fails itself: there is an error under way.
void od_graph_abort(od_graph* graph) OD_NOEXCEPT;
od_status* od_graph_replay(od_graph* graph) OD_NOEXCEPT;
od_status* od_graph_synchronize(od_graph* graph) OD_NOEXCEPT;
// Whether every function of libtorch's graphs is found in the CUDA library that is loaded.
od_status* od_graph_symbols(void) OD_NOEXCEPT;

#ifdef __cplusplus
}  // extern "C"
#endif
