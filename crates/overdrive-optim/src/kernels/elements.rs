//! The elements of tensors, for kernels.

use overdrive_sys::raw::{self, Element};
use tch::Tensor;

use crate::Result;

/// Returns the elements of a tensor that a step reads: a gradient.
///
/// # Safety
/// No other code writes these elements while the slice lives. Kernels rely on the rule of every in-place operator:
/// the caller of `step` does not touch parameters and gradients until it returns.
pub(super) unsafe fn read<T: Element>(tensor: &Tensor) -> Result<&[T]> {
    // SAFETY: the caller's promise.
    Ok(unsafe { raw::slice(tensor)? })
}

/// Returns the elements of a tensor that a step writes: a parameter or a state tensor.
///
/// # Safety
/// As for [`read`], and no other slice of the same memory lives. The engine has found before the step that
/// parameter, gradient and state of a job share no memory, and one job runs at a time.
#[allow(
    clippy::mut_from_ref,
    reason = "a tensor is a handle: its elements are shared memory, for which the caller vouches"
)]
pub(super) unsafe fn write<T: Element>(tensor: &Tensor) -> Result<&mut [T]> {
    // SAFETY: the caller's promise.
    Ok(unsafe { raw::slice_mut(tensor)? })
}
