//! The trait of values whose state a resumed run needs.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{EarlyStopping, Ema, LrScheduler, Optimizer, StateDict};

/// The error of a [`Stateful`] value.
pub type StateError = Box<dyn std::error::Error + Send + Sync>;

/// A value whose state a snapshot stores (`torch.distributed.checkpoint.stateful.Stateful`): optimizers,
/// schedules, averages of weights, scalers, early stopping, and any other state that a run must keep.
///
/// ```
/// use overdrive_optim::{StateDict, StateError, Stateful};
///
/// /// The number of steps done.
/// struct Progress(u64);
///
/// impl Stateful for Progress {
///     fn state_dict(&self) -> Result<StateDict, StateError> {
///         StateDict::of_value(&self.0)
///     }
///
///     fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
///         self.0 = state.value()?;
///         Ok(())
///     }
/// }
///
/// let mut resumed = Progress(0);
/// resumed.load_state_dict(&Progress(7).state_dict()?)?;
/// assert_eq!(resumed.0, 7);
/// # Ok::<(), StateError>(())
/// ```
pub trait Stateful {
    /// Returns the state. Its tensors may share memory with the value, so the caller must copy or store
    /// them before the next step.
    ///
    /// # Errors
    /// Any error of collecting the state.
    fn state_dict(&self) -> Result<StateDict, StateError>;

    /// Loads a state that [`state_dict`](Self::state_dict) returned, by copying it.
    ///
    /// # Errors
    /// An error if the state does not fit; the value must then be unchanged.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError>;
}

impl StateDict {
    /// Returns a state without tensors that contains `value` as JSON.
    ///
    /// # Errors
    /// An error if the value cannot be represented in JSON.
    pub fn of_value(value: &impl Serialize) -> Result<Self, StateError> {
        Ok(Self {
            tensors: std::collections::BTreeMap::new(),
            metadata: serde_json::to_value(value)?,
        })
    }

    /// Returns the value that [`of_value`](Self::of_value) stored.
    ///
    /// # Errors
    /// An error if the state is that of a value of another type.
    pub fn value<T: DeserializeOwned>(&self) -> Result<T, StateError> {
        Ok(T::deserialize(&self.metadata)?)
    }
}

// A blanket implementation, so that optimizers implement one trait only; the types below are implemented
// one by one because they are not optimizers.
impl<O: Optimizer + ?Sized> Stateful for O {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        Ok(Optimizer::state_dict(self)?)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        Ok(Optimizer::load_state_dict(self, state)?)
    }
}

impl Stateful for Ema {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        Ok(Ema::state_dict(self)?)
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        Ok(Ema::load_state_dict(self, state)?)
    }
}

/// The current learning rates are part of the optimizer's state, so the optimizer must be restored too.
impl Stateful for LrScheduler {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        StateDict::of_value(&LrScheduler::state_dict(self))
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        Ok(self.restore(&state.value()?)?)
    }
}

impl Stateful for EarlyStopping {
    fn state_dict(&self) -> Result<StateDict, StateError> {
        StateDict::of_value(&EarlyStopping::state_dict(self))
    }

    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError> {
        EarlyStopping::load_state_dict(self, state.value()?);
        Ok(())
    }
}
