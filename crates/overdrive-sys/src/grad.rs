//! Setters for `tensor.grad`, which tch can only read.

use std::ptr;

use tch::Tensor;

use crate::error::{Result, check};
use crate::ffi;

/// Drops the gradient, as `tensor.grad = None` in PyTorch (`zero_grad(set_to_none=True)`). Its memory is
/// freed, and the next backward pass writes the gradient instead of adding to it.
///
/// # Errors
/// [`crate::Error::Torch`] for an undefined tensor.
pub fn clear(tensor: &Tensor) -> Result<()> {
    // SAFETY: the handle is valid while `tensor` is borrowed; the gradient is state behind the
    // handle's shared pointer, as with every in-place operator of tch on a shallow clone.
    let status = unsafe { ffi::od_grad_set(tensor.as_ptr().cast_mut().cast(), ptr::null_mut()) };
    check(status, "clearing a gradient")
}

/// Sets `tensor.grad` to `grad`; the gradient shares memory with `grad`.
///
/// # Errors
/// [`crate::Error::Torch`] if shape, dtype or device differ.
pub fn set(tensor: &Tensor, grad: &Tensor) -> Result<()> {
    // SAFETY: as in `clear`; the shim copies the handle of `grad`.
    let status = unsafe {
        ffi::od_grad_set(
            tensor.as_ptr().cast_mut().cast(),
            grad.as_ptr().cast_mut().cast(),
        )
    };
    check(status, "setting a gradient")
}
