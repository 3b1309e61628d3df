// The C ABI between Overdrive and libtorch.
//
// Every function here keeps these rules:
//  - `noexcept`; the whole body runs inside `guard`, so that no C++ exception leaves it;
//  - it returns null on success, else a status that the caller frees with `od_status_free`;
//  - results go through out-parameters, last in the list, written only on success;
//  - an `od_tensor` is an `at::Tensor*`: borrowed as an argument, owned by the caller as a result (tch
//    frees it).
#pragma once

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#define OD_NOEXCEPT noexcept
#else
#define OD_NOEXCEPT
#endif

typedef struct od_status od_status;
typedef void* od_tensor;

// --- status.cpp -------------------------------------------------------------------------------
enum od_error_kind { OD_ERROR = 0, OD_OUT_OF_MEMORY = 1, OD_NOT_FOUND = 2, OD_BAD_ARGUMENT = 3, OD_RUST = 4 };
int32_t od_status_kind(const od_status* status) OD_NOEXCEPT;
const char* od_status_message(const od_status* status) OD_NOEXCEPT;
void od_status_free(od_status* status) OD_NOEXCEPT;

// --- op.cpp: calls of any operator by its schema name -----------------------------------------------------
enum od_tag {
  OD_NONE = 0,
  OD_TENSOR = 1,   // ptr: at::Tensor*
  OD_TENSORS = 2,  // ptr: at::Tensor* const*, len
  OD_INT = 3,      // i
  OD_FLOAT = 4,    // f
  OD_BOOL = 5,     // i
  OD_INTS = 6,     // ptr: const int64_t*, len
  OD_FLOATS = 7,   // ptr: const double*, len
  OD_STR = 8,      // ptr: const char* (UTF-8, not terminated), len
  OD_BOOLS = 9,    // ptr: const uint8_t*, len
  OD_DEVICE = 10,  // i: c10::DeviceType, len: index
};
typedef struct od_value {
  int32_t tag;
  int64_t i;
  double f;
  const void* ptr;
  size_t len;
} od_value;
typedef struct od_outputs od_outputs;

// With `fused`, the operator is a fused optimizer, whose kernels check nothing: the lists are checked here.
od_status* od_op_call(const char* name, const char* overload, const od_value* args, size_t n_args,
                      int32_t fused, od_outputs** out) OD_NOEXCEPT;
od_status* od_op_schema(const char* name, const char* overload, char** out) OD_NOEXCEPT;
size_t od_outputs_len(const od_outputs* outputs) OD_NOEXCEPT;
// Reads output `index`: scalars are stored in `out->i` or `out->f`; for lists `out->len` is the length.
od_status* od_outputs_get(const od_outputs* outputs, size_t index, od_value* out) OD_NOEXCEPT;
// Returns a tensor output, or element `element` of a list of tensors, as a new handle.
od_status* od_outputs_tensor(const od_outputs* outputs, size_t index, size_t element,
                             od_tensor* out) OD_NOEXCEPT;
void od_outputs_free(od_outputs* outputs) OD_NOEXCEPT;
void od_string_free(char* text) OD_NOEXCEPT;

// --- grad.cpp -----------------------------------------------------------------------------------
od_status* od_grad_set(od_tensor tensor, od_tensor grad_or_null) OD_NOEXCEPT;

// --- callback.h: Rust called from C++ -----------------------------------------------------------
// The outcome of a callback: a null payload for success; else an error or a panic, with a message that lives
// as long as the payload, which the receiver releases once.
typedef struct od_failure {
  void* payload;
  const char* message;
  size_t message_len;
  void (*release)(void*);
} od_failure;
// A Rust closure. The receiver owns it and drops it once.
typedef struct od_closure {
  void* self;
  void (*drop)(void*);
} od_closure;
// Returns the payload of the failure that this status carries, borrowed from it; null for other errors.
void* od_status_payload(const od_status* status) OD_NOEXCEPT;

// --- function.cpp: functions with a backward in Rust ----------------------------------------------
typedef struct od_backward_call {
  const void* const* gradients;  // of the outputs; null for an absent gradient
  size_t n_gradients;
  const void* const* saved;
  size_t n_saved;
  const uint8_t* needs_input_grad;  // for each input, 1 if its gradient is needed
  od_tensor* out;                   // the gradients of the inputs: owned handles or null
  size_t n_out;
} od_backward_call;
typedef od_failure (*od_function_backward)(void* self, const od_backward_call* call);
typedef struct od_function {
  const char* name;
  size_t name_len;
  const od_tensor* inputs;
  size_t n_inputs;
  const od_tensor* outputs;  // the results of forward
  size_t n_outputs;
  const od_tensor* saved;
  size_t n_saved;
  const size_t* dirty;  // inputs that forward changed in place
  size_t n_dirty;
  const size_t* non_differentiable;  // indices of outputs
  size_t n_non_differentiable;
  int32_t materialize_grads;
  int32_t twice_differentiable;
} od_function;
// Records a function whose forward has run in the graph; `out` has room for `n_outputs` handles.
od_status* od_function_record(const od_function* function, od_closure closure,
                              od_function_backward backward, od_tensor* out) OD_NOEXCEPT;

// --- hooks.cpp ----------------------------------------------------------------------------------
typedef struct od_hook od_hook;
// `replacement` may be set to an owned handle: a gradient that replaces this one.
typedef od_failure (*od_hook_call)(void* self, const void* tensor, od_tensor* replacement);
od_status* od_hook_register(od_tensor tensor, od_closure closure, od_hook_call call,
                            od_hook** out) OD_NOEXCEPT;
od_status* od_hook_register_post_accumulate(od_tensor tensor, od_closure closure, od_hook_call call,
                                            od_hook** out) OD_NOEXCEPT;
od_status* od_hook_remove(od_hook* hook) OD_NOEXCEPT;  // and frees the handle
void od_hook_free(od_hook* hook) OD_NOEXCEPT;          // frees the handle only: the hook stays

// --- engine.cpp ---------------------------------------------------------------------------------
od_status* od_backward(const od_tensor* outputs, const od_tensor* gradients, size_t n,
                       const od_tensor* inputs, size_t n_inputs, int32_t retain_graph,
                       int32_t create_graph) OD_NOEXCEPT;
od_status* od_grad(const od_tensor* outputs, const od_tensor* gradients, size_t n,
                   const od_tensor* inputs, size_t n_inputs, int32_t retain_graph,
                   int32_t create_graph, int32_t allow_unused, od_tensor* out) OD_NOEXCEPT;
int32_t od_grad_mode_get(void) OD_NOEXCEPT;
void od_grad_mode_set(int32_t enabled) OD_NOEXCEPT;
// Modes must be left on the thread that entered them, in reverse order (`mode_stack.rs`).
od_status* od_inference_mode_enter(int32_t enabled, void** out) OD_NOEXCEPT;
void od_inference_mode_exit(void* guard) OD_NOEXCEPT;
int32_t od_inference_mode_get(void) OD_NOEXCEPT;
int32_t od_is_inference(od_tensor tensor) OD_NOEXCEPT;
od_status* od_random_state_get(int32_t device_type, int32_t index, od_tensor* out) OD_NOEXCEPT;
od_status* od_random_state_set(int32_t device_type, int32_t index, od_tensor state) OD_NOEXCEPT;
od_status* od_random_seed(int32_t device_type, int32_t index, uint64_t seed) OD_NOEXCEPT;

// --- saved_tensors.cpp: hooks on what the graph saves -------------------------------------------
typedef struct od_saved_tensor_callbacks {
  // Takes an owned handle, and stores the value that the graph holds in place of the tensor. `parameter` is 1
  // for a leaf that requires grad, or a view of one.
  od_failure (*pack)(od_tensor tensor, int32_t parameter, void** packed);
  od_failure (*unpack)(void* packed, od_tensor* out);  // an owned handle
  void (*drop)(void* packed);
} od_saved_tensor_callbacks;
// Sets the callbacks of the process. Must be called before the first depth that is not 0.
void od_saved_tensors_install(const od_saved_tensor_callbacks* callbacks) OD_NOEXCEPT;
// Sets the number of hooks on this thread's stack. The callbacks are called while it is not 0.
od_status* od_saved_tensors_set_depth(int32_t depth) OD_NOEXCEPT;
// A tensor that is saved as a node of the graph saves its inputs: through the hooks, checked for changes.
typedef struct od_saved_variable od_saved_variable;
od_status* od_saved_variable_new(od_tensor tensor, od_saved_variable** out) OD_NOEXCEPT;
od_status* od_saved_variable_unpack(const od_saved_variable* saved, od_tensor* out) OD_NOEXCEPT;
void od_saved_variable_free(od_saved_variable* saved) OD_NOEXCEPT;
int32_t od_graph_task_id(void) OD_NOEXCEPT;  // the id of this thread's running backward pass; -1: none
// Sets whether a backward pass that this thread starts may use other threads; returns the previous setting.
int32_t od_backward_threads_set(int32_t enabled) OD_NOEXCEPT;

// The identity of a tensor's storage: no other storage has this address while the handle lives.
typedef struct od_storage od_storage;
od_status* od_storage_of(od_tensor tensor, od_storage** out, const void** address) OD_NOEXCEPT;
void od_storage_free(od_storage* storage) OD_NOEXCEPT;
// Counts a change of each tensor, as an in-place operator does.
od_status* od_bump_versions(const od_tensor* tensors, size_t count) OD_NOEXCEPT;
// Copies between host and device on a separate stream, after the work that is queued on the current stream.
// `done` is null for a copy within the host, which has finished on return.
typedef struct od_copy_event od_copy_event;
od_status* od_copy_async(od_tensor from, od_tensor to, od_copy_event** done) OD_NOEXCEPT;
// Makes later work on the device's current stream wait for the event. Does not block the caller.
od_status* od_copy_event_wait(od_copy_event* event, int32_t device_type, int32_t index) OD_NOEXCEPT;
od_status* od_copy_event_synchronize(od_copy_event* event) OD_NOEXCEPT;  // blocks the caller
void od_copy_event_free(od_copy_event* event) OD_NOEXCEPT;
// Makes the stream of those copies this thread's current one, behind the work that is queued on the current stream.
od_status* od_side_stream_enter(int32_t device_type, int32_t index, int64_t* previous) OD_NOEXCEPT;
// Returns to the previous stream; the event is at the end of the side stream's work.
od_status* od_side_stream_leave(int32_t device_type, int32_t index, int64_t previous,
                                od_copy_event** done) OD_NOEXCEPT;
// Keeps the memory of a tensor, when it is freed, until its device's current stream has done its work so far.
od_status* od_record_stream(od_tensor tensor) OD_NOEXCEPT;

// --- dispatch_mode.cpp: every operator that a thread calls --------------------------------------
typedef struct od_dispatched od_dispatched;  // a call in progress
typedef struct od_results od_results;        // the stored results of a call
typedef struct od_dispatch_callbacks {
  od_failure (*before)(od_dispatched* call);
  od_failure (*after)(od_dispatched* call);
} od_dispatch_callbacks;
enum od_operator_flags { OD_MUTATES = 1, OD_ALIASES = 2, OD_RANDOM = 4 };
void od_dispatch_mode_install(const od_dispatch_callbacks* callbacks) OD_NOEXCEPT;
// Sets whether the callbacks are called on this thread; returns the previous setting.
int32_t od_dispatch_mode_listen(int32_t enabled) OD_NOEXCEPT;
const char* od_dispatched_name(const od_dispatched* call, size_t* len) OD_NOEXCEPT;
const char* od_dispatched_overload(const od_dispatched* call, size_t* len) OD_NOEXCEPT;
od_status* od_dispatched_flags(const od_dispatched* call, int32_t* out) OD_NOEXCEPT;
// Sets `out` to 1 if a call that has not run yet has an argument of this name that is true.
od_status* od_dispatched_bool(const od_dispatched* call, const char* name, int32_t* out) OD_NOEXCEPT;
// Passes the tensors among the arguments (before) or the results (after) to `take`, as owned handles.
od_status* od_dispatched_tensors(const od_dispatched* call, void* into,
                                 void (*take)(void* into, od_tensor owned)) OD_NOEXCEPT;
od_status* od_dispatched_keep(const od_dispatched* call, od_results** out) OD_NOEXCEPT;
od_status* od_dispatched_replace(od_dispatched* call, const od_results* by) OD_NOEXCEPT;
od_status* od_results_tensors(const od_results* results, void* into,
                              void (*take)(void* into, od_tensor owned)) OD_NOEXCEPT;
void od_results_free(od_results* results) OD_NOEXCEPT;
// Sets whether the names of this thread's running operators are recorded; returns the previous setting.
int32_t od_operator_names_set(int32_t enabled) OD_NOEXCEPT;
od_status* od_current_operator(char** out) OD_NOEXCEPT;  // the innermost one; empty: none

// --- parallel.cpp -------------------------------------------------------------------------------
typedef void (*od_team_work)(void* self, int32_t thread, int32_t threads);
// Returns the number of threads that a team may have here: 1 inside a parallel region.
int32_t od_parallel_threads(void) OD_NOEXCEPT;
// Calls `work` once on each thread of a team and returns when all have. `work` must not unwind.
void od_parallel(int32_t threads, od_team_work work, void* self) OD_NOEXCEPT;

// --- named_operator.cpp -------------------------------------------------------------------------
typedef struct od_named_body {
  void* self;
  // Passes each result to `push`, which owns it from then on.
  od_failure (*run)(void* self, void* into, void (*push)(void* into, od_tensor owned));
} od_named_body;
// Calls `overdrive::mm` or `overdrive::attention` with `body` as its kernel; `push` receives the results.
od_status* od_named_call(const char* name, const od_tensor* inputs, size_t n_inputs,
                         const od_named_body* body, void* into,
                         void (*push)(void* into, od_tensor owned)) OD_NOEXCEPT;

// --- elements.cpp --------------------------------------------------------------------------------
// The reasons why a tensor has no elements that can be read by address.
enum od_no_elements { OD_OTHER_KIND = -1, OD_SPARSE = -2, OD_LAZY = -3, OD_NO_MEMORY = -4 };
// Returns the address of the first element, and the number of elements, of a CPU tensor of `dtype`
// (at::ScalarType), all of whose elements lie in its storage; or a reason in `count`.
od_status* od_cpu_elements(od_tensor tensor, int64_t dtype, int32_t contiguous, void** data,
                           int64_t* count) OD_NOEXCEPT;
// Returns the address of the data on any device; null for a tensor without a storage.
const void* od_data_address(od_tensor tensor) OD_NOEXCEPT;
// Another handle to the storage of a tensor that has one, which keeps it alive.
typedef struct od_memory od_memory;
od_memory* od_memory_of(od_tensor tensor) OD_NOEXCEPT;
void od_memory_free(od_memory* memory) OD_NOEXCEPT;
// Returns where the storage is now, and its size. It moves when it is resized.
const void* od_memory_address(const od_memory* memory, size_t* bytes) OD_NOEXCEPT;
// Returns the `at::ScalarType` and the bytes of an element, 0 for an undefined tensor.
int32_t od_scalar_type(od_tensor tensor, size_t* bytes) OD_NOEXCEPT;
// Returns libtorch's name of a scalar type, which lives forever.
const char* od_scalar_type_name(int32_t type) OD_NOEXCEPT;

// --- gemm.cpp -----------------------------------------------------------------------------------
int32_t od_onednn_available(void) OD_NOEXCEPT;
// Computes out = beta·out + alpha·left·right for fp32 or bf16 matrices on the CPU, with a contiguous `out`.
od_status* od_onednn_matmul(od_tensor left, od_tensor right, od_tensor out, float beta,
                            float alpha) OD_NOEXCEPT;

// --- autocast.cpp ---------------------------------------------------------------------------------
// `device_type` is a c10::DeviceType, `dtype` an at::ScalarType.
od_status* od_autocast_get(int32_t device_type, int32_t* enabled, int32_t* dtype) OD_NOEXCEPT;
od_status* od_autocast_set(int32_t device_type, int32_t enabled, int32_t dtype) OD_NOEXCEPT;
od_status* od_autocast_cache_get(int32_t* enabled) OD_NOEXCEPT;
od_status* od_autocast_cache_set(int32_t enabled) OD_NOEXCEPT;
od_status* od_autocast_cache_clear(void) OD_NOEXCEPT;
od_status* od_autocast_nesting(int32_t delta, int32_t* depth) OD_NOEXCEPT;

// --- cpu_allocator.cpp ------------------------------------------------------------------------
typedef struct od_memory_stats {
  uint64_t allocated;       // bytes in live allocations
  uint64_t peak_allocated;  // the maximum since the last reset
  uint64_t reserved;        // bytes taken from the system: live, cached and scratch
  uint64_t peak_reserved;
  uint64_t allocations;     // allocations since the start
  uint64_t system_allocations;  // blocks taken from the system since the start
  uint64_t system_releases;     // blocks returned to it
  uint64_t scratch;             // bytes that `od_cpu_memory_count_scratch` counted
} od_memory_stats;
od_status* od_cpu_memory_stats(od_memory_stats* out) OD_NOEXCEPT;
od_status* od_cpu_memory_reset_peak(void) OD_NOEXCEPT;
od_status* od_cpu_memory_empty_cache(void) OD_NOEXCEPT;
od_status* od_cpu_memory_set_limit(uint64_t bytes) OD_NOEXCEPT;  // UINT64_MAX: none
od_status* od_cpu_memory_set_caching(int32_t enabled) OD_NOEXCEPT;
// Counts memory that a kernel keeps outside of the allocator.
void od_cpu_memory_count_scratch(int64_t change) OD_NOEXCEPT;

// --- transfer.cpp -----------------------------------------------------------------------------
// Copies `data`, contiguous elements of an `at::ScalarType` in the shape of `to`, into `to`, without gradients.
// `data` must have `len` bytes. Modes do not see the call, so no handle to the borrowed memory outlives it.
od_status* od_copy_elements(const void* data, size_t len, int64_t dtype, od_tensor to) OD_NOEXCEPT;

// --- device_memory.cpp ------------------------------------------------------------------------
od_status* od_device_memory_stats(int32_t device_type, int32_t index, od_memory_stats* out) OD_NOEXCEPT;
od_status* od_device_memory_reset_peak(int32_t device_type, int32_t index) OD_NOEXCEPT;
od_status* od_device_memory_empty_cache(int32_t device_type) OD_NOEXCEPT;
// The bytes that new tensors can take: those free on the device, and those that the allocator keeps unused.
od_status* od_device_memory_free(int32_t device_type, int32_t index, uint64_t* bytes) OD_NOEXCEPT;

// --- context.cpp ------------------------------------------------------------------------------
od_status* od_matmul_precision_set(const char* precision) OD_NOEXCEPT;  // highest, high, medium
od_status* od_matmul_precision_get(int32_t* precision) OD_NOEXCEPT;     // 0, 1, 2
od_status* od_tf32_get(int32_t* matmul, int32_t* cudnn) OD_NOEXCEPT;
od_status* od_tf32_set(int32_t matmul, int32_t cudnn) OD_NOEXCEPT;
od_status* od_cpu_capability(char** out) OD_NOEXCEPT;
od_status* od_cudnn_version(int64_t* out) OD_NOEXCEPT;
od_status* od_libtorch_version(char** out) OD_NOEXCEPT;

// --- startup.cpp --------------------------------------------------------------------------------
// `state` 0: no CUDA library beside libtorch_cpu, or it is disabled, 1: loaded (or linked), 2: it failed to load.
od_status* od_cuda_library(int32_t* state, char** detail) OD_NOEXCEPT;
od_status* od_cuda_compute_capability(int32_t device, int32_t* major, int32_t* minor) OD_NOEXCEPT;

// --- profiler.cpp -------------------------------------------------------------------------------
// An event in a stream of a device that stores the time. At most one thread may use it at a time.
typedef struct od_event od_event;
od_status* od_event_new(int32_t device_type, od_event** out) OD_NOEXCEPT;
void od_event_free(od_event* event) OD_NOEXCEPT;
od_status* od_event_record(od_event* event, int32_t device_index) OD_NOEXCEPT;  // current stream
od_status* od_event_query(const od_event* event, int32_t* done) OD_NOEXCEPT;
od_status* od_event_wait(const od_event* event) OD_NOEXCEPT;
od_status* od_event_elapsed(const od_event* start, const od_event* end,
                            double* milliseconds) OD_NOEXCEPT;
// A named range of this thread's time; null if no profiler runs. It is ended once, on the same thread.
typedef struct od_range od_range;
od_status* od_range_begin(const char* name, size_t length, od_range** out) OD_NOEXCEPT;
void od_range_end(od_range* range_or_null) OD_NOEXCEPT;
// libtorch's profiler: one profile at a time in a process, started and stopped by one thread.
typedef struct od_profiler_options {
  int32_t cpu;
  int32_t cuda;
  int32_t record_shapes;
  int32_t profile_memory;
  int32_t with_flops;
} od_profiler_options;
typedef struct od_profile od_profile;
typedef struct od_profile_entry {
  const char* name;    // both live as long as the profile
  const char* shapes;  // of the inputs: "[2, 3], [3, 4]"; empty if not recorded
  uint64_t start_ns;   // since 1970
  uint64_t end_ns;
  uint64_t thread;
  uint64_t end_thread;
  uint64_t correlation;
  uint64_t linked_correlation;
  uint64_t flops;
  int64_t bytes;
  int64_t sequence;
  int32_t device_type;
  int32_t device_index;
  int32_t scope;  // at::RecordScope
  int32_t is_async;
  int32_t is_hidden;
} od_profile_entry;
// `cupti` is the error of NVIDIA's profiling library on the way, empty without one; freed with `od_string_free`.
od_status* od_profiler_start(const od_profiler_options* options, char** cupti) OD_NOEXCEPT;
od_status* od_profiler_stop(od_profile** out) OD_NOEXCEPT;
// Marks operators and ranges of this thread for NVIDIA's tools; ended by `od_nvtx_stop` on the same thread.
od_status* od_nvtx_start(int32_t record_shapes) OD_NOEXCEPT;
void od_nvtx_stop(void) OD_NOEXCEPT;
size_t od_profile_len(const od_profile* profile) OD_NOEXCEPT;
od_status* od_profile_event(const od_profile* profile, size_t index, od_profile_entry* out) OD_NOEXCEPT;
od_status* od_profile_start_ns(const od_profile* profile, uint64_t* out) OD_NOEXCEPT;
od_status* od_profile_save(od_profile* profile, const char* path) OD_NOEXCEPT;  // once
void od_profile_free(od_profile* profile) OD_NOEXCEPT;
// The bytes of the resident set of this process, and their maximum.
od_status* od_process_memory(uint64_t* resident, uint64_t* peak_resident) OD_NOEXCEPT;
od_status* od_cuda_identity(int32_t device, char** name, char** pci_bus_id) OD_NOEXCEPT;

#ifdef __cplusplus
}
#endif
