//! TF32 and the precision of fp32 matrix products.

use crate::error::{Result, check};
use crate::ffi;

/// How exactly fp32 matrix products are computed (`torch.set_float32_matmul_precision`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MatmulPrecision {
    /// In full fp32.
    Highest,
    /// In TF32 (10 bits of mantissa) where the device has it.
    High,
    /// In bf16 internally where the device has it.
    Medium,
}

/// Sets it for the process.
///
/// # Errors
/// Only if libtorch throws.
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

/// What it is.
///
/// # Errors
/// Only if libtorch throws.
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

/// Where CUDA may use TF32.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tf32 {
    /// In matrix products (`torch.backends.cuda.matmul.allow_tf32`).
    pub matmul: bool,
    /// In cuDNN's convolutions (`torch.backends.cudnn.allow_tf32`).
    pub cudnn: bool,
}

/// Sets it for the process. It changes nothing on devices without TF32.
///
/// # Errors
/// Only if libtorch throws.
pub fn set_tf32(allow: Tf32) -> Result<()> {
    // SAFETY: plain values.
    let status = unsafe { ffi::od_tf32_set(i32::from(allow.matmul), i32::from(allow.cudnn)) };
    check(status, "switching TF32")
}

/// What it is.
///
/// # Errors
/// Only if libtorch throws.
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
