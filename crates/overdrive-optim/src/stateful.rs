//! Anything that a resumed run needs the state of.

use serde::Serialize;
use serde::de::DeserializeOwned;

use crate::{EarlyStopping, Ema, LrScheduler, Optimizer, StateDict};

/// The error of a [`Stateful`] value.
pub type StateError = Box<dyn std::error::Error + Send + Sync>;

/// A value whose state a snapshot stores (`torch.distributed.checkpoint.stateful.Stateful`): optimizers,
/// schedules, averages of weights, scalers, early stopping, and whatever else a run must not lose.
///
/// ```
/// use overdrive_optim::{StateDict, StateError, Stateful};
///
/// /// Steps done so far.
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
    /// Returns the state. Tensors may share memory with the value's own: whoever stores them copies them
    /// before the next step.
    ///
    /// # Errors
    /// When the value cannot give its state.
    fn state_dict(&self) -> Result<StateDict, StateError>;

    /// Takes over a state that [`state_dict`](Self::state_dict) returned. Values are copied.
    ///
    /// # Errors
    /// When the state is of something else; nothing is changed then.
    fn load_state_dict(&mut self, state: &StateDict) -> Result<(), StateError>;
}

impl StateDict {
    /// A state without tensors: `value` as JSON.
    ///
    /// # Errors
    /// When JSON cannot hold the value.
    pub fn of_value(value: &impl Serialize) -> Result<Self, StateError> {
        Ok(Self {
            tensors: std::collections::BTreeMap::new(),
            metadata: serde_json::to_value(value)?,
        })
    }

    /// The value that [`of_value`](Self::of_value) stored.
    ///
    /// # Errors
    /// When the state is of a value of another type.
    pub fn value<T: DeserializeOwned>(&self) -> Result<T, StateError> {
        Ok(T::deserialize(&self.metadata)?)
    }
}

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

/// The learning rates in force are part of the optimizer's state: restore the optimizer too.
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
