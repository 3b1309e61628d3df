//! TF32 and the precision of fp32 matrix products.
//!
//! TF32 has the range of fp32 and rounds the factors of a matrix product to 10 bits of mantissa. Tensor cores
//! from Ampere on multiply it several times faster than fp32. These are settings of the whole process.

pub use overdrive_sys::matmul::MatmulPrecision;

use overdrive_sys::matmul::{self, Tf32};

use crate::Result;

/// Allows or forbids TF32 in matrix products and convolutions
/// (`torch.backends.cuda.matmul.allow_tf32` and `torch.backends.cudnn.allow_tf32`).
///
/// # Errors
/// Errors of libtorch.
pub fn allow(allowed: bool) -> Result<()> {
    Ok(matmul::set_tf32(Tf32 {
        matmul: allowed,
        cudnn: allowed,
    })?)
}

/// Returns `true` if matrix products may use TF32.
///
/// # Errors
/// Errors of libtorch.
pub fn is_allowed() -> Result<bool> {
    Ok(matmul::tf32()?.matmul)
}

/// Sets the precision of fp32 matrix products (`torch.set_float32_matmul_precision`).
///
/// # Errors
/// Errors of libtorch.
pub fn set_float32_matmul_precision(precision: MatmulPrecision) -> Result<()> {
    Ok(matmul::set_precision(precision)?)
}

/// Returns the precision of fp32 matrix products (`torch.get_float32_matmul_precision`).
///
/// # Errors
/// Errors of libtorch.
pub fn float32_matmul_precision() -> Result<MatmulPrecision> {
    Ok(matmul::precision()?)
}
