//! The elements of tensors as slices, for the codecs and kernels.
#![allow(unsafe_code)]

use overdrive_sys::raw::{self, LocatedTensor};
use tch::{Device, Kind, Tensor};

use crate::Result;

/// Evaluates `$body` with `$type` as the Rust type of `$kind`, which is `Float`, `BFloat16` or `Half`.
macro_rules! with_float {
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
pub(crate) use with_float;

/// A tensor whose elements can be borrowed.
pub(crate) trait Source {
    /// Returns the dtype.
    fn dtype(&self) -> Kind;

    /// Borrows the elements of a contiguous tensor on the CPU.
    fn borrow<T: raw::Element>(&self) -> Result<&[T]>;
}

impl Source for Tensor {
    fn dtype(&self) -> Kind {
        self.kind()
    }

    fn borrow<T: raw::Element>(&self) -> Result<&[T]> {
        // SAFETY: codecs read their inputs only while they run, and write to none of them. A thread that writes
        // to a tensor while an operator reads it races with libtorch's own operators too.
        Ok(unsafe { raw::slice(self)? })
    }
}

impl Source for LocatedTensor {
    fn dtype(&self) -> Kind {
        self.kind()
    }

    fn borrow<T: raw::Element>(&self) -> Result<&[T]> {
        // SAFETY: as for a tensor.
        Ok(unsafe { self.slice()? })
    }
}

/// Borrows the elements of a contiguous tensor on the CPU.
pub(crate) fn elements<T: raw::Element>(tensor: &impl Source) -> Result<&[T]> {
    tensor.borrow()
}

/// Borrows the elements of a contiguous tensor of signed or unsigned bytes on the CPU as unsigned ones.
pub(crate) fn bytes(tensor: &impl Source) -> Result<&[u8]> {
    if tensor.dtype() != Kind::Int8 {
        return elements::<u8>(tensor);
    }
    let codes = elements::<i8>(tensor)?;
    // SAFETY: the slice is the same memory; both types have one byte, of which every value is valid.
    Ok(unsafe { std::slice::from_raw_parts(codes.as_ptr().cast(), codes.len()) })
}

/// A new CPU tensor without other handles, so that its elements can be borrowed for writing.
#[derive(Debug)]
pub(crate) struct Fresh<T> {
    tensor: Tensor,
    element: std::marker::PhantomData<T>,
}

impl<T: raw::Element> Fresh<T> {
    /// Returns a tensor of `shape` whose elements are undefined until they are written.
    pub(crate) fn new(shape: &[i64]) -> Result<Self> {
        Ok(Self {
            tensor: Tensor::f_empty(shape, (T::KIND, Device::Cpu))?,
            element: std::marker::PhantomData,
        })
    }

    /// Borrows the elements for writing.
    pub(crate) fn elements_mut(&mut self) -> Result<&mut [T]> {
        // SAFETY: `new` made the tensor, and no other handle to it exists but those of `rows`, which
        // operators have read before; `self` is borrowed for writing.
        Ok(unsafe { raw::slice_mut(&self.tensor)? })
    }

    /// Returns the first `count` of the outermost dimension, for operators to read before the elements are
    /// borrowed again.
    pub(crate) fn rows(&self, count: i64) -> Result<Tensor> {
        Ok(self.tensor.f_narrow(0, 0, count)?)
    }

    /// Returns the tensor.
    pub(crate) fn into_tensor(self) -> Tensor {
        self.tensor
    }
}
