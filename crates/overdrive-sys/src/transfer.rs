//! Asynchronous copies between host and device.

use std::ptr;

use tch::{Device, Tensor};

use crate::device::{device_index, device_type};
use crate::error::{Result, check};
use crate::ffi;
use crate::function::handle;

/// The event at the end of an asynchronous copy.
#[derive(Debug)]
pub struct CopyEvent {
    /// Null for a copy within the host, which has already finished.
    raw: *mut ffi::RawCopyEvent,
}

// SAFETY: an event handle of the device, which libtorch's events let any thread wait for.
unsafe impl Send for CopyEvent {}

impl CopyEvent {
    /// Makes later work on `device`'s current stream wait for the copy. Does not block the caller.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] with the error of the device.
    pub fn wait_on(&self, device: Device) -> Result<()> {
        if self.raw.is_null() {
            return Ok(());
        }
        // SAFETY: alive with `self`.
        let status =
            unsafe { ffi::od_copy_event_wait(self.raw, device_type(device), device_index(device)) };
        check(status, "waiting for a copy")
    }
}

impl Drop for CopyEvent {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once; null is allowed.
        unsafe { ffi::od_copy_event_free(self.raw) }
    }
}

/// Copies `from` into `to`, tensors of the same shape and dtype of which one is on the host and one on a
/// device.
///
/// The copy runs on a separate stream, after the work that the current stream has been given so far. The host
/// tensor should be pinned; it must stay alive and unused until the copy is done. A copy between host tensors
/// has finished when this returns.
///
/// # Errors
/// [`crate::Error::Torch`] with libtorch's error.
pub fn copy_async(from: &Tensor, to: &Tensor) -> Result<CopyEvent> {
    let mut raw = ptr::null_mut();
    // SAFETY: the handles are valid while borrowed; `to` is written as by an in-place operator on a
    // shallow clone.
    let status = unsafe { ffi::od_copy_async(handle(from), handle(to), &raw mut raw) };
    check(status, "copying between host and device")?;
    Ok(CopyEvent { raw })
}
