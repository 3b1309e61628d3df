//! A saved tensor with its version counter.

use overdrive_sys::CallbackResult;
use overdrive_sys::saved_tensors::PackedTensor;
use tch::Tensor;

use crate::{Error, Result};

/// A tensor that detects in-place changes. libtorch does not check tensors behind hooks for them.
pub(crate) struct Versioned {
    tensor: Tensor,
    version: i64,
}

impl Versioned {
    pub(crate) fn new(tensor: &Tensor) -> Result<Self> {
        // Detached: a saved result owns the node that saves it, which would keep both alive.
        let tensor = tensor.f_detach()?;
        let version = tensor.f_internal_version()?;
        Ok(Self { tensor, version })
    }

    pub(crate) fn tensor(&self) -> &Tensor {
        &self.tensor
    }

    /// Returns the tensor, or an error if it was changed in place.
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

impl PackedTensor for Versioned {
    fn unpack(&self) -> CallbackResult<Tensor> {
        Ok(self.get()?)
    }
}
