//! Copies between host and device, and from memory that no tensor owns.

use std::ptr;

use tch::{Device, Kind, Tensor};

use crate::device::{device_index, device_type, scalar_code};
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

/// Copies the elements of `kind` in `bytes`, in the order of a contiguous tensor of `to`'s shape, into `to`, which
/// may have another dtype, another device and any strides. Gradients are not recorded. No dispatch mode sees the
/// copy, so no tensor of the borrowed bytes outlives this call.
///
/// # Errors
/// [`crate::Error::BadArgument`] if `bytes` has another number of elements than `to` or is not aligned for them,
/// or for `Bool`, because a byte other than 0 and 1 is no bool; libtorch's errors.
pub fn copy_bytes(bytes: &[u8], kind: Kind, to: &Tensor) -> Result<()> {
    let operation = "copying elements";
    let bad = |message: String| crate::Error::BadArgument {
        operation: operation.to_owned(),
        message,
    };
    if kind == Kind::Bool {
        return Err(bad("copy bytes of bools as Uint8".to_owned()));
    }
    if bytes.as_ptr().align_offset(kind.elt_size_in_bytes()) != 0 {
        return Err(bad(format!("the bytes are not aligned for {kind:?}")));
    }
    // SAFETY: the shim checks that `bytes` has as many elements as `to`, and only reads them; every bit pattern of
    // a kind other than `Bool` is a value.
    let status = unsafe {
        ffi::od_copy_elements(
            bytes.as_ptr().cast(),
            bytes.len(),
            scalar_code(kind),
            handle(to),
        )
    };
    check(status, operation)
}
