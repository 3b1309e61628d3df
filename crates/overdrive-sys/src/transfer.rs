//! Copies between host and device, and from memory that no tensor owns.

use std::cell::Cell;
use std::ptr;

use tch::{Device, Kind, Tensor};

use crate::device::{device_index, device_type, scalar_code};
use crate::error::{Error, Result, check};
use crate::ffi;
use crate::function::handle;
use crate::op::{Output, Value, call};

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

    /// Blocks until the copy is done.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] with the error of the device.
    pub fn wait(&self) -> Result<()> {
        if self.raw.is_null() {
            return Ok(());
        }
        // SAFETY: alive with `self`.
        let status = unsafe { ffi::od_copy_event_synchronize(self.raw) };
        check(status, "waiting for a copy")
    }

    /// Returns the event of work that has finished.
    fn done() -> Self {
        Self {
            raw: ptr::null_mut(),
        }
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
/// The copy runs on a separate stream, after the work queued on the current stream so far. The host tensor should be
/// pinned; it must stay alive and unused until the copy is done. A copy between host tensors has finished when this
/// returns.
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

/// Returns an uninitialized tensor in page-locked host memory, from and to which a GPU copies asynchronously.
/// libtorch rounds such memory up to a power of two bytes and keeps it for later tensors.
///
/// # Errors
/// [`crate::Error::Torch`] if there is no GPU or no more such memory.
pub fn empty_pinned(size: &[i64], kind: Kind) -> Result<Tensor> {
    let arguments = [
        Value::Ints(size),
        Value::Kind(kind),
        Value::None,
        Value::Device(Device::Cpu),
        Value::Bool(true),
    ];
    call("aten::empty", "memory_format", &arguments)?
        .remove(0)
        .into_tensor()
}

/// Returns a copy of a CPU tensor in page-locked memory of the current accelerator; the tensor itself if it is
/// already there (`torch.Tensor.pin_memory`).
///
/// tch's method passes a device, which libtorch ignores with a warning in every call.
///
/// # Errors
/// [`Error::Torch`] if there is no GPU, if there is no more such memory, or for a tensor on a device.
pub fn pin_memory(host: &Tensor) -> Result<Tensor> {
    one("aten::pin_memory", "", &[Value::Tensor(host)])
}

/// Returns `true` for a CPU tensor in page-locked memory of the current accelerator (`torch.Tensor.is_pinned`);
/// `false` if there is no accelerator.
///
/// tch's method passes a device, which libtorch ignores with a warning in every call.
///
/// # Errors
/// [`Error::Torch`] with libtorch's error.
pub fn is_pinned(tensor: &Tensor) -> Result<bool> {
    let made = call("aten::is_pinned", "", &[Value::Tensor(tensor)])?;
    Ok(matches!(made.as_slice(), [Output::Bool(true)]))
}

/// Runs `body` with the stream of [`copy_async`] as the current stream of `device`, after the work queued on the
/// current stream so far, and returns its result with the event at the end of its work. Work that reads the result
/// must wait for the event. Tensors that `body` makes belong to that stream: [record](record_stream) each stream that
/// uses one. For a CPU `body` runs unchanged.
///
/// # Errors
/// [`crate::Error::Torch`] with libtorch's error.
pub fn on_side_stream<T>(device: Device, body: impl FnOnce() -> T) -> Result<(T, CopyEvent)> {
    if device == Device::Cpu {
        return Ok((body(), CopyEvent::done()));
    }
    let mut previous = 0;
    // SAFETY: written only on success.
    let status = unsafe {
        ffi::od_side_stream_enter(device_type(device), device_index(device), &raw mut previous)
    };
    check(status, "entering the stream for copies")?;
    let entered = Entered { device, previous };
    let result = body();
    Ok((result, entered.leave()?))
}

/// The side stream as the current one of this thread; dropping it returns to the previous one, also after a panic.
struct Entered {
    device: Device,
    previous: i64,
}

impl Entered {
    fn leave(self) -> Result<CopyEvent> {
        let event = self.restore();
        std::mem::forget(self);
        event
    }

    fn restore(&self) -> Result<CopyEvent> {
        let (kind, index) = (device_type(self.device), device_index(self.device));
        let mut raw = ptr::null_mut();
        // SAFETY: `previous` is the id that entering returned; `raw` is written only on success.
        let status = unsafe { ffi::od_side_stream_leave(kind, index, self.previous, &raw mut raw) };
        check(status, "leaving the stream for copies")?;
        Ok(CopyEvent { raw })
    }
}

impl Drop for Entered {
    fn drop(&mut self) {
        // A destructor cannot report an error.
        let _ = self.restore();
    }
}

/// Keeps the memory of `tensor` from being reused, once its last handle is dropped, until the current stream of its
/// device has done the work queued on it by then (`torch.Tensor.record_stream`). Needed for a tensor that was
/// allocated on another stream. Has no effect for a tensor on the CPU.
///
/// # Errors
/// [`crate::Error::Torch`] with libtorch's error.
pub fn record_stream(tensor: &Tensor) -> Result<()> {
    // SAFETY: the handle is valid while borrowed.
    let status = unsafe { ffi::od_record_stream(handle(tensor)) };
    check(status, "recording a stream")
}

/// Copies the elements of `kind` in `bytes`, in the order of a contiguous tensor of `to`'s shape, into `to`, which
/// may have another dtype, another device and any strides. Gradients are not recorded. No dispatch mode sees the
/// copy, so no tensor of the borrowed bytes outlives this call.
///
/// # Errors
/// [`crate::Error::BadArgument`] if `bytes` has another number of elements than `to` or is not aligned for them, or
/// for `Bool`, because a byte other than 0 and 1 is not a valid bool; libtorch's errors.
pub fn copy_bytes(bytes: &[u8], kind: Kind, to: &Tensor) -> Result<()> {
    let operation = "copying elements";
    let bad = |message: String| Error::BadArgument {
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

thread_local! {
    static COPYING_TO_HOST: Cell<bool> = const { Cell::new(false) };
}

/// Returns a contiguous copy of `tensor` in host memory, which is pinned if the tensor is on a GPU. It waits for all
/// work queued on the device. The copy is one `aten::copy_`.
///
/// A tensor on the CPU is copied too, so that a dispatch mode sees the same reads in a test on a CPU as on a GPU
/// ([`is_copying_to_host`]).
///
/// # Errors
/// [`Error::Torch`] and [`Error::OutOfMemory`] from libtorch.
pub fn to_host(tensor: &Tensor) -> Result<Tensor> {
    let arguments = [
        Value::Ints(&tensor.size()),
        Value::Kind(tensor.f_kind()?),
        Value::None,
        Value::Device(Device::Cpu),
        Value::Bool(tensor.device().is_cuda()),
    ];
    let mut host = one("aten::empty", "memory_format", &arguments)?;
    COPYING_TO_HOST.set(true);
    let copied = host.f_copy_(tensor);
    COPYING_TO_HOST.set(false);
    copied?;
    Ok(host)
}

/// Returns `true` while [`to_host`] copies on this thread.
pub fn is_copying_to_host() -> bool {
    COPYING_TO_HOST.get()
}

/// Returns the elements of a CPU tensor on `device`, without waiting for the work queued on the device: a GPU reads
/// them from pinned memory, in the order of its current stream. A tensor for the CPU is returned as it is.
///
/// # Errors
/// [`Error::Torch`] and [`Error::OutOfMemory`] from libtorch.
pub fn to_device(host: Tensor, device: Device) -> Result<Tensor> {
    match device {
        Device::Cpu => Ok(host),
        // libtorch keeps the pinned block until the stream has read it.
        Device::Cuda(_) => {
            let kind = host.f_kind()?;
            Ok(pin_memory(&host)?.f_to_device_(device, kind, true, false)?)
        }
        _ => Ok(host.f_to_device(device)?),
    }
}

/// Copies the elements of a CPU tensor into `to`, a tensor of the same shape and dtype, without waiting for the work
/// queued on its device: a GPU reads them from pinned memory, in the order of its current stream.
///
/// # Errors
/// [`Error::Torch`] and [`Error::OutOfMemory`] from libtorch.
pub fn copy_to(host: &Tensor, to: &Tensor) -> Result<()> {
    let pinned = match to.device() {
        Device::Cuda(_) => pin_memory(host)?,
        _ => host.shallow_clone(),
    };
    // libtorch keeps the pinned block until the stream has read it.
    let arguments = [Value::Tensor(to), Value::Tensor(&pinned), Value::Bool(true)];
    one("aten::copy_", "", &arguments).map(drop)
}

/// Calls an operator that returns one tensor.
fn one(name: &str, overload: &str, arguments: &[Value<'_>]) -> Result<Tensor> {
    let made = call(name, overload, arguments)?.into_iter().next();
    let made = made.ok_or_else(|| Error::Torch {
        operation: name.to_owned(),
        message: "it returned no tensor".to_owned(),
    })?;
    made.into_tensor()
}
