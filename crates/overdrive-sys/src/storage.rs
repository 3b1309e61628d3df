//! The identity and the extent of a tensor's memory.

use std::ops::Range;
use std::ptr;

use tch::{Device, Tensor};

use crate::ScalarType;
use crate::error::{Result, check};
use crate::ffi;
use crate::function::handle;

/// The identity of a tensor's storage. While this value lives, no other storage has the same
/// [`address`](Self::address), even if the tensor has been freed.
#[derive(Debug)]
pub struct StorageId {
    raw: *mut ffi::RawStorage,
    address: usize,
}

// SAFETY: a weak reference with an atomic count, and a number.
unsafe impl Send for StorageId {}

impl StorageId {
    /// Returns the identity of the storage of `tensor`, which views of it share.
    ///
    /// # Errors
    /// [`crate::Error::Torch`] for tensors without a storage (sparse tensors).
    pub fn of(tensor: &Tensor) -> Result<Self> {
        let (mut raw, mut address) = (ptr::null_mut(), ptr::null());
        // SAFETY: the handle is valid while borrowed; both are written only on success.
        let status = unsafe { ffi::od_storage_of(handle(tensor), &raw mut raw, &raw mut address) };
        check(status, "reading a tensor's storage")?;
        Ok(Self {
            raw,
            address: address as usize,
        })
    }

    /// Returns the number that identifies the storage.
    pub fn address(&self) -> usize {
        self.address
    }
}

impl Drop for StorageId {
    fn drop(&mut self) {
        // SAFETY: owned by `self`, freed once.
        unsafe { ffi::od_storage_free(self.raw) }
    }
}

/// Counts a change of each tensor, as an in-place operator does. A kernel that writes to a tensor, such as libtorch's
/// fused optimizers, does not count it: a backward pass that needs the old values would use the new ones, and a value
/// that is cached by the tensor's version would stay.
///
/// # Errors
/// [`crate::Error::Torch`] for tensors of inference mode, which have no version.
pub fn bump_versions<'t>(tensors: impl IntoIterator<Item = &'t Tensor>) -> Result<()> {
    let handles: Vec<_> = tensors.into_iter().map(handle).collect();
    // SAFETY: the handles are valid while the tensors are borrowed.
    let status = unsafe { ffi::od_bump_versions(handles.as_ptr(), handles.len()) };
    check(status, "counting a change of tensors")
}

/// Returns `true` if the memory of two tensors on the CPU or on CUDA devices may overlap: if their address ranges, from
/// the first to the last element, intersect. All these devices share one range of addresses. Tensors on other devices,
/// of other layouts or without elements have no such range.
pub fn memory_overlaps(a: &Tensor, b: &Tensor) -> bool {
    match (addresses(a), addresses(b)) {
        (Some(a), Some(b)) => a.start < b.end && b.start < a.end,
        _ => false,
    }
}

/// Returns the addresses from the first to the last element.
fn addresses(tensor: &Tensor) -> Option<Range<usize>> {
    let addressed = tensor.defined()
        && matches!(tensor.device(), Device::Cpu | Device::Cuda(_))
        && !tensor.is_sparse()
        && !tensor.is_mkldnn();
    if !addressed || tensor.numel() == 0 {
        return None;
    }
    let element = ScalarType::of(tensor).bytes();
    let dimensions = tensor.size().into_iter().zip(tensor.stride());
    // Strides are not negative in libtorch.
    let last: i64 = dimensions.map(|(size, stride)| (size - 1) * stride).sum();
    let start = tensor.data_ptr() as usize;
    Some(start..start + (usize::try_from(last).unwrap_or(0) + 1) * element)
}
