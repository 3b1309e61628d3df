// The C ABI of libtorch's c10d: stores, process groups, the gradient reducer. Rules as in shim.h.
#pragma once

#include "../shim.h"

#ifdef __cplusplus
extern "C" {
#endif

// --- store.cpp ------------------------------------------------------------------------------------
typedef struct od_store od_store;
// A server listens on `port` (0: a free one) of all interfaces and is a client of itself; a client connects within
// the timeout. A server takes over `listener`, a socket that listens on `port`, unless it is negative.
od_status* od_store_tcp(const char* host, uint16_t port, int32_t is_server, int32_t listener,
                        int64_t timeout_ms, od_store** out, uint16_t* out_port) OD_NOEXCEPT;
// Returns a handle to the same store that puts `prefix` before every key.
od_status* od_store_prefix(const od_store* store, const char* prefix, od_store** out) OD_NOEXCEPT;
// Opens a second connection to the same server: a wait on one does not block the other.
od_status* od_store_clone(const od_store* store, od_store** out) OD_NOEXCEPT;
od_status* od_store_set(od_store* store, const char* key, const uint8_t* value,
                        size_t len) OD_NOEXCEPT;
// Waits until the key exists. The bytes are freed with `od_string_free`.
od_status* od_store_get(od_store* store, const char* key, char** out, size_t* out_len) OD_NOEXCEPT;
// Sets the key to `desired` if its value is `expected` (or if it is absent and `expected` is empty);
// returns the value afterwards.
od_status* od_store_compare_set(od_store* store, const char* key, const uint8_t* expected,
                                size_t expected_len, const uint8_t* desired, size_t desired_len,
                                char** out, size_t* out_len) OD_NOEXCEPT;
od_status* od_store_add(od_store* store, const char* key, int64_t amount, int64_t* out) OD_NOEXCEPT;
od_status* od_store_check(od_store* store, const char* const* keys, size_t n,
                          int32_t* out) OD_NOEXCEPT;
od_status* od_store_wait(od_store* store, const char* const* keys, size_t n,
                         int64_t timeout_ms) OD_NOEXCEPT;
od_status* od_store_delete(od_store* store, const char* key, int32_t* out) OD_NOEXCEPT;
void od_store_free(od_store* store) OD_NOEXCEPT;

// --- group.cpp ------------------------------------------------------------------------------------
typedef struct od_group od_group;
typedef struct od_work od_work;
// `interface` or `address` choose the network device; if both are null, the host name does.
od_status* od_group_gloo(const od_store* store, int32_t rank, int32_t size, int64_t timeout_ms,
                         const char* interface, const char* address, od_group** out) OD_NOEXCEPT;
// Fails if the shim was built without NCCL.
od_status* od_group_nccl(const od_store* store, int32_t rank, int32_t size, int64_t timeout_ms,
                         int32_t device, od_group** out) OD_NOEXCEPT;
void od_group_free(od_group* group) OD_NOEXCEPT;

enum od_collective_kind {
  OD_ALL_REDUCE = 0,       // inputs, in place
  OD_BROADCAST = 1,        // inputs, in place, from `root`
  OD_REDUCE = 2,           // inputs, in place, to `root`
  OD_ALL_GATHER = 3,       // one input, `size` outputs
  OD_REDUCE_SCATTER = 4,   // one input, one output; equal chunks of the first dimension
  OD_GATHER = 5,           // one input; `size` outputs at `root`
  OD_SCATTER = 6,          // one output; `size` inputs at `root`
  OD_ALL_TO_ALL = 7,       // one input, one output, equal chunks of the first dimension
  OD_SEND = 8,             // inputs to `root`
  OD_RECV = 9,             // inputs, in place, from `root`
  OD_BARRIER = 10,
};
typedef struct od_collective {
  int32_t kind;
  int32_t reduce_op;  // c10d::ReduceOp::RedOpType
  const od_tensor* inputs;
  size_t n_inputs;
  const od_tensor* outputs;
  size_t n_outputs;
  int64_t root;
  int32_t tag;
  int64_t timeout_ms;  // 0: the group's
} od_collective;
od_status* od_group_start(od_group* group, const od_collective* collective,
                          od_work** out) OD_NOEXCEPT;
od_status* od_work_wait(od_work* work, int64_t timeout_ms) OD_NOEXCEPT;  // 0: no limit
int32_t od_work_is_completed(od_work* work) OD_NOEXCEPT;
void od_work_free(od_work* work) OD_NOEXCEPT;

// --- watch.h: the state of a group's collectives, for a thread that monitors them --------------------
typedef struct od_watch_state {
  uint64_t started;   // the number of collectives started
  uint64_t finished;  // the number of them that have ended
  int32_t failed;     // 1: one failed, and the group is not aborted yet
  int32_t aborted;
  uint64_t failed_number;
  // The collectives started last, one per line: number, name and tensors, separated by tabs. Strings are
  // freed with `od_string_free`.
  char* recent;
  char* failed_what;
  char* failed_text;
} od_watch_state;
// Sets the text that follows the ranks in messages.
od_status* od_watch_label(od_group* group, const char* label) OD_NOEXCEPT;
// From here on a failed collective ends only when `od_watch_abort` is called, with its message.
void od_watch_begin(od_group* group) OD_NOEXCEPT;
// Waits until a collective fails, `od_watch_wake` is called or the time has passed.
od_status* od_watch_poll(od_group* group, int64_t wait_ms, od_watch_state* out) OD_NOEXCEPT;
void od_watch_wake(od_group* group) OD_NOEXCEPT;
// Ends every running collective, and every later one, with an error of this message, and closes the
// connections, so that peers do not wait for this process.
od_status* od_watch_abort(od_group* group, const char* message) OD_NOEXCEPT;

// --- reducer.cpp ------------------------------------------------------------------------------------
typedef struct od_reducer od_reducer;
typedef struct od_reducer_options {
  int64_t bucket_bytes;
  int64_t first_bucket_bytes;
  int32_t find_unused_parameters;
  int32_t static_graph;
  int32_t gradient_as_bucket_view;
  int32_t compression;  // 0: none, else the `at::ScalarType` in which gradients are sent
} od_reducer_options;
od_status* od_reducer_new(od_group* group, const od_tensor* parameters, const char* const* names,
                          size_t n, const od_reducer_options* options,
                          od_reducer** out) OD_NOEXCEPT;
od_status* od_reducer_prepare_for_forward(od_reducer* reducer) OD_NOEXCEPT;
od_status* od_reducer_rebuild_buckets(od_reducer* reducer, int32_t* out_rebuilt) OD_NOEXCEPT;
od_status* od_reducer_prepare_for_backward(od_reducer* reducer, const od_tensor* outputs,
                                           size_t n) OD_NOEXCEPT;
// Returns the bytes of each bucket, in the order in which they are reduced; `out` has room for `n` of them.
od_status* od_reducer_buckets(od_reducer* reducer, int64_t* out, size_t n, size_t* out_n) OD_NOEXCEPT;
void od_reducer_free(od_reducer* reducer) OD_NOEXCEPT;

#ifdef __cplusplus
}  // extern "C"
#endif
