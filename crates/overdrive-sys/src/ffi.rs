//! The declarations of `shim/shim.h`, in the same order of fields and arguments. `shim/shim.h` documents
//! them.

use std::ffi::{c_char, c_void};

// Types with `_opaque` exist only behind pointers that the shim returns; Rust can neither create nor copy
// them. Booleans are `i32`, because C++ does not fix the size of `bool`.
#[repr(C)]
pub(crate) struct Status {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct Outputs {
    _opaque: [u8; 0],
}

pub(crate) type RawTensor = *mut c_void;

// od_error_kind.
pub(crate) const OUT_OF_MEMORY: i32 = 1;
pub(crate) const NOT_FOUND: i32 = 2;
pub(crate) const BAD_ARGUMENT: i32 = 3;
pub(crate) const RUST: i32 = 4;

// od_tag.
pub(crate) const NONE: i32 = 0;
pub(crate) const TENSOR: i32 = 1;
pub(crate) const TENSORS: i32 = 2;
pub(crate) const INT: i32 = 3;
pub(crate) const FLOAT: i32 = 4;
pub(crate) const BOOL: i32 = 5;
pub(crate) const INTS: i32 = 6;
pub(crate) const FLOATS: i32 = 7;
pub(crate) const STR: i32 = 8;
pub(crate) const BOOLS: i32 = 9;
pub(crate) const DEVICE: i32 = 10;

// A struct and not a union: a call has few arguments, so the size does not matter, and reading a field
// is safe whatever the tag.
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
    pub(crate) system_allocations: u64,
    pub(crate) system_releases: u64,
    pub(crate) scratch: u64,
}

#[repr(C)]
pub(crate) struct RawFailure {
    pub(crate) payload: *mut c_void,
    pub(crate) message: *const c_char,
    pub(crate) message_len: usize,
    pub(crate) release: unsafe extern "C" fn(*mut c_void),
}

#[repr(C)]
pub(crate) struct RawClosure {
    pub(crate) self_: *mut c_void,
    pub(crate) drop: unsafe extern "C" fn(*mut c_void),
}

#[repr(C)]
pub(crate) struct RawBackwardCall {
    pub(crate) gradients: *const RawTensor,
    pub(crate) n_gradients: usize,
    pub(crate) saved: *const RawTensor,
    pub(crate) n_saved: usize,
    pub(crate) needs_input_grad: *const u8,
    pub(crate) out: *mut RawTensor,
    pub(crate) n_out: usize,
}

pub(crate) type RawBackward =
    unsafe extern "C" fn(*mut c_void, *const RawBackwardCall) -> RawFailure;

#[repr(C)]
pub(crate) struct RawFunction {
    pub(crate) name: *const c_char,
    pub(crate) name_len: usize,
    pub(crate) inputs: *const RawTensor,
    pub(crate) n_inputs: usize,
    pub(crate) outputs: *const RawTensor,
    pub(crate) n_outputs: usize,
    pub(crate) saved: *const RawTensor,
    pub(crate) n_saved: usize,
    pub(crate) dirty: *const usize,
    pub(crate) n_dirty: usize,
    pub(crate) non_differentiable: *const usize,
    pub(crate) n_non_differentiable: usize,
    pub(crate) materialize_grads: i32,
    pub(crate) twice_differentiable: i32,
}

#[repr(C)]
pub(crate) struct RawHook {
    _opaque: [u8; 0],
}

pub(crate) type RawHookCall =
    unsafe extern "C" fn(*mut c_void, RawTensor, *mut RawTensor) -> RawFailure;

#[repr(C)]
pub(crate) struct Event {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct Range {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct Profile {
    _opaque: [u8; 0],
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawProfilerOptions {
    pub(crate) cpu: i32,
    pub(crate) cuda: i32,
    pub(crate) record_shapes: i32,
    pub(crate) profile_memory: i32,
    pub(crate) with_flops: i32,
}

#[repr(C)]
#[derive(Clone, Copy)]
pub(crate) struct RawProfileEntry {
    pub(crate) name: *const c_char,
    pub(crate) shapes: *const c_char,
    pub(crate) start_ns: u64,
    pub(crate) end_ns: u64,
    pub(crate) thread: u64,
    pub(crate) end_thread: u64,
    pub(crate) correlation: u64,
    pub(crate) linked_correlation: u64,
    pub(crate) flops: u64,
    pub(crate) bytes: i64,
    pub(crate) sequence: i64,
    pub(crate) device_type: i32,
    pub(crate) device_index: i32,
    pub(crate) scope: i32,
    pub(crate) is_async: i32,
    pub(crate) is_hidden: i32,
}

// Not derived: the shim's strings are never null, so the default has empty ones.
impl Default for RawProfileEntry {
    fn default() -> Self {
        Self {
            name: c"".as_ptr(),
            shapes: c"".as_ptr(),
            start_ns: 0,
            end_ns: 0,
            thread: 0,
            end_thread: 0,
            correlation: 0,
            linked_correlation: 0,
            flops: 0,
            bytes: 0,
            sequence: 0,
            device_type: 0,
            device_index: 0,
            scope: 0,
            is_async: 0,
            is_hidden: 0,
        }
    }
}

#[repr(C)]
pub(crate) struct RawSavedTensorCallbacks {
    pub(crate) pack: unsafe extern "C" fn(RawTensor, i32, *mut *mut c_void) -> RawFailure,
    pub(crate) unpack: unsafe extern "C" fn(*mut c_void, *mut RawTensor) -> RawFailure,
    pub(crate) drop: unsafe extern "C" fn(*mut c_void),
}

#[repr(C)]
pub(crate) struct RawSavedVariable {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct RawStorage {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct RawMemory {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct RawCopyEvent {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct RawDispatched {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct RawResults {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(crate) struct RawDispatchCallbacks {
    pub(crate) before: unsafe extern "C" fn(*mut RawDispatched) -> RawFailure,
    pub(crate) after: unsafe extern "C" fn(*mut RawDispatched) -> RawFailure,
}

// od_no_elements.
pub(crate) const OTHER_KIND: i64 = -1;
pub(crate) const SPARSE: i64 = -2;
pub(crate) const LAZY: i64 = -3;

// od_operator_flags, a bit set.
pub(crate) const MUTATES: i32 = 1;
pub(crate) const ALIASES: i32 = 2;
pub(crate) const RANDOM: i32 = 4;

#[repr(C)]
pub(crate) struct RawNamedBody {
    pub(crate) self_: *mut c_void,
    pub(crate) run: unsafe extern "C" fn(*mut c_void, *mut c_void, RawPush) -> RawFailure,
}

pub(crate) type RawPush = unsafe extern "C" fn(*mut c_void, RawTensor);

unsafe extern "C" {
    pub(crate) fn od_named_call(
        name: *const c_char,
        inputs: *const RawTensor,
        n_inputs: usize,
        body: *const RawNamedBody,
        into: *mut c_void,
        push: RawPush,
    ) -> *mut Status;
    pub(crate) fn od_status_kind(status: *const Status) -> i32;
    pub(crate) fn od_status_payload(status: *const Status) -> *mut c_void;
    pub(crate) fn od_status_message(status: *const Status) -> *const c_char;
    pub(crate) fn od_status_free(status: *mut Status);
    pub(crate) fn od_string_free(text: *mut c_char);

    pub(crate) fn od_op_call(
        name: *const c_char,
        overload: *const c_char,
        args: *const RawValue,
        n_args: usize,
        fused: i32,
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

    pub(crate) fn od_function_record(
        function: *const RawFunction,
        closure: RawClosure,
        backward: RawBackward,
        out: *mut RawTensor,
    ) -> *mut Status;

    pub(crate) fn od_hook_register(
        tensor: RawTensor,
        closure: RawClosure,
        call: RawHookCall,
        out: *mut *mut RawHook,
    ) -> *mut Status;
    pub(crate) fn od_hook_register_post_accumulate(
        tensor: RawTensor,
        closure: RawClosure,
        call: RawHookCall,
        out: *mut *mut RawHook,
    ) -> *mut Status;
    pub(crate) fn od_hook_remove(hook: *mut RawHook) -> *mut Status;
    pub(crate) fn od_hook_free(hook: *mut RawHook);

    pub(crate) fn od_backward(
        outputs: *const RawTensor,
        gradients: *const RawTensor,
        n: usize,
        inputs: *const RawTensor,
        n_inputs: usize,
        retain_graph: i32,
        create_graph: i32,
    ) -> *mut Status;
    pub(crate) fn od_grad(
        outputs: *const RawTensor,
        gradients: *const RawTensor,
        n: usize,
        inputs: *const RawTensor,
        n_inputs: usize,
        retain_graph: i32,
        create_graph: i32,
        allow_unused: i32,
        out: *mut RawTensor,
    ) -> *mut Status;
    pub(crate) fn od_grad_mode_get() -> i32;
    pub(crate) fn od_grad_mode_set(enabled: i32);
    pub(crate) fn od_inference_mode_enter(enabled: i32, out: *mut *mut c_void) -> *mut Status;
    pub(crate) fn od_inference_mode_exit(guard: *mut c_void);
    pub(crate) fn od_inference_mode_get() -> i32;
    pub(crate) fn od_is_inference(tensor: RawTensor) -> i32;
    pub(crate) fn od_random_state_get(
        device_type: i32,
        index: i32,
        out: *mut RawTensor,
    ) -> *mut Status;
    pub(crate) fn od_random_state_set(
        device_type: i32,
        index: i32,
        state: RawTensor,
    ) -> *mut Status;
    pub(crate) fn od_random_seed(device_type: i32, index: i32, seed: u64) -> *mut Status;

    pub(crate) fn od_saved_tensors_install(callbacks: *const RawSavedTensorCallbacks);
    pub(crate) fn od_saved_tensors_set_depth(depth: i32) -> *mut Status;
    pub(crate) fn od_saved_variable_new(
        tensor: RawTensor,
        out: *mut *mut RawSavedVariable,
    ) -> *mut Status;
    pub(crate) fn od_saved_variable_unpack(
        saved: *const RawSavedVariable,
        out: *mut RawTensor,
    ) -> *mut Status;
    pub(crate) fn od_saved_variable_free(saved: *mut RawSavedVariable);
    pub(crate) fn od_graph_task_id() -> i32;
    pub(crate) fn od_backward_threads_set(enabled: i32) -> i32;

    pub(crate) fn od_storage_of(
        tensor: RawTensor,
        out: *mut *mut RawStorage,
        address: *mut *const c_void,
    ) -> *mut Status;
    pub(crate) fn od_storage_free(storage: *mut RawStorage);
    pub(crate) fn od_bump_versions(tensors: *const RawTensor, count: usize) -> *mut Status;
    pub(crate) fn od_copy_async(
        from: RawTensor,
        to: RawTensor,
        done: *mut *mut RawCopyEvent,
    ) -> *mut Status;
    pub(crate) fn od_copy_event_wait(
        event: *mut RawCopyEvent,
        device_type: i32,
        index: i32,
    ) -> *mut Status;
    pub(crate) fn od_copy_event_synchronize(event: *mut RawCopyEvent) -> *mut Status;
    pub(crate) fn od_copy_event_free(event: *mut RawCopyEvent);
    pub(crate) fn od_side_stream_enter(
        device_type: i32,
        index: i32,
        previous: *mut i64,
    ) -> *mut Status;
    pub(crate) fn od_side_stream_leave(
        device_type: i32,
        index: i32,
        previous: i64,
        done: *mut *mut RawCopyEvent,
    ) -> *mut Status;
    pub(crate) fn od_record_stream(tensor: RawTensor) -> *mut Status;

    pub(crate) fn od_dispatch_mode_install(callbacks: *const RawDispatchCallbacks);
    pub(crate) fn od_dispatch_mode_listen(enabled: i32) -> i32;
    pub(crate) fn od_dispatched_name(call: *const RawDispatched, len: *mut usize) -> *const c_char;
    pub(crate) fn od_dispatched_overload(
        call: *const RawDispatched,
        len: *mut usize,
    ) -> *const c_char;
    pub(crate) fn od_dispatched_flags(call: *const RawDispatched, out: *mut i32) -> *mut Status;
    pub(crate) fn od_dispatched_bool(
        call: *const RawDispatched,
        name: *const c_char,
        out: *mut i32,
    ) -> *mut Status;
    pub(crate) fn od_dispatched_tensors(
        call: *const RawDispatched,
        into: *mut c_void,
        take: unsafe extern "C" fn(*mut c_void, RawTensor),
    ) -> *mut Status;
    pub(crate) fn od_dispatched_keep(
        call: *const RawDispatched,
        out: *mut *mut RawResults,
    ) -> *mut Status;
    pub(crate) fn od_dispatched_replace(
        call: *mut RawDispatched,
        by: *const RawResults,
    ) -> *mut Status;
    pub(crate) fn od_results_tensors(
        results: *const RawResults,
        into: *mut c_void,
        take: unsafe extern "C" fn(*mut c_void, RawTensor),
    ) -> *mut Status;
    pub(crate) fn od_results_free(results: *mut RawResults);
    pub(crate) fn od_operator_names_set(enabled: i32) -> i32;
    pub(crate) fn od_current_operator(out: *mut *mut c_char) -> *mut Status;

    pub(crate) fn od_parallel_threads() -> i32;
    pub(crate) fn od_parallel(
        threads: i32,
        work: unsafe extern "C" fn(*mut c_void, i32, i32),
        self_: *mut c_void,
    );

    pub(crate) fn od_cpu_elements(
        tensor: RawTensor,
        dtype: i64,
        contiguous: i32,
        data: *mut *mut c_void,
        count: *mut i64,
    ) -> *mut Status;

    pub(crate) fn od_data_address(tensor: RawTensor) -> *const c_void;
    pub(crate) fn od_memory_of(tensor: RawTensor) -> *mut RawMemory;
    pub(crate) fn od_memory_free(memory: *mut RawMemory);
    pub(crate) fn od_memory_address(memory: *const RawMemory, bytes: *mut usize) -> *const c_void;
    pub(crate) fn od_scalar_type(tensor: RawTensor, bytes: *mut usize) -> i32;
    pub(crate) fn od_scalar_type_name(scalar_type: i32) -> *const c_char;

    pub(crate) fn od_onednn_available() -> i32;
    pub(crate) fn od_onednn_matmul(
        left: RawTensor,
        right: RawTensor,
        out: RawTensor,
        beta: f32,
        alpha: f32,
    ) -> *mut Status;

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
    pub(crate) fn od_cpu_memory_count_scratch(change: i64);

    pub(crate) fn od_copy_elements(
        data: *const c_void,
        len: usize,
        dtype: i64,
        to: RawTensor,
    ) -> *mut Status;

    pub(crate) fn od_device_memory_stats(
        device_type: i32,
        index: i32,
        out: *mut RawMemoryStats,
    ) -> *mut Status;
    pub(crate) fn od_device_memory_reset_peak(device_type: i32, index: i32) -> *mut Status;
    pub(crate) fn od_device_memory_empty_cache(device_type: i32) -> *mut Status;
    pub(crate) fn od_device_memory_free(
        device_type: i32,
        index: i32,
        bytes: *mut u64,
    ) -> *mut Status;

    pub(crate) fn od_matmul_precision_set(precision: *const c_char) -> *mut Status;
    pub(crate) fn od_matmul_precision_get(precision: *mut i32) -> *mut Status;
    pub(crate) fn od_tf32_get(matmul: *mut i32, cudnn: *mut i32) -> *mut Status;
    pub(crate) fn od_tf32_set(matmul: i32, cudnn: i32) -> *mut Status;
    pub(crate) fn od_cpu_capability(out: *mut *mut c_char) -> *mut Status;
    pub(crate) fn od_cudnn_version(out: *mut i64) -> *mut Status;
    pub(crate) fn od_libtorch_version(out: *mut *mut c_char) -> *mut Status;

    pub(crate) fn od_cuda_compute_capability(
        device: i32,
        major: *mut i32,
        minor: *mut i32,
    ) -> *mut Status;
    pub(crate) fn od_cuda_library(state: *mut i32, detail: *mut *mut c_char) -> *mut Status;

    pub(crate) fn od_event_new(device_type: i32, out: *mut *mut Event) -> *mut Status;
    pub(crate) fn od_event_free(event: *mut Event);
    pub(crate) fn od_event_record(event: *mut Event, device_index: i32) -> *mut Status;
    pub(crate) fn od_event_query(event: *const Event, done: *mut i32) -> *mut Status;
    pub(crate) fn od_event_wait(event: *const Event) -> *mut Status;
    pub(crate) fn od_event_elapsed(
        start: *const Event,
        end: *const Event,
        milliseconds: *mut f64,
    ) -> *mut Status;
    pub(crate) fn od_range_begin(
        name: *const c_char,
        length: usize,
        out: *mut *mut Range,
    ) -> *mut Status;
    pub(crate) fn od_range_end(range: *mut Range);
    pub(crate) fn od_profiler_start(
        options: *const RawProfilerOptions,
        cupti: *mut *mut c_char,
    ) -> *mut Status;
    pub(crate) fn od_profiler_stop(out: *mut *mut Profile) -> *mut Status;
    pub(crate) fn od_nvtx_start(record_shapes: i32) -> *mut Status;
    pub(crate) fn od_nvtx_stop();
    pub(crate) fn od_profile_len(profile: *const Profile) -> usize;
    pub(crate) fn od_profile_event(
        profile: *const Profile,
        index: usize,
        out: *mut RawProfileEntry,
    ) -> *mut Status;
    pub(crate) fn od_profile_start_ns(profile: *const Profile, out: *mut u64) -> *mut Status;
    pub(crate) fn od_profile_save(profile: *mut Profile, path: *const c_char) -> *mut Status;
    pub(crate) fn od_profile_free(profile: *mut Profile);
    pub(crate) fn od_process_memory(resident: *mut u64, peak_resident: *mut u64) -> *mut Status;
    pub(crate) fn od_cuda_identity(
        device: i32,
        name: *mut *mut c_char,
        pci_bus_id: *mut *mut c_char,
    ) -> *mut Status;
}
