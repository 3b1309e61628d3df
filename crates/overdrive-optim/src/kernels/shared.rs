//! Tensors as memory that several threads write in parts.

use std::marker::PhantomData;
use std::ops::Range;

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use overdrive_sys::raw::{self, Element};
use tch::{Kind, Tensor};

use crate::Result;

/// A floating-point element that kernels widen to float32 and narrow back.
pub(crate) trait Real: Element {
    fn widen(from: &[Self], to: &mut [f32]);
    fn narrow(from: &[f32], to: &mut [Self]);
}

impl Real for f32 {
    #[inline(always)]
    fn widen(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
    #[inline(always)]
    fn narrow(from: &[f32], to: &mut [f32]) {
        to.copy_from_slice(from);
    }
}

macro_rules! half_precision {
    ($($type:ty),*) => {$(
        impl Real for $type {
            fn widen(from: &[Self], to: &mut [f32]) {
                from.convert_to_f32_slice(to);
            }
            fn narrow(from: &[f32], to: &mut [Self]) {
                to.convert_from_f32_slice(from);
            }
        }
    )*};
}
half_precision!(f16, bf16);

/// Elements that threads write in ranges that do not overlap.
#[derive(Clone, Copy)]
pub(super) struct Shared<'a, T> {
    pointer: *mut T,
    len: usize,
    life: PhantomData<&'a mut [T]>,
}

// SAFETY: the elements are Send, and `range` makes its caller vouch that no two threads have the same.
unsafe impl<T: Send> Sync for Shared<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Send for Shared<'_, T> {}

impl<'a, T> Shared<'a, T> {
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Self {
            pointer: slice.as_mut_ptr(),
            len: slice.len(),
            life: PhantomData,
        }
    }

    /// # Safety
    /// No two slices that live at the same time may overlap.
    #[allow(
        clippy::mut_from_ref,
        reason = "the caller vouches for disjoint ranges"
    )]
    pub(super) unsafe fn range(&self, range: Range<usize>) -> &mut [T] {
        assert!(range.start <= range.end && range.end <= self.len);
        // SAFETY: within the slice it was made from, which is borrowed for 'a; disjoint by the
        // caller's word.
        unsafe { std::slice::from_raw_parts_mut(self.pointer.add(range.start), range.len()) }
    }
}

/// Calls `$body` with the element type of a tensor of kind Float, Half or BFloat16; `None` for others.
macro_rules! with_elements {
    ($kind:expr, $type:ident => $body:expr) => {
        match $kind {
            tch::Kind::Float => {
                type $type = f32;
                Some($body)
            }
            tch::Kind::Half => {
                type $type = half::f16;
                Some($body)
            }
            tch::Kind::BFloat16 => {
                type $type = half::bf16;
                Some($body)
            }
            _ => None,
        }
    };
}
pub(crate) use with_elements;

/// The elements of a tensor that a step reads: a gradient.
///
/// # Safety
/// Nobody writes them meanwhile. Kernels rely on the rule of every in-place operator: who calls `step`
/// leaves parameters and gradients alone until it returns.
pub(super) unsafe fn read<T: Element>(tensor: &Tensor) -> Result<&[T]> {
    // SAFETY: the caller's word.
    Ok(unsafe { raw::slice(tensor)? })
}

/// The elements of a tensor that a step writes: a parameter, or a part of its state.
///
/// # Safety
/// As for [`read`], and no other slice of the same memory lives. States are the optimizer's own
/// (`state_dict` hands out handles and says that they change with the next step), no two parameters
/// share memory, and a parameter's gradient is other memory than both.
#[allow(
    clippy::mut_from_ref,
    reason = "a tensor is a handle: its elements are shared memory, for which the caller vouches"
)]
pub(super) unsafe fn write<T: Element>(tensor: &Tensor) -> Result<&mut [T]> {
    // SAFETY: the caller's word.
    Ok(unsafe { raw::slice_mut(tensor)? })
}

/// Tells autograd that a tensor changed, as an in-place operator would: a backward that needs the old
/// values then fails instead of using the new ones.
pub(crate) fn bump_version(tensor: &Tensor) -> Result<()> {
    debug_assert!(tensor.kind() != Kind::Bool);
    let _ = tensor.f_view(-1i64)?.f_narrow(0, 0, 0)?.f_zero_()?;
    Ok(())
}
