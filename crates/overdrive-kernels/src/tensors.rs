//! The memory of tensors on the CPU as slices, which kernels read and write.
//!
//! # The rule of operators
//!
//! The functions that borrow the elements of a tensor are safe to call by the rule that libtorch's own operators
//! follow: while an operator runs, no other thread writes what it reads or touches what it writes. A tensor is a
//! handle to shared memory, so a program that breaks the rule has a data race here as it has there.
#![allow(unsafe_code)]

use std::marker::PhantomData;

use overdrive_sys::Result;
use overdrive_sys::raw::{self, LocatedTensor};
use tch::{Device, Kind, Tensor};

#[doc(hidden)]
pub use half::{bf16, f16};

/// Returns `true` if kernels take this tensor: on the CPU, of a dtype of [`has_element`]. libtorch's operators compute
/// the others.
pub fn has_kernel(tensor: &Tensor) -> bool {
    tensor.device() == Device::Cpu && has_element(tensor.kind())
}

/// Returns `true` for the dtypes of [`with_element!`](crate::with_element): f32, bf16 and f16.
pub fn has_element(kind: Kind) -> bool {
    matches!(kind, Kind::Float | Kind::BFloat16 | Kind::Half)
}

/// Returns contiguous tensors that lie one after another in memory as one, along the first dimension, or `None` if they do
/// not. All other dimensions must be equal.
pub fn joined_view(tensors: &[&Tensor]) -> Option<Tensor> {
    let (first, rest) = tensors.split_first()?;
    let bytes = |tensor: &Tensor| tensor.numel() * tensor.kind().elt_size_in_bytes();
    let mut end = first.data_ptr() as usize + bytes(first);
    for tensor in rest {
        if tensor.data_ptr() as usize != end {
            return None;
        }
        end += bytes(tensor);
    }
    if !tensors.iter().all(|tensor| tensor.is_contiguous()) {
        return None;
    }
    let mut size = first.size();
    size[0] = tensors.iter().map(|tensor| tensor.size()[0]).sum();
    // Adjacent addresses may still be two allocations: libtorch then refuses the view, which would exceed the first one's
    // memory.
    first.f_as_strided(&size, first.stride(), None).ok()
}

/// Evaluates `$body` with `$type` as the Rust type of the elements of `$kind`, which is one of those of
/// [`has_element`](crate::tensors::has_element).
#[macro_export]
macro_rules! with_element {
    ($kind:expr, $type:ident => $body:expr) => {
        match $kind {
            tch::Kind::BFloat16 => {
                type $type = $crate::tensors::bf16;
                $body
            }
            tch::Kind::Half => {
                type $type = $crate::tensors::f16;
                $body
            }
            _ => {
                type $type = f32;
                $body
            }
        }
    };
}

/// A tensor whose elements can be borrowed.
pub trait Source {
    /// Returns the dtype.
    fn dtype(&self) -> Kind;

    /// Borrows the elements of a contiguous tensor on the CPU; see [`elements`].
    ///
    /// # Errors
    /// As [`raw::slice()`].
    fn borrow<T: raw::Element>(&self) -> Result<&[T]>;
}

impl Source for Tensor {
    fn dtype(&self) -> Kind {
        self.kind()
    }

    fn borrow<T: raw::Element>(&self) -> Result<&[T]> {
        // SAFETY: the rule of operators (see the module).
        unsafe { raw::slice(self) }
    }
}

impl Source for LocatedTensor {
    fn dtype(&self) -> Kind {
        self.kind()
    }

    fn borrow<T: raw::Element>(&self) -> Result<&[T]> {
        // SAFETY: as for a tensor.
        unsafe { self.slice() }
    }
}

/// Borrows the elements of a contiguous tensor on the CPU.
///
/// # Errors
/// As [`raw::slice()`].
pub fn elements<T: raw::Element>(tensor: &impl Source) -> Result<&[T]> {
    tensor.borrow()
}

/// Borrows the elements of a contiguous tensor on the CPU, which a function changes in place.
///
/// # Errors
/// As [`raw::slice_mut()`].
pub fn elements_mut<T: raw::Element>(tensor: &mut Tensor) -> Result<&mut [T]> {
    // SAFETY: the tensor is borrowed for writing, and the rule of operators.
    unsafe { raw::slice_mut(tensor) }
}

/// A new contiguous tensor on the CPU without other handles, so that its elements can be borrowed for writing.
#[derive(Debug)]
pub struct Fresh<T> {
    tensor: Tensor,
    element: PhantomData<T>,
}

impl<T: raw::Element> Fresh<T> {
    /// Returns a tensor of `shape` whose elements are undefined until they are written.
    ///
    /// # Errors
    /// The memory cannot be allocated.
    pub fn new(shape: &[i64]) -> Result<Self> {
        Ok(Self::from(Tensor::f_empty(shape, (T::KIND, Device::Cpu))?))
    }

    /// Returns a tensor of zeros.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn zeros(shape: &[i64]) -> Result<Self> {
        Ok(Self::from(Tensor::f_zeros(shape, (T::KIND, Device::Cpu))?))
    }

    /// Returns a copy of a tensor in this dtype and `shape`, or zeros.
    ///
    /// # Errors
    /// As [`new`](Self::new), or libtorch cannot expand the tensor to `shape`.
    pub fn copy_or_zeros(tensor: Option<&Tensor>, shape: &[i64]) -> Result<Self> {
        let Some(tensor) = tensor else {
            return Self::zeros(shape);
        };
        let mut copy = Self::new(shape)?;
        copy.tensor.f_copy_(tensor)?;
        Ok(copy)
    }

    fn from(tensor: Tensor) -> Self {
        Self {
            tensor,
            element: PhantomData,
        }
    }

    /// Borrows the elements for writing.
    ///
    /// # Errors
    /// As [`raw::slice_mut()`].
    pub fn elements_mut(&mut self) -> Result<&mut [T]> {
        elements_mut(&mut self.tensor)
    }

    /// Returns the first `count` of the outermost dimension, for operators that read them before the elements are
    /// borrowed again.
    ///
    /// # Errors
    /// `count` is negative or larger than the dimension.
    pub fn rows(&self, count: i64) -> Result<Tensor> {
        Ok(self.tensor.f_narrow(0, 0, count)?)
    }

    /// Returns the sizes of the dimensions.
    pub fn size(&self) -> Vec<i64> {
        self.tensor.size()
    }

    /// Returns the tensor.
    pub fn into_tensor(self) -> Tensor {
        self.tensor
    }
}

/// The elements and strides of a CPU tensor of at most four dimensions.
#[derive(Debug)]
pub struct Strided {
    flat: Tensor,
    /// The strides, in elements; 0 for dimensions of size 1, and beyond the tensor's.
    pub strides: [usize; 4],
    /// The size of the last dimension.
    pub width: usize,
}

impl Strided {
    /// Returns the elements of a tensor of any strides, without a copy.
    ///
    /// # Errors
    /// libtorch refuses the view (a sparse tensor).
    pub fn any(tensor: &Tensor) -> Result<Self> {
        let (sizes, strides) = (tensor.size(), tensor.stride());
        let reach: i64 = sizes
            .iter()
            .zip(&strides)
            .map(|(size, stride)| (size - 1).max(0) * stride)
            .sum();
        // Only up to the last element: libtorch refuses a view beyond the storage.
        let len = if tensor.numel() == 0 { 0 } else { reach + 1 };
        let mut found = [0; 4];
        for ((to, size), stride) in found.iter_mut().zip(&sizes).zip(&strides) {
            // The stride of a dimension of size 1 may be anything in libtorch.
            if *size > 1 {
                *to = usize::try_from(*stride).unwrap_or(0);
            }
        }
        let width = sizes.last().copied().unwrap_or(1);
        Ok(Self {
            flat: tensor.f_as_strided([len], [1], None)?,
            strides: found,
            width: usize::try_from(width).unwrap_or(0),
        })
    }

    /// Returns the elements of a tensor whose last dimension is contiguous: of a copy if it has gaps.
    ///
    /// # Errors
    /// As [`any`](Self::any), or the memory of the copy cannot be allocated.
    pub fn rows(tensor: &Tensor) -> Result<Self> {
        // The innermost loops read vectors along the last dimension.
        let dense = tensor.stride().last() == Some(&1) || tensor.size().last() == Some(&1);
        match dense {
            true => Self::any(tensor),
            false => Self::any(&tensor.f_contiguous()?),
        }
    }

    /// Borrows the elements between the first and the last one, gaps included.
    ///
    /// # Errors
    /// As [`raw::slice()`].
    pub fn elements<T: raw::Element>(&self) -> Result<&[T]> {
        elements(&self.flat)
    }
}
