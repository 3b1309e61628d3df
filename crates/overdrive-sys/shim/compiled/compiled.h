// The C ABI of AOTInductor packages and CUDA graphs. Rules as in shim.h.
#pragma once

#include "../shim.h"

#ifdef __cplusplus
extern "C" {
#endif

// --- package.cpp: a model of a package ------------------------------------------------------------
typedef struct od_package od_package;
// Loads `library`, the bytes of an empty library called libtorch.so, unless one of that name is loaded.
od_status* od_package_name_libtorch(const uint8_t* library, size_t len) OD_NOEXCEPT;
// Unpacks into a temporary folder and loads native code: the caller must have checked the file.
// `device_index` -1: the current device. With `single_threaded` the caller must run one thread at a time.
od_status* od_package_open(const char* path, const char* model, int32_t single_threaded,
                           size_t runners, int32_t device_index, od_package** out) OD_NOEXCEPT;
void od_package_free(od_package* package) OD_NOEXCEPT;
// Returns the tree specs of inputs and outputs as JSON; freed with `od_string_free`.
od_status* od_package_call_spec(od_package* package, char** inputs, char** outputs) OD_NOEXCEPT;
// `push` receives each output as an owned handle. As many threads as there are runners may run at a time. Fails
// for another number of inputs than the code takes, for inputs that are not contiguous, and if the storage of a
// shared constant was resized.
od_status* od_package_run(od_package* package, const od_tensor* inputs, size_t n, void* into,
                          void (*push)(void*, od_tensor)) OD_NOEXCEPT;
// Calls `take` with the name of each constant and its borrowed tensor, whose memory the next swap may free. The
// elements may be read only if `readable` was set, for which it fails if a shared constant's storage was resized.
od_status* od_package_constants(od_package* package, int32_t readable, void* into,
                                void (*take)(void*, const char*, const void*)) OD_NOEXCEPT;
// Creates a second set of constants from the first with these replaced. With `share` the package uses the
// memory of the given tensors and keeps it alive; else it copies. May run concurrently with
// `od_package_run`, but not with itself or `od_package_commit`. Names must exist, and dtypes and shapes
// must fit.
od_status* od_package_prepare(od_package* package, const char* const* names,
                              const od_tensor* tensors, size_t n, int32_t share) OD_NOEXCEPT;
// Replaces the first set by the second and frees the first. Must not run concurrently with `od_package_run`.
od_status* od_package_commit(od_package* package) OD_NOEXCEPT;

// --- graph.cpp: CUDA graphs -----------------------------------------------------------------------
typedef struct od_graph od_graph;
// Fails if there is no CUDA device.
od_status* od_graph_new(int32_t device_index, od_graph** out) OD_NOEXCEPT;
void od_graph_free(od_graph* graph) OD_NOEXCEPT;
// Makes the graph's stream current on this thread, behind the work of the previous stream.
od_status* od_graph_enter(od_graph* graph) OD_NOEXCEPT;
// Restores the previous stream, which then waits for the graph's. Undoes `od_graph_enter` also after errors.
od_status* od_graph_leave(od_graph* graph) OD_NOEXCEPT;
// Starts to capture the work of this thread. With `pool_of` memory comes from the pool of another graph,
// which must be replayed before this one and not at the same time.
od_status* od_graph_begin(od_graph* graph, const od_graph* pool_of) OD_NOEXCEPT;
// Ends the capture and instantiates the graph; `pool_bytes` is the memory that its pool took from the device.
od_status* od_graph_end(od_graph* graph, uint64_t* pool_bytes) OD_NOEXCEPT;
// Ends a capture that failed: libtorch's allocators and random generator are as before it, and the graph is empty. It
// reports no error, because the caller already has one.
void od_graph_abort(od_graph* graph) OD_NOEXCEPT;
od_status* od_graph_replay(od_graph* graph) OD_NOEXCEPT;
od_status* od_graph_synchronize(od_graph* graph) OD_NOEXCEPT;
// Fails if a function of libtorch's graphs is missing in the loaded CUDA library.
od_status* od_graph_symbols(void) OD_NOEXCEPT;

#ifdef __cplusplus
}  // extern "C"
#endif
