//! Errors of CUDA graphs.

use tch::Device;

/// An error of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is outside its range, or a tensor has another shape, dtype or device than the step needs.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// The device is not a CUDA device, or there is none.
    #[error("CUDA graphs need a CUDA device: {reason}")]
    NeedsCuda {
        /// The device that was found instead, or that there is none.
        reason: String,
    },
    /// The work failed in a warm-up, before anything was captured.
    #[error("the work failed before it was captured: {source}")]
    Work {
        /// The error of the work.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// The work runs, but cannot be captured.
    #[error(
        "the work cannot be captured in a CUDA graph: {source}. Captured work must not read values on the host (no item, no printing, no branch on a value), create tensors from host memory, change its shapes, or use another device or stream"
    )]
    CannotCapture {
        /// The error of the operation that failed.
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    /// A parameter of a training step has no gradient.
    #[error(
        "parameter `{parameter}` has no gradient: the loss does not depend on it; leave it out of the optimizer"
    )]
    NoGradient {
        /// The name of the parameter.
        parameter: String,
    },
    /// An error of the shim or of libtorch.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
    /// An error of the model.
    #[error(transparent)]
    Model(#[from] overdrive_transformer::Error),
    /// An error of the cache.
    #[error(transparent)]
    Cache(#[from] overdrive_kv_cache::Error),
    /// An error of the optimizer.
    #[error(transparent)]
    Optimizer(#[from] overdrive_optim::Error),
    /// An error of gradient accumulation.
    #[error(transparent)]
    Accumulation(#[from] overdrive_accumulation::Error),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// Returns the CUDA index of a device.
pub(crate) fn cuda_index(device: Device) -> Result<usize> {
    match device {
        Device::Cuda(index) if tch::Cuda::is_available() => Ok(index),
        Device::Cuda(index) => Err(Error::NeedsCuda {
            reason: format!("the work is on cuda:{index}, but libtorch finds no GPU"),
        }),
        other => Err(Error::NeedsCuda {
            reason: format!("the work is on {other:?}"),
        }),
    }
}
