//! Errors of mixed precision.

use tch::{Device, Kind};

/// An error of mixed precision.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option of a scaler is outside its range.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// Autocast cannot cast to this dtype.
    #[error(
        "autocast on {device:?} cannot cast to {dtype:?}: use Half (fp16) or BFloat16 (bf16), or enabled(false) for full precision"
    )]
    UnsupportedDtype {
        /// The device of the region.
        device: Device,
        /// The dtype.
        dtype: Kind,
    },
    /// `unscale_` was called twice between two updates.
    #[error(
        "unscale_() has already been called for this optimizer since the last update(): call it once per step, after the last backward"
    )]
    AlreadyUnscaled,
    /// `unscale_` was called after `step`.
    #[error("unscale_() was called after step(): unscale first, then clip, then step")]
    UnscaleAfterStep,
    /// `step` was called twice between two updates.
    #[error(
        "step() has already been called for this optimizer since the last update(): call update() once per step"
    )]
    AlreadyStepped,
    /// `unscale_`, `step` or `update` was called before a loss was scaled.
    #[error(
        "{called}() was called before a loss was scaled: call scale(&loss) and backward on its result first"
    )]
    NotScaled {
        /// The function that was called.
        called: &'static str,
    },
    /// No gradient was checked for infinities: no parameter has one, or no optimizer stepped.
    #[error(
        "no gradient of {what} was checked for infinities: call backward first, on parameters that require gradients"
    )]
    NoInfChecks {
        /// The optimizer that should have had gradients.
        what: &'static str,
    },
    /// A gradient is fp16, in which unscaled values underflow.
    #[error(
        "fp16 gradients cannot be unscaled: keep the parameters in fp32 and run the forward pass under autocast"
    )]
    HalfGradients,
    /// A state was loaded into a disabled scaler.
    #[error(
        "`enabled` is false, and a disabled scaler has no state: set it as in the run that saved the state"
    )]
    Disabled,
    /// An error of the optimizer.
    #[error(transparent)]
    Optimizer(#[from] overdrive_optim::Error),
    /// An error of the shim or of libtorch.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
