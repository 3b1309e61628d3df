//! A saved tensor with the version it had.

use overdrive_sys::CallbackResult;
use overdrive_sys::saved_tensors::Packed;
use tch::Tensor;

use crate::{Error, Result};

/// libtorch does not check what stands behind hooks for in-place changes, so this does.
pub(crate) struct Versioned {
    tensor: Tensor,
    version: i64,
}

impl Versioned {
    pub(crate) fn new(tensor: &Tensor) -> Result<Self> {
        let tensor = tensor.f_detach()?;
        let version = tensor.f_internal_version()?;
        Ok(Self { tensor, version })
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Another handle, if nothing changed.
    pub(crate) fn get(&self) -> Result<Tensor> {
        if self.tensor.f_internal_version()? == self.version {
            Ok(self.tensor.shallow_clone())
        } else {
            Err(Error::ChangedInPlace {
                shape: self.tensor.size(),
            })
        }
    }
}

impl Packed for Versioned {
    fn unpack(&self) -> CallbackResult<Tensor> {
        Ok(self.get()?)
    }
}
