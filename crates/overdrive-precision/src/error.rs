//! What can go wrong.

use tch::{Device, Kind};

/// An error of mixed precision.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// Autocast was asked for a dtype that it cannot cast to.
    #[error(
        "autocast on {device:?} cannot cast to {dtype:?}: use Half (fp16) or BFloat16 (bf16), or enabled(false) for full precision"
    )]
    UnsupportedDtype {
        /// The device of the region.
        device: Device,
        /// The dtype that was asked for.
        dtype: Kind,
    },
    /// A parameter of a scaler is out of range.
    #[error("{name} is {value}, but must be {expected}")]
    InvalidConfig {
        /// The field.
        name: &'static str,
        /// What it was.
        value: f64,
        /// What it must be.
        expected: &'static str,
    },
    /// `unscale_` was called twice between two updates.
    #[error(
        "unscale_() has already been called on this optimizer since the last update(): call it once a step, after the last backward"
    )]
    AlreadyUnscaled,
    /// `unscale_` was called after `step`.
    #[error("unscale_() is being called after step(): unscale first, then clip, then step")]
    UnscaleAfterStep,
    /// `step` was called twice between two updates.
    #[error(
        "step() has already been called on this optimizer since the last update(): call update() once a step"
    )]
    AlreadyStepped,
    /// `unscale_`, `step` or `update` before any loss was scaled.
    #[error(
        "{called}() before any loss was scaled: call scale(&loss) and backward on its result first"
    )]
    NotScaled {
        /// The function that was called.
        called: &'static str,
    },
    /// Nothing was checked for infinities: no parameter has a gradient, or no optimizer stepped.
    #[error(
        "no inf checks were recorded for {what}: was backward called, and do its parameters require gradients?"
    )]
    NoInfChecks {
        /// What should have had gradients.
        what: &'static str,
    },
    /// A gradient is fp16, whose range the unscaled values do not fit.
    #[error(
        "attempting to unscale fp16 gradients: keep the parameters in fp32 and run the forward pass under autocast"
    )]
    HalfGradients,
    /// A state was loaded into, or asked of, a scaler that is disabled.
    #[error(
        "the state of a scaler that is not disabled is expected here: set `enabled` as in the run that saved it"
    )]
    Disabled,
    /// The optimizer failed.
    #[error(transparent)]
    Optimizer(#[from] overdrive_optim::Error),
    /// The shim or libtorch failed.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// A tensor operation failed.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
