//! Whether the CUDA back end is there.

use std::ptr;

use crate::error::{Result, check, take_string};
use crate::ffi;

/// What became of libtorch's CUDA library when the program started.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum CudaLibrary {
    /// This libtorch is a CPU one, or the library was left out on purpose.
    Absent {
        /// Where it was looked for, or why it was left out.
        detail: String,
    },
    /// It is loaded; whether there is a GPU is `tch::Cuda::is_available()`.
    Loaded {
        /// Its path.
        path: String,
    },
    /// It is there, but could not be loaded.
    Failed {
        /// The dynamic linker's words, which name the library that is missing.
        reason: String,
    },
}

/// What became of it.
///
/// # Errors
/// Only if there is no memory left for the answer.
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

/// The compute capability of a GPU, such as `(9, 0)` for Hopper.
///
/// # Errors
/// [`crate::Error::Torch`] if no CUDA runtime is loaded or there is no such device.
pub fn compute_capability(device: usize) -> Result<(u32, u32)> {
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
