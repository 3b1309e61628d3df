//! The version of libtorch and the instruction set of its CPU kernels.

use std::ptr;

use crate::error::{Result, check, take_string};
use crate::ffi;

/// Returns the version of libtorch, such as `2.11.0`.
///
/// # Errors
/// [`crate::Error::Torch`] if libtorch throws.
pub fn libtorch_version() -> Result<String> {
    let mut text = ptr::null_mut();
    // SAFETY: written only on success, and then taken once.
    unsafe {
        check(
            ffi::od_libtorch_version(&raw mut text),
            "reading libtorch's version",
        )?;
        Ok(take_string(text))
    }
}

/// Returns the instruction set that libtorch's CPU kernels use on this machine: `DEFAULT`, `AVX2`, `AVX512`,
/// `NEON`…
///
/// # Errors
/// [`crate::Error::Torch`] if libtorch throws.
pub fn cpu_capability() -> Result<String> {
    let mut text = ptr::null_mut();
    // SAFETY: written only on success, and then taken once.
    unsafe {
        check(
            ffi::od_cpu_capability(&raw mut text),
            "reading the CPU capability",
        )?;
        Ok(take_string(text))
    }
}
