//! The elements of tensors as slices and views, for the kernels.

use overdrive_sys::raw;
use tch::{Device, Kind, Tensor};

use super::inputs::{View, ViewMut};
use crate::Result;

/// The elements and strides of a CPU tensor of four dimensions, copied only if the last dimension has
/// gaps.
#[derive(Debug)]
pub(crate) struct Strided {
    flat: Tensor,
    /// The strides of the four dimensions; 0 for dimensions of size 1.
    pub(crate) strides: [usize; 4],
}

impl Strided {
    /// Returns the elements of a tensor whose last dimension may be strided as well.
    pub(crate) fn any(tensor: &Tensor) -> Result<Strided> {
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
        Ok(Strided {
            flat: tensor.f_as_strided([len], [1], None)?,
            strides: found,
        })
    }

    /// Returns the elements of contiguous rows (the last dimension): a copy if they have gaps.
    pub(crate) fn rows(tensor: &Tensor) -> Result<Strided> {
        // The innermost loops read vectors along the last dimension.
        let dense = tensor.stride().last() == Some(&1) || tensor.size().last() == Some(&1);
        match dense {
            true => Strided::any(tensor),
            false => Strided::any(&tensor.f_contiguous()?),
        }
    }

    /// Returns the elements, to be read.
    pub(crate) fn elements<T: raw::Element>(&self) -> Result<&[T]> {
        // SAFETY: an operator's arguments are not written while it runs; as in libtorch, the caller of
        // an operator sees to that.
        Ok(unsafe { raw::slice(&self.flat)? })
    }

    /// Returns the rows of a tensor (batch, head, row, element).
    pub(crate) fn view<T: raw::Element>(&self) -> Result<View<'_, T>> {
        let [batch, head, row, _] = self.strides;
        Ok(View {
            data: self.elements()?,
            batch,
            head,
            row,
        })
    }
}

/// A new contiguous tensor without other handles.
#[derive(Debug)]
pub(crate) struct Fresh(Tensor);

impl Fresh {
    /// Returns an uninitialized tensor.
    pub(crate) fn empty(shape: &[i64], kind: Kind) -> Result<Fresh> {
        Ok(Fresh(Tensor::f_empty(shape, (kind, Device::Cpu))?))
    }

    /// Returns a tensor of zeros.
    pub(crate) fn zeros(shape: &[i64], kind: Kind) -> Result<Fresh> {
        Ok(Fresh(Tensor::f_zeros(shape, (kind, Device::Cpu))?))
    }

    /// Returns the elements, to be written.
    pub(crate) fn elements_mut<T: raw::Element>(&mut self) -> Result<&mut [T]> {
        // SAFETY: the tensor was made here and has not left yet.
        Ok(unsafe { raw::slice_mut(&self.0)? })
    }

    /// Returns the rows of a tensor (batch, rows, heads, element), as (batch, head, row).
    pub(crate) fn by_row<T: raw::Element>(&mut self) -> Result<ViewMut<'_, T>> {
        let sizes = self.sizes();
        let (heads, dim) = (sizes[2], sizes[3]);
        let (batch, row) = (sizes[1] * heads * dim, heads * dim);
        Ok(ViewMut::new(self.elements_mut()?, batch, dim, row))
    }

    /// Returns the elements of a tensor (batch, heads, rows), as rows of one element.
    pub(crate) fn by_head<T: raw::Element>(&mut self) -> Result<ViewMut<'_, T>> {
        let sizes = self.sizes();
        let (heads, rows) = (sizes[1], sizes[2]);
        Ok(ViewMut::new(self.elements_mut()?, heads * rows, rows, 1))
    }

    fn sizes(&self) -> Vec<usize> {
        let size = |size: &i64| usize::try_from(*size).unwrap_or(0);
        self.0.size().iter().map(size).collect()
    }

    pub(crate) fn into_tensor(self) -> Tensor {
        self.0
    }
}
