// The C ABI between Overdrive and libtorch.
//
// Rules, kept by every function here:
//  - `noexcept`; the whole body runs inside `guard`, so that no C++ exception leaves it;
//  - it returns null on success, else a status that the caller frees with `od_status_free`;
//  - results go through out-parameters, last in the list, written only on success;
//  - an `od_tensor` is an `at::Tensor*`: borrowed when it comes in, owned by the caller when it
//    goes out (tch frees it).
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
enum od_error_kind { OD_ERROR = 0, OD_OUT_OF_MEMORY = 1, OD_NOT_FOUND = 2, OD_BAD_ARGUMENT = 3 };
int32_t od_status_kind(const od_status* status) OD_NOEXCEPT;
const char* od_status_message(const od_status* status) OD_NOEXCEPT;
void od_status_free(od_status* status) OD_NOEXCEPT;

// --- op.cpp: any operator by its schema name -----------------------------------------------------
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
};
typedef struct od_value {
  int32_t tag;
  int64_t i;
  double f;
  const void* ptr;
  size_t len;
} od_value;
typedef struct od_outputs od_outputs;

od_status* od_op_call(const char* name, const char* overload, const od_value* args, size_t n_args,
                      od_outputs** out) OD_NOEXCEPT;
od_status* od_op_schema(const char* name, const char* overload, char** out) OD_NOEXCEPT;
size_t od_outputs_len(const od_outputs* outputs) OD_NOEXCEPT;
// Reads output `index`: scalars land in `out->i`/`out->f`; for lists `out->len` is the length.
od_status* od_outputs_get(const od_outputs* outputs, size_t index, od_value* out) OD_NOEXCEPT;
// A tensor output, or element `element` of a list of tensors, as a new handle.
od_status* od_outputs_tensor(const od_outputs* outputs, size_t index, size_t element,
                             od_tensor* out) OD_NOEXCEPT;
void od_outputs_free(od_outputs* outputs) OD_NOEXCEPT;
void od_string_free(char* text) OD_NOEXCEPT;

// --- grad.cpp -----------------------------------------------------------------------------------
od_status* od_grad_set(od_tensor tensor, od_tensor grad_or_null) OD_NOEXCEPT;

// --- autocast.cpp ---------------------------------------------------------------------------------
// `device_type` is c10::DeviceType, `dtype` is at::ScalarType, both as integers.
od_status* od_autocast_get(int32_t device_type, int32_t* enabled, int32_t* dtype) OD_NOEXCEPT;
od_status* od_autocast_set(int32_t device_type, int32_t enabled, int32_t dtype) OD_NOEXCEPT;
od_status* od_autocast_cache_get(int32_t* enabled) OD_NOEXCEPT;
od_status* od_autocast_cache_set(int32_t enabled) OD_NOEXCEPT;
od_status* od_autocast_cache_clear(void) OD_NOEXCEPT;
od_status* od_autocast_nesting(int32_t delta, int32_t* depth) OD_NOEXCEPT;

// --- cpu_allocator.cpp ------------------------------------------------------------------------
typedef struct od_memory_stats {
  uint64_t allocated;       // bytes in live allocations
  uint64_t peak_allocated;  // the most there were since the last reset
  uint64_t reserved;        // bytes taken from the system: live and cached
  uint64_t peak_reserved;
  uint64_t allocations;     // allocations since the start
} od_memory_stats;
od_status* od_cpu_memory_stats(od_memory_stats* out) OD_NOEXCEPT;
od_status* od_cpu_memory_reset_peak(void) OD_NOEXCEPT;
od_status* od_cpu_memory_empty_cache(void) OD_NOEXCEPT;
od_status* od_cpu_memory_set_limit(uint64_t bytes) OD_NOEXCEPT;  // UINT64_MAX: none
od_status* od_cpu_memory_set_caching(int32_t enabled) OD_NOEXCEPT;

// --- device_memory.cpp ------------------------------------------------------------------------
od_status* od_device_memory_stats(int32_t device_type, int32_t index, od_memory_stats* out) OD_NOEXCEPT;
od_status* od_device_memory_reset_peak(int32_t device_type, int32_t index) OD_NOEXCEPT;
od_status* od_device_memory_empty_cache(int32_t device_type) OD_NOEXCEPT;

// --- context.cpp ------------------------------------------------------------------------------
od_status* od_matmul_precision_set(const char* precision) OD_NOEXCEPT;  // highest, high, medium
od_status* od_matmul_precision_get(int32_t* precision) OD_NOEXCEPT;     // 0, 1, 2
od_status* od_tf32_get(int32_t* matmul, int32_t* cudnn) OD_NOEXCEPT;
od_status* od_tf32_set(int32_t matmul, int32_t cudnn) OD_NOEXCEPT;
od_status* od_cpu_capability(char** out) OD_NOEXCEPT;
od_status* od_libtorch_version(char** out) OD_NOEXCEPT;

// --- startup.cpp --------------------------------------------------------------------------------
// 0: no CUDA library beside libtorch_cpu, 1: loaded (or linked), 2: there but it failed to load.
od_status* od_cuda_library(int32_t* state, char** detail) OD_NOEXCEPT;
od_status* od_cuda_compute_capability(int32_t device, int32_t* major, int32_t* minor) OD_NOEXCEPT;

#ifdef __cplusplus
}
#endif
