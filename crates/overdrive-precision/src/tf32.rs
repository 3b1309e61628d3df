//! TF32 and the precision of fp32 matrix products.
//!
//! TF32 keeps fp32's range and rounds the factors of a product to 10 bits of mantissa; tensor cores
//! from Ampere on multiply it several times faster than fp32. These are settings of the process.

pub use overdrive_sys::matmul::MatmulPrecision;

use overdrive_sys::matmul::{self, Tf32};

use crate::Result;

/// Allows or forbids TF32 in matrix products and convolutions alike
/// (`torch.backends.cuda.matmul.allow_tf32` and `torch.backends.cudnn.allow_tf32`).
///
/// # Errors
/// Only if libtorch throws.
pub fn allow(allowed: bool) -> Result<()> {
    Ok(matmul::set_tf32(Tf32 {
        matmul: allowed,
        cudnn: allowed,
    })?)
}

/// Whether matrix products may use TF32.
///
/// # Errors
/// Only if libtorch throws.
pub fn is_allowed() -> Result<bool> {
    Ok(matmul::tf32()?.matmul)
}

/// Sets how exactly fp32 products are computed (`torch.set_float32_matmul_precision`).
///
/// # Errors
/// Only if libtorch throws.
pub fn set_float32_matmul_precision(precision: MatmulPrecision) -> Result<()> {
    Ok(matmul::set_precision(precision)?)
}

/// How exactly they are computed (`torch.get_float32_matmul_precision`).
///
/// # Errors
/// Only if libtorch throws.
pub fn float32_matmul_precision() -> Result<MatmulPrecision> {
    Ok(matmul::precision()?)
}
