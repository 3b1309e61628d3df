//! The identity of a tensor's memory.

use std::ptr;

use tch::Tensor;

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
