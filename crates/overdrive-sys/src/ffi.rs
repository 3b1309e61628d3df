//! The C interface of `shim/shim.h`, declaration by declaration.

use std::ffi::{c_char, c_void};

#[repr(C)]
pub(crate) struct Status {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct Outputs {
    _opaque: [u8; 0],
}

pub(crate) type RawTensor = *mut c_void;

pub(crate) const OUT_OF_MEMORY: i32 = 1;
pub(crate) const NOT_FOUND: i32 = 2;
pub(crate) const BAD_ARGUMENT: i32 = 3;

pub(crate) const NONE: i32 = 0;
pub(crate) const TENSOR: i32 = 1;
pub(crate) const TENSORS: i32 = 2;
pub(crate) const INT: i32 = 3;
pub(crate) const FLOAT: i32 = 4;
pub(crate) const BOOL: i32 = 5;
pub(crate) const INTS: i32 = 6;
pub(crate) const FLOATS: i32 = 7;
pub(crate) const STR: i32 = 8;

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawValue {
    pub(crate) tag: i32,
    pub(crate) i: i64,
    pub(crate) f: f64,
    pub(crate) ptr: *const c_void,
    pub(crate) len: usize,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(crate) struct RawMemoryStats {
    pub(crate) allocated: u64,
    pub(crate) peak_allocated: u64,
    pub(crate) reserved: u64,
    pub(crate) peak_reserved: u64,
    pub(crate) allocations: u64,
}

unsafe extern "C" {
    pub(crate) fn od_status_kind(status: *const Status) -> i32;
    pub(crate) fn od_status_message(status: *const Status) -> *const c_char;
    pub(crate) fn od_status_free(status: *mut Status);
    pub(crate) fn od_string_free(text: *mut c_char);

    pub(crate) fn od_op_call(
        name: *const c_char,
        overload: *const c_char,
        args: *const RawValue,
        n_args: usize,
        out: *mut *mut Outputs,
    ) -> *mut Status;
    pub(crate) fn od_op_schema(
        name: *const c_char,
        overload: *const c_char,
        out: *mut *mut c_char,
    ) -> *mut Status;
    pub(crate) fn od_outputs_len(outputs: *const Outputs) -> usize;
    pub(crate) fn od_outputs_get(
        outputs: *const Outputs,
        index: usize,
        out: *mut RawValue,
    ) -> *mut Status;
    pub(crate) fn od_outputs_tensor(
        outputs: *const Outputs,
        index: usize,
        element: usize,
        out: *mut RawTensor,
    ) -> *mut Status;
    pub(crate) fn od_outputs_free(outputs: *mut Outputs);

    pub(crate) fn od_grad_set(tensor: RawTensor, grad_or_null: RawTensor) -> *mut Status;

    pub(crate) fn od_autocast_get(
        device_type: i32,
        enabled: *mut i32,
        dtype: *mut i32,
    ) -> *mut Status;
    pub(crate) fn od_autocast_set(device_type: i32, enabled: i32, dtype: i32) -> *mut Status;
    pub(crate) fn od_autocast_cache_get(enabled: *mut i32) -> *mut Status;
    pub(crate) fn od_autocast_cache_set(enabled: i32) -> *mut Status;
    pub(crate) fn od_autocast_cache_clear() -> *mut Status;
    pub(crate) fn od_autocast_nesting(delta: i32, depth: *mut i32) -> *mut Status;

    pub(crate) fn od_cpu_memory_stats(out: *mut RawMemoryStats) -> *mut Status;
    pub(crate) fn od_cpu_memory_reset_peak() -> *mut Status;
    pub(crate) fn od_cpu_memory_empty_cache() -> *mut Status;
    pub(crate) fn od_cpu_memory_set_limit(bytes: u64) -> *mut Status;
    pub(crate) fn od_cpu_memory_set_caching(enabled: i32) -> *mut Status;

    pub(crate) fn od_device_memory_stats(
        device_type: i32,
        index: i32,
        out: *mut RawMemoryStats,
    ) -> *mut Status;
    pub(crate) fn od_device_memory_reset_peak(device_type: i32, index: i32) -> *mut Status;
    pub(crate) fn od_device_memory_empty_cache(device_type: i32) -> *mut Status;

    pub(crate) fn od_matmul_precision_set(precision: *const c_char) -> *mut Status;
    pub(crate) fn od_matmul_precision_get(precision: *mut i32) -> *mut Status;
    pub(crate) fn od_tf32_get(matmul: *mut i32, cudnn: *mut i32) -> *mut Status;
    pub(crate) fn od_tf32_set(matmul: i32, cudnn: i32) -> *mut Status;
    pub(crate) fn od_cpu_capability(out: *mut *mut c_char) -> *mut Status;
    pub(crate) fn od_libtorch_version(out: *mut *mut c_char) -> *mut Status;

    pub(crate) fn od_cuda_compute_capability(
        device: i32,
        major: *mut i32,
        minor: *mut i32,
    ) -> *mut Status;
    pub(crate) fn od_cuda_library(state: *mut i32, detail: *mut *mut c_char) -> *mut Status;
}
