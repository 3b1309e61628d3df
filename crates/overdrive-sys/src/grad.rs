//! Setting `tensor.grad`, which tch can only read.

use std::ptr;

use tch::Tensor;

use crate::error::{Result, check};
use crate::ffi;

/// Forgets the gradient, as `tensor.grad = None` in PyTorch (its `zero_grad(set_to_none=True)`):
/// the memory is free until the next backward, which then writes instead of adding.
///
/// # Errors
/// [`crate::Error::Torch`] if libtorch refuses (an undefined tensor).
pub fn clear(tensor: &Tensor) -> Result<()> {
    // SAFETY: the handle is valid while `tensor` is borrowed; the gradient is state behind the
    // handle's shared pointer, as with every in-place operator of tch on a shallow clone.
    let status = unsafe { ffi::od_grad_set(tensor.as_ptr().cast_mut().cast(), ptr::null_mut()) };
    check(status, "clearing a gradient")
}

/// Makes `grad` the gradient of `tensor`; they share memory from then on.
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
