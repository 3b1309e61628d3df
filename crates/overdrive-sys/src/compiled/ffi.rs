//! The declarations of `shim/compiled/compiled.h`, in the same order of arguments; that header documents
//! them.

use std::ffi::{c_char, c_void};

use crate::ffi::{RawPush, RawTensor, Status};

#[repr(C)]
pub(super) struct RawPackage {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct RawGraph {
    _opaque: [u8; 0],
}

pub(super) type RawTakeConstant = unsafe extern "C" fn(*mut c_void, *const c_char, *const c_void);

unsafe extern "C" {
    pub(super) fn od_package_name_libtorch(library: *const u8, len: usize) -> *mut Status;
    pub(super) fn od_package_open(
        path: *const c_char,
        model: *const c_char,
        single_threaded: i32,
        runners: usize,
        device_index: i32,
        out: *mut *mut RawPackage,
    ) -> *mut Status;
    pub(super) fn od_package_free(package: *mut RawPackage);
    pub(super) fn od_package_call_spec(
        package: *mut RawPackage,
        inputs: *mut *mut c_char,
        outputs: *mut *mut c_char,
    ) -> *mut Status;
    pub(super) fn od_package_run(
        package: *mut RawPackage,
        inputs: *const RawTensor,
        n: usize,
        into: *mut c_void,
        push: RawPush,
    ) -> *mut Status;
    pub(super) fn od_package_constants(
        package: *mut RawPackage,
        readable: i32,
        into: *mut c_void,
        take: RawTakeConstant,
    ) -> *mut Status;
    pub(super) fn od_package_prepare(
        package: *mut RawPackage,
        names: *const *const c_char,
        tensors: *const RawTensor,
        n: usize,
        share: i32,
    ) -> *mut Status;
    pub(super) fn od_package_commit(package: *mut RawPackage) -> *mut Status;

    pub(super) fn od_graph_new(device_index: i32, out: *mut *mut RawGraph) -> *mut Status;
    pub(super) fn od_graph_free(graph: *mut RawGraph);
    pub(super) fn od_graph_enter(graph: *mut RawGraph) -> *mut Status;
    pub(super) fn od_graph_leave(graph: *mut RawGraph) -> *mut Status;
    pub(super) fn od_graph_begin(graph: *mut RawGraph, pool_of: *const RawGraph) -> *mut Status;
    pub(super) fn od_graph_end(graph: *mut RawGraph, pool_bytes: *mut u64) -> *mut Status;
    pub(super) fn od_graph_abort(graph: *mut RawGraph);
    pub(super) fn od_graph_replay(graph: *mut RawGraph) -> *mut Status;
    pub(super) fn od_graph_synchronize(graph: *mut RawGraph) -> *mut Status;
    pub(super) fn od_graph_symbols() -> *mut Status;
}
