//! The elements of tensors as slices, for kernels.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use overdrive_sys::raw;
use tch::{Device, Kind, Tensor};

use crate::Result;

/// Returns `true` if the kernels support this tensor; libtorch's operators handle other tensors.
pub(crate) fn has_kernel(tensor: &Tensor) -> bool {
    tensor.device() == Device::Cpu
        && matches!(tensor.kind(), Kind::Float | Kind::BFloat16 | Kind::Half)
}

/// Evaluates `$body` with `$type` as the element type of `$kind`, one of those of
/// [`has_kernel`].
macro_rules! with_element {
    ($kind:expr, $type:ident => $body:expr) => {
        match $kind {
            tch::Kind::BFloat16 => {
                type $type = half::bf16;
                $body
            }
            tch::Kind::Half => {
                type $type = half::f16;
                $body
            }
            _ => {
                type $type = f32;
                $body
            }
        }
    };
}
pub(crate) use with_element;

/// Returns the elements of a contiguous tensor.
pub(crate) fn elements<T: raw::Element>(tensor: &Tensor) -> Result<&[T]> {
    // SAFETY: kernels read their inputs only while an operator runs, and write none of them; who
    // writes to a tensor while an operator reads it, from another thread, races with libtorch's own
    // operators as well.
    Ok(unsafe { raw::slice(tensor)? })
}

/// A new tensor without other handles.
#[derive(Debug)]
pub(crate) struct Fresh<T> {
    tensor: Tensor,
    element: PhantomData<T>,
}

impl<T: raw::Element> Fresh<T> {
    /// Returns an uninitialized contiguous tensor on the CPU.
    pub(crate) fn new(shape: &[i64]) -> Result<Self> {
        Ok(Self {
            tensor: Tensor::f_empty(shape, (T::KIND, Device::Cpu))?,
            element: PhantomData,
        })
    }

    pub(crate) fn elements_mut(&mut self) -> Result<&mut [T]> {
        // SAFETY: the tensor was made by `new` and has not left it, and it is borrowed for writing.
        Ok(unsafe { raw::slice_mut(&self.tensor)? })
    }

    pub(crate) fn into_tensor(self) -> Tensor {
        self.tensor
    }
}

/// A tensor whose contents a kernel may overwrite.
#[derive(Debug)]
pub(crate) struct Replaceable<'a>(&'a Tensor);

impl<'a> Replaceable<'a> {
    /// # Safety
    /// While the result lives nobody else reads or writes the memory of `tensor`.
    pub(crate) unsafe fn new(tensor: &'a mut Tensor) -> Self {
        Self(tensor)
    }

    pub(crate) fn elements_mut<T: raw::Element>(&mut self) -> Result<&mut [T]> {
        // SAFETY: the promise that was given to `new`, and this is borrowed for writing.
        Ok(unsafe { raw::slice_mut(self.0)? })
    }
}

/// Returns a copy of a tensor.
pub(crate) fn copy_of(tensor: &Tensor) -> Result<Tensor> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

/// Returns the dtype to which libtorch promotes two dtypes.
pub(crate) fn promoted(a: Kind, b: Kind) -> Kind {
    // bf16 and f16 have no common half precision, so libtorch promotes them to f32.
    match (a, b) {
        _ if a == b => a,
        (Kind::Double, _) | (_, Kind::Double) => Kind::Double,
        _ => Kind::Float,
    }
}

/// Returns `true` if the functions of this crate take tensors of this floating-point dtype.
pub(crate) fn is_floating(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16
    )
}
