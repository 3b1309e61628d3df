//! The elements of tensors as slices, for the kernels.

#![allow(unsafe_code, reason = "the memory of tensors")]

use std::marker::PhantomData;

use overdrive_sys::raw;
use tch::{Device, Kind, Tensor};

use super::Rows;
use crate::Result;

/// Returns `true` if the kernels take this dtype on this device.
pub(crate) fn has_kernel(kind: Kind, device: Device) -> bool {
    device == Device::Cpu && matches!(kind, Kind::Float | Kind::BFloat16 | Kind::Half)
}

/// Evaluates `$body` with `$type` as the element type of `$kind`, one of those of [`has_kernel`].
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

/// The elements of a tensor (batch, token, head, element) on the CPU, copied only if the last dimension has gaps.
#[derive(Debug)]
pub(crate) struct Strided {
    flat: Tensor,
    strides: [usize; 3],
    width: usize,
}

impl Strided {
    pub(crate) fn new(tensor: &Tensor) -> Result<Strided> {
        let dense = tensor.stride().last() == Some(&1) || tensor.size().last() == Some(&1);
        let tensor = match dense {
            true => tensor.shallow_clone(),
            false => tensor.f_contiguous()?,
        };
        let (sizes, strides) = (tensor.size(), tensor.stride());
        let reach: i64 = sizes
            .iter()
            .zip(&strides)
            .map(|(size, stride)| (size - 1).max(0) * stride)
            .sum();
        // Only up to the last element: libtorch refuses a view beyond the storage.
        let len = if tensor.numel() == 0 { 0 } else { reach + 1 };
        let mut found = [0; 3];
        for ((to, size), stride) in found.iter_mut().zip(&sizes).zip(&strides) {
            // The stride of a dimension of size 1 may be anything in libtorch.
            if *size > 1 {
                *to = usize::try_from(*stride).unwrap_or(0);
            }
        }
        let width = sizes.last().copied().unwrap_or(0);
        Ok(Strided {
            flat: tensor.f_as_strided([len], [1], None)?,
            strides: found,
            width: usize::try_from(width).unwrap_or(0),
        })
    }

    pub(crate) fn rows<T: raw::Element>(&self) -> Result<Rows<'_, T>> {
        Ok(Rows {
            data: elements(&self.flat)?,
            strides: self.strides,
            width: self.width,
        })
    }
}

/// Returns the elements of a contiguous tensor.
pub(crate) fn elements<T: raw::Element>(tensor: &Tensor) -> Result<&[T]> {
    // SAFETY: an operator's arguments are not written while it runs; as in libtorch, the caller of an operator sees to
    // that.
    Ok(unsafe { raw::slice(tensor)? })
}

/// Returns the elements of a contiguous tensor that a function changes in place.
pub(crate) fn elements_mut<T: raw::Element>(tensor: &mut Tensor) -> Result<&mut [T]> {
    // SAFETY: the tensor is borrowed for writing; as for libtorch's own in-place operators, the caller sees to it that
    // nobody uses its memory through another handle meanwhile.
    Ok(unsafe { raw::slice_mut(tensor)? })
}

/// A new contiguous tensor on the CPU without other handles.
#[derive(Debug)]
pub(crate) struct Fresh<T> {
    tensor: Tensor,
    element: PhantomData<T>,
}

impl<T: raw::Element> Fresh<T> {
    /// Returns an uninitialized tensor.
    pub(crate) fn empty(shape: &[i64]) -> Result<Self> {
        Ok(Self {
            tensor: Tensor::f_empty(shape, (T::KIND, Device::Cpu))?,
            element: PhantomData,
        })
    }

    /// Returns a tensor of zeros.
    pub(crate) fn zeros(shape: &[i64]) -> Result<Self> {
        Ok(Self {
            tensor: Tensor::f_zeros(shape, (T::KIND, Device::Cpu))?,
            element: PhantomData,
        })
    }

    /// Returns a copy of a tensor of this dtype, or zeros.
    pub(crate) fn copy_or_zeros(tensor: Option<&Tensor>, shape: &[i64]) -> Result<Self> {
        let Some(tensor) = tensor else {
            return Self::zeros(shape);
        };
        let mut copy = Self::empty(shape)?;
        copy.tensor.f_copy_(tensor)?;
        Ok(copy)
    }

    pub(crate) fn elements_mut(&mut self) -> Result<&mut [T]> {
        elements_mut(&mut self.tensor)
    }

    pub(crate) fn into_tensor(self) -> Tensor {
        self.tensor
    }
}
