//! The trait of optimizers, through which loss scaling, accumulation and schedulers use them. The arithmetic of
//! one is a rule of `update_rule`, as in `lion`.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use tch::Tensor;

use crate::{Error, Result, StateDict};

/// The identity of an optimizer, unique in the process.
///
/// A gradient scaler uses it as the key of its state for each optimizer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct OptimizerId(u64);

impl OptimizerId {
    /// Returns an id that no other call in this process has returned.
    #[must_use]
    pub fn unique() -> Self {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        // Relaxed: only the uniqueness matters, not the order.
        Self(NEXT.fetch_add(1, Ordering::Relaxed))
    }
}

/// The arguments of a step that unscales gradients and skips on the device.
///
/// Both tensors are float32 with one element. The host does not read them.
#[derive(Debug, Clone, Copy)]
pub struct GradScaling<'a> {
    /// The factor by which the gradients are scaled; `None` if they are already unscaled.
    pub grad_scale: Option<&'a Tensor>,
    /// 1 or more if any gradient contains an infinity or NaN, else 0. If it is 1 or more, the step must
    /// not change anything.
    pub found_inf: &'a Tensor,
}

/// An optimizer of leaf parameters.
///
/// It applies the gradients that backward accumulated in the parameters (`.grad()`).
pub trait Optimizer: Send {
    /// Returns the id of this optimizer, which never changes.
    fn id(&self) -> OptimizerId;

    /// Returns handles of all parameters, in a stable order. They share memory and gradients with the model.
    fn parameters(&self) -> Vec<Tensor>;

    /// Returns handles of the parameters of each group, in the order of
    /// [`learning_rates`](Self::learning_rates); one group if the optimizer has no groups.
    fn parameters_by_group(&self) -> Vec<Vec<Tensor>> {
        vec![self.parameters()]
    }

    /// Applies the gradients. Parameters without a gradient are not changed.
    ///
    /// # Errors
    /// An error if a gradient does not fit its parameter, and libtorch's errors. Parameters that were
    /// updated before the error stay updated.
    fn step(&mut self) -> Result<()>;

    /// Returns `true` if [`step_scaled`](Self::step_scaled) is supported.
    fn supports_step_scaled(&self) -> bool {
        false
    }

    /// Unscales the gradients and applies them unless `found_inf` is set, without synchronizing with the
    /// device (PyTorch's `_step_supports_amp_scaling`).
    ///
    /// Returns `false` without changing any parameter if this is not supported; the caller must then
    /// unscale, read `found_inf` and call or skip [`step`](Self::step).
    ///
    /// # Errors
    /// As [`step`](Self::step).
    fn step_scaled(&mut self, scaling: &GradScaling<'_>) -> Result<bool> {
        let _ = scaling;
        Ok(false)
    }

    /// Drops the gradients of all parameters (PyTorch's `set_to_none=True`). This saves filling them with
    /// zeros, and an addition in the next backward pass.
    ///
    /// # Errors
    /// libtorch's errors.
    fn zero_grad(&mut self) -> Result<()>;

    /// Returns the current learning rate of each parameter group.
    fn learning_rates(&self) -> Vec<f64>;

    /// Sets the learning rate of each parameter group.
    ///
    /// # Errors
    /// An error if their number differs from that of the groups, or a rate is negative or NaN.
    fn set_learning_rates(&mut self, learning_rates: &[f64]) -> Result<()>;

    /// Sets one learning rate for all parameter groups.
    ///
    /// # Errors
    /// An error if the rate is negative or NaN.
    fn set_learning_rate(&mut self, learning_rate: f64) -> Result<()> {
        let groups = self.learning_rates().len();
        self.set_learning_rates(&vec![learning_rate; groups])
    }

    /// Returns the state that a resumed run needs, by parameter name. The tensors share memory with the
    /// optimizer, so they must be stored or copied before the next step.
    ///
    /// # Errors
    /// [`Error::Unsupported`] if the optimizer does not support this.
    fn state_dict(&self) -> Result<StateDict> {
        Err(Error::Unsupported {
            optimizer: "this optimizer",
            what: "state_dict",
            instead: "use overdrive_optim::AdamW for runs that must resume",
        })
    }

    /// Loads a state that [`state_dict`](Self::state_dict) returned, by copying it.
    ///
    /// # Errors
    /// [`Error::StateMismatch`] with the missing, unexpected or misshapen tensors (the optimizer is
    /// unchanged then); [`Error::Unsupported`] if the optimizer does not support this.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<()> {
        let _ = state;
        Err(Error::Unsupported {
            optimizer: "this optimizer",
            what: "load_state_dict",
            instead: "use overdrive_optim::AdamW for runs that must resume",
        })
    }
}

/// Methods that store the state of any [`Optimizer`] in a file.
pub trait OptimizerState: Optimizer {
    /// Writes [`state_dict`](Optimizer::state_dict) to a safetensors file, completely or not at all
    /// ([`StateDict::save`]).
    ///
    /// # Errors
    /// As [`state_dict`](Optimizer::state_dict) and [`StateDict::save`].
    fn save_state(&self, path: impl AsRef<Path>) -> Result<()>;

    /// Loads a state that [`save_state`](Self::save_state) wrote.
    ///
    /// # Errors
    /// As [`StateDict::load`] and [`load_state_dict`](Optimizer::load_state_dict); the optimizer is
    /// unchanged then.
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
