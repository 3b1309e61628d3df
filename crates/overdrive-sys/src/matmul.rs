//! The process-wide settings of libtorch for the precision of fp32 matrix products.

use crate::error::{Result, check};
use crate::ffi;

/// The precision of fp32 matrix products (`torch.set_float32_matmul_precision`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MatmulPrecision {
    /// Full fp32. The default.
    Highest,
    /// TF32 (10 bits of mantissa) on devices that have it.
    High,
    /// bf16 internally on devices that have it.
    Medium,
}

/// Sets the precision for the process.
///
/// # Errors
/// [`crate::Error::Torch`] if libtorch throws.
pub fn set_precision(precision: MatmulPrecision) -> Result<()> {
    let name = match precision {
        MatmulPrecision::Highest => c"highest",
        MatmulPrecision::High => c"high",
        MatmulPrecision::Medium => c"medium",
    };
    // SAFETY: a C string that is static.
    let status = unsafe { ffi::od_matmul_precision_set(name.as_ptr()) };
    check(status, "setting the matmul precision")
}

/// Returns the precision of the process.
///
/// # Errors
/// [`crate::Error::Torch`] if libtorch throws.
pub fn precision() -> Result<MatmulPrecision> {
    let mut code = 0;
    // SAFETY: written only on success.
    let status = unsafe { ffi::od_matmul_precision_get(&raw mut code) };
    check(status, "reading the matmul precision")?;
    Ok(match code {
        0 => MatmulPrecision::Highest,
        1 => MatmulPrecision::High,
        _ => MatmulPrecision::Medium,
    })
}

/// The CUDA operations that may use TF32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tf32 {
    /// If `true`, matrix products use it (`torch.backends.cuda.matmul.allow_tf32`).
    pub matmul: bool,
    /// If `true`, cuDNN's convolutions use it (`torch.backends.cudnn.allow_tf32`).
    pub cudnn: bool,
}

/// Sets the use of TF32 for the process. It has no effect on devices without TF32.
///
/// # Errors
/// [`crate::Error::Torch`] if libtorch throws.
pub fn set_tf32(allow: Tf32) -> Result<()> {
    // SAFETY: plain values.
    let status = unsafe { ffi::od_tf32_set(i32::from(allow.matmul), i32::from(allow.cudnn)) };
    check(status, "switching TF32")
}

/// Returns the use of TF32 in the process.
///
/// # Errors
/// [`crate::Error::Torch`] if libtorch throws.
pub fn tf32() -> Result<Tf32> {
    let (mut matmul, mut cudnn) = (0, 0);
    // SAFETY: written only on success.
    let status = unsafe { ffi::od_tf32_get(&raw mut matmul, &raw mut cudnn) };
    check(status, "reading TF32")?;
    Ok(Tf32 {
        matmul: matmul != 0,
        cudnn: cudnn != 0,
    })
}
