//! The trait that loss scaling, accumulation and schedulers drive optimizers by.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::Tensor;

use crate::{Error, Result, StateDict};

/// Tells optimizer instances apart for as long as the process lives.
///
/// A gradient scaler keeps its per-optimizer progress under this key.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OptimizerId(u64);

impl OptimizerId {
    /// A value that no other call in this process has returned.
    #[must_use]
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// What a gradient scaler hands to an optimizer that unscales and skips on the device.
///
/// Both tensors are float32 with one element; neither is read by the host.
#[derive(Debug, Clone, Copy)]
pub struct GradScaling<'a> {
    /// The factor that the gradients still carry, or `None` if they were unscaled already.
    pub grad_scale: Option<&'a Tensor>,
    /// 1 or more if any gradient holds an infinity or NaN, else 0. From 1 on, the step must change
    /// nothing.
    pub found_inf: &'a Tensor,
}

/// An optimizer over named or unnamed leaf parameters.
///
/// The gradients are those that backward left on the parameters (`.grad()`).
pub trait Optimizer: Send {
    /// Identifies this instance; constant over its life.
    fn id(&self) -> OptimizerId;

    /// Handles of all parameters, in a stable order. They share memory and gradients with the
    /// model's; nothing is copied.
    fn parameters(&self) -> Vec<Tensor>;

    /// Handles of the parameters of each group, in the order of
    /// [`learning_rates`](Self::learning_rates); one group of all where the optimizer knows none.
    fn parameters_by_group(&self) -> Vec<Vec<Tensor>> {
        vec![self.parameters()]
    }

    /// Applies the gradients. Parameters without one are left alone.
    ///
    /// # Errors
    /// When a gradient does not fit its parameter or libtorch refuses. Parameters handled before
    /// the failure have been stepped.
    fn step(&mut self) -> Result<()>;

    /// Whether [`step_scaled`](Self::step_scaled) works.
    fn supports_step_scaled(&self) -> bool {
        false
    }

    /// Unscales the gradients and applies them unless `found_inf` says otherwise, all without a
    /// device synchronisation (what torch calls `_step_supports_amp_scaling`).
    ///
    /// Returns `false`, having changed no parameter, where this optimizer cannot; the caller then
    /// unscales, reads `found_inf` and calls or skips [`step`](Self::step) itself.
    ///
    /// # Errors
    /// As for [`step`](Self::step).
    fn step_scaled(&mut self, scaling: &GradScaling<'_>) -> Result<bool> {
        let _ = scaling;
        Ok(false)
    }

    /// Drops the gradients of all parameters (torch's `set_to_none=True`): saves the zero fill
    /// now and an addition in the next backward.
    ///
    /// # Errors
    /// When libtorch refuses.
    fn zero_grad(&mut self) -> Result<()>;

    /// The present learning rate of each parameter group.
    fn learning_rates(&self) -> Vec<f64>;

    /// Sets the learning rate of each parameter group.
    ///
    /// # Errors
    /// When the count differs from that of the groups, or a rate is negative or NaN.
    fn set_learning_rates(&mut self, learning_rates: &[f64]) -> Result<()>;

    /// Sets one learning rate for all parameter groups.
    ///
    /// # Errors
    /// When the rate is negative or NaN.
    fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        let groups = self.learning_rates().len();
        self.set_learning_rates(&vec![learning_rate; groups])
    }

    /// The state that a resumed run needs, by parameter name. The tensors share memory with the
    /// optimizer's: write or copy them before the next step.
    ///
    /// # Errors
    /// [`Error::Unsupported`] where the optimizer cannot give its state.
    fn state_dict(&self) -> Result<StateDict> {
        Err(Error::Unsupported {
            optimizer: "this optimizer",
            what: "state_dict",
            instead: "use overdrive_optim::AdamW where runs must resume",
        })
    }

    /// Takes over a state that [`state_dict`](Self::state_dict) gave. Values are copied.
    ///
    /// # Errors
    /// [`Error::StateMismatch`] naming what is missing, unexpected or misshapen (nothing is
    /// changed then); [`Error::Unsupported`] where the optimizer cannot.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let _ = state;
        Err(Error::Unsupported {
            optimizer: "this optimizer",
            what: "load_state_dict",
            instead: "use overdrive_optim::AdamW where runs must resume",
        })
    }
}

/// States in files, for every [`Optimizer`].
pub trait OptimizerState: Optimizer {
    /// Writes [`state_dict`](Optimizer::state_dict) to a safetensors file, whole or not at all
    /// ([`StateDict::save`]).
    ///
    /// # Errors
    /// As for [`state_dict`](Optimizer::state_dict) and [`StateDict::save`].
    fn save_state(&self, path: impl AsRef<Path>) -> Result<()>;

    /// Loads what [`save_state`](Self::save_state) wrote.
    ///
    /// # Errors
    /// As for [`StateDict::load`] and [`load_state_dict`](Optimizer::load_state_dict); nothing is
    /// changed then.
    fn load_state(&mut self, path: impl AsRef<Path>) -> Result<()>;
}

impl<T: Optimizer + ?Sized> OptimizerState for T {
    fn save_state(&self, path: impl AsRef<Path>) -> Result<()> {
        self.state_dict()?.save(path)
    }

    fn load_state(&mut self, path: impl AsRef<Path>) -> Result<()> {
        self.load_state_dict(&StateDict::load(path)?)
    }
}

impl<T: Optimizer + ?Sized> Optimizer for Box<T> {
    fn id(&self) -> OptimizerId {
        (**self).id()
    }
    fn parameters(&self) -> Vec<Tensor> {
        (**self).parameters()
    }
    fn parameters_by_group(&self) -> Vec<Vec<Tensor>> {
        (**self).parameters_by_group()
    }
    fn step(&mut self) -> Result<()> {
        (**self).step()
    }
    fn supports_step_scaled(&self) -> bool {
        (**self).supports_step_scaled()
    }
    fn step_scaled(&mut self, scaling: &GradScaling<'_>) -> Result<bool> {
        (**self).step_scaled(scaling)
    }
    fn zero_grad(&mut self) -> Result<()> {
        (**self).zero_grad()
    }
    fn learning_rates(&self) -> Vec<f64> {
        (**self).learning_rates()
    }
    fn set_learning_rates(&mut self, learning_rates: &[f64]) -> Result<()> {
        (**self).set_learning_rates(learning_rates)
    }
    fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        (**self).set_learning_rate(learning_rate)
    }
    fn state_dict(&self) -> Result<StateDict> {
        (**self).state_dict()
    }
    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        (**self).load_state_dict(state)
    }
}
