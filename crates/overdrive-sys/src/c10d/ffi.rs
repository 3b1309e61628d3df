//! The declarations of `shim/c10d/c10d.h`, in the same order of fields and arguments; that header documents
//! them.

use std::ffi::c_char;

use crate::ffi::{RawTensor, Status};

#[repr(C)]
pub(super) struct RawStore {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct RawGroup {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct RawWork {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct RawReducer {
    _opaque: [u8; 0],
}

/// `od_collective_kind`.
#[derive(Debug, Clone, Copy)]
#[repr(i32)]
pub(super) enum CollectiveKind {
    AllReduce = 0,
    Broadcast = 1,
    Reduce = 2,
    AllGather = 3,
    ReduceScatter = 4,
    Gather = 5,
    Scatter = 6,
    AllToAll = 7,
    Send = 8,
    Recv = 9,
    Barrier = 10,
}

#[repr(C)]
pub(super) struct RawCollective {
    pub(super) kind: CollectiveKind,
    pub(super) reduce_op: i32,
    pub(super) inputs: *const RawTensor,
    pub(super) n_inputs: usize,
    pub(super) outputs: *const RawTensor,
    pub(super) n_outputs: usize,
    pub(super) root: i64,
    pub(super) tag: i32,
    pub(super) timeout_ms: i64,
}

#[repr(C)]
pub(super) struct RawWatchState {
    pub(super) started: u64,
    pub(super) finished: u64,
    pub(super) failed: i32,
    pub(super) aborted: i32,
    pub(super) failed_number: u64,
    pub(super) recent: *mut c_char,
    pub(super) failed_what: *mut c_char,
    pub(super) failed_text: *mut c_char,
}

#[repr(C)]
pub(super) struct RawReducerOptions {
    pub(super) bucket_bytes: i64,
    pub(super) first_bucket_bytes: i64,
    pub(super) find_unused_parameters: i32,
    pub(super) static_graph: i32,
    pub(super) gradient_as_bucket_view: i32,
    pub(super) compression: i32,
}

unsafe extern "C" {
    pub(super) fn od_store_tcp(
        host: *const c_char,
        port: u16,
        is_server: i32,
        listener: i32,
        timeout_ms: i64,
        out: *mut *mut RawStore,
        out_port: *mut u16,
    ) -> *mut Status;
    pub(super) fn od_store_prefix(
        store: *const RawStore,
        prefix: *const c_char,
        out: *mut *mut RawStore,
    ) -> *mut Status;
    pub(super) fn od_store_clone(store: *const RawStore, out: *mut *mut RawStore) -> *mut Status;
    pub(super) fn od_store_set(
        store: *mut RawStore,
        key: *const c_char,
        value: *const u8,
        len: usize,
    ) -> *mut Status;
    pub(super) fn od_store_get(
        store: *mut RawStore,
        key: *const c_char,
        out: *mut *mut c_char,
        out_len: *mut usize,
    ) -> *mut Status;
    pub(super) fn od_store_compare_set(
        store: *mut RawStore,
        key: *const c_char,
        expected: *const u8,
        expected_len: usize,
        desired: *const u8,
        desired_len: usize,
        out: *mut *mut c_char,
        out_len: *mut usize,
    ) -> *mut Status;
    pub(super) fn od_store_add(
        store: *mut RawStore,
        key: *const c_char,
        amount: i64,
        out: *mut i64,
    ) -> *mut Status;
    pub(super) fn od_store_check(
        store: *mut RawStore,
        keys: *const *const c_char,
        n: usize,
        out: *mut i32,
    ) -> *mut Status;
    pub(super) fn od_store_wait(
        store: *mut RawStore,
        keys: *const *const c_char,
        n: usize,
        timeout_ms: i64,
    ) -> *mut Status;
    pub(super) fn od_store_delete(
        store: *mut RawStore,
        key: *const c_char,
        out: *mut i32,
    ) -> *mut Status;
    pub(super) fn od_store_free(store: *mut RawStore);

    pub(super) fn od_group_gloo(
        store: *const RawStore,
        rank: i32,
        size: i32,
        timeout_ms: i64,
        interface: *const c_char,
        address: *const c_char,
        out: *mut *mut RawGroup,
    ) -> *mut Status;
    pub(super) fn od_group_nccl(
        store: *const RawStore,
        rank: i32,
        size: i32,
        timeout_ms: i64,
        device: i32,
        out: *mut *mut RawGroup,
    ) -> *mut Status;
    pub(super) fn od_group_free(group: *mut RawGroup);
    pub(super) fn od_group_start(
        group: *mut RawGroup,
        collective: *const RawCollective,
        out: *mut *mut RawWork,
    ) -> *mut Status;
    pub(super) fn od_work_wait(work: *mut RawWork, timeout_ms: i64) -> *mut Status;
    pub(super) fn od_work_is_completed(work: *mut RawWork) -> i32;
    pub(super) fn od_work_free(work: *mut RawWork);

    pub(super) fn od_watch_label(group: *mut RawGroup, label: *const c_char) -> *mut Status;
    pub(super) fn od_watch_begin(group: *mut RawGroup);
    pub(super) fn od_watch_poll(
        group: *mut RawGroup,
        wait_ms: i64,
        out: *mut RawWatchState,
    ) -> *mut Status;
    pub(super) fn od_watch_wake(group: *mut RawGroup);
    pub(super) fn od_watch_abort(group: *mut RawGroup, message: *const c_char) -> *mut Status;

    pub(super) fn od_reducer_new(
        group: *mut RawGroup,
        parameters: *const RawTensor,
        names: *const *const c_char,
        n: usize,
        options: *const RawReducerOptions,
        out: *mut *mut RawReducer,
    ) -> *mut Status;
    pub(super) fn od_reducer_prepare_for_forward(reducer: *mut RawReducer) -> *mut Status;
    pub(super) fn od_reducer_rebuild_buckets(
        reducer: *mut RawReducer,
        out_rebuilt: *mut i32,
    ) -> *mut Status;
    pub(super) fn od_reducer_prepare_for_backward(
        reducer: *mut RawReducer,
        outputs: *const RawTensor,
        n: usize,
    ) -> *mut Status;
    pub(super) fn od_reducer_buckets(
        reducer: *mut RawReducer,
        out: *mut i64,
        n: usize,
        out_n: *mut usize,
    ) -> *mut Status;
    pub(super) fn od_reducer_free(reducer: *mut RawReducer);
}
