//! The CUDA back end: whether it was loaded, its cuDNN, and the compute capability of its devices.

use std::ptr;
use std::sync::atomic::{AtomicUsize, Ordering};

use tch::{Cuda, Device};

use crate::error::{Result, check, take_string};
use crate::ffi;

/// The number of captures of CUDA graphs under way.
pub(crate) static CAPTURES: AtomicUsize = AtomicUsize::new(0);

/// Returns `true` while any thread of the process captures a CUDA graph. A value that captured work takes from a cache is
/// a constant of the graph.
pub fn is_capturing() -> bool {
    CAPTURES.load(Ordering::SeqCst) > 0
}

/// The state of libtorch's CUDA library since the program started.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CudaLibrary {
    /// This libtorch is a CPU one, or the library was left out on purpose.
    Absent {
        /// The path where it was searched for, or the reason why it was left out.
        detail: String,
    },
    /// It is loaded. `tch::Cuda::is_available()` returns whether there is a GPU.
    Loaded {
        /// Its path.
        path: String,
    },
    /// It exists, but could not be loaded.
    Failed {
        /// The dynamic linker's message, which names the missing library.
        reason: String,
    },
}

/// Returns the state of libtorch's CUDA library.
///
/// # Errors
/// [`crate::Error::OutOfMemory`] if the path or the message cannot be copied.
pub fn library() -> Result<CudaLibrary> {
    let (mut state, mut detail) = (0, ptr::null_mut());
    // SAFETY: both are written only on success; the string is taken once.
    let detail = unsafe {
        check(
            ffi::od_cuda_library(&raw mut state, &raw mut detail),
            "loading the CUDA library",
        )?;
        take_string(detail)
    };
    Ok(match state {
        0 => CudaLibrary::Absent { detail },
        1 => CudaLibrary::Loaded { path: detail },
        _ => CudaLibrary::Failed { reason: detail },
    })
}

/// Returns the version of the cuDNN that libtorch has loaded, such as 91900 for 9.19.
///
/// # Errors
/// [`crate::Error::Torch`] if the CUDA back end is not loaded or has no cuDNN.
pub fn cudnn_version() -> Result<i64> {
    let mut version = 0;
    // SAFETY: written only on success.
    let status = unsafe { ffi::od_cudnn_version(&raw mut version) };
    check(status, "reading the version of cuDNN")?;
    Ok(version)
}

/// Returns the compute capability of a GPU, such as `(9, 0)` for Hopper.
///
/// # Errors
/// [`crate::Error::Torch`] if no CUDA runtime is loaded or there is no such device.
pub fn compute_capability(device: usize) -> Result<(u32, u32)> {
    // An index beyond i32 is no device either: the CUDA runtime refuses it with its own message.
    let index = i32::try_from(device).unwrap_or(i32::MAX);
    let (mut major, mut minor) = (0, 0);
    // SAFETY: both are written only on success.
    let status = unsafe { ffi::od_cuda_compute_capability(index, &raw mut major, &raw mut minor) };
    check(status, "reading the compute capability")?;
    Ok((
        u32::try_from(major).unwrap_or(0),
        u32::try_from(minor).unwrap_or(0),
    ))
}

/// Returns the `result` of an allocation on `device`. If it is an error because this process has no such device, the error
/// says so: libtorch's lists its whole dispatcher, and does not say that it has no CUDA.
///
/// # Errors
/// That of `result`, or [`overdrive_core::Error::InvalidOption`] with the reason why there is no such device.
///
/// ```
/// use overdrive_sys::cuda::on_device;
/// use tch::{Device, Kind, Tensor};
///
/// let zeros = |device| {
///     let zeros = Tensor::f_zeros([2], (Kind::Float, device));
///     on_device(device, zeros.map_err(overdrive_sys::Error::from))
/// };
/// assert!(zeros(Device::Cpu).is_ok());
/// let error = zeros(Device::Cuda(1000)).unwrap_err().to_string();
/// assert!(error.starts_with("`device` is Cuda(1000); it must be a device of this process"));
/// ```
pub fn on_device<T, E: From<overdrive_core::Error>>(
    device: Device,
    result: std::result::Result<T, E>,
) -> std::result::Result<T, E> {
    result.or_else(|error| {
        check_device(device)?;
        Err(error)
    })
}

/// Checks that this process has `device`. Devices other than CUDA's pass.
fn check_device(device: Device) -> overdrive_core::Result<()> {
    let count = Cuda::device_count();
    let index = match device {
        Device::Cuda(index) => i64::try_from(index).unwrap_or(i64::MAX),
        _ => return Ok(()),
    };
    if index < count {
        return Ok(());
    }
    let why = match library() {
        Ok(CudaLibrary::Absent { .. }) => {
            "its libtorch has no CUDA (`cargo xtask setup --cuda` fetches one that has)".to_owned()
        }
        Ok(CudaLibrary::Failed { reason }) => {
            format!("libtorch's CUDA library could not be loaded: {reason}")
        }
        _ => format!("it sees {count} CUDA devices"),
    };
    let expected = format!("a device of this process: {why}");
    let value = format!("{device:?}");
    Err(overdrive_core::Error::option("device", value, expected))
}
