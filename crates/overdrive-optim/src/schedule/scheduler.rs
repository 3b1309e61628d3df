//! The scheduler, which sets an optimizer's learning rates by a schedule.

use serde::{Deserialize, Serialize};

use super::curve::Schedule;
use crate::{Error, Optimizer, Result};

const FORMAT_VERSION: u32 = 1;

/// A scheduler that sets an optimizer's learning rates to their base values times the factor of a
/// [`Schedule`].
///
/// The optimizer is passed to each call. Call [`step`](Self::step) once after each optimizer step (but
/// not after one that a gradient scaler skipped).
///
/// ```
/// use overdrive_optim::{
///     AdamW, AdamWConfig, LrScheduler, LrSchedulerType, Optimizer, ParamGroup, Schedule, ScheduleLength,
/// };
/// use tch::{Device, Kind, Tensor};
///
/// let weight = Tensor::ones([2], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let group = ParamGroup::new("all", vec![("weight".into(), weight)]);
/// let mut optimizer = AdamW::new(vec![group], AdamWConfig { learning_rate: 0.01, ..Default::default() })?;
/// let length = ScheduleLength { warmup_steps: 0, total_steps: 4 };
/// let linear = Schedule::new(LrSchedulerType::Linear, length, 0.01, &Default::default())?;
/// let mut scheduler = LrScheduler::new(linear, &mut optimizer)?;
/// optimizer.step()?;
/// scheduler.step(&mut optimizer)?;
/// assert_eq!(optimizer.learning_rates(), [0.0075]);
/// # Ok::<(), overdrive_optim::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct LrScheduler {
    schedule: Schedule,
    base_learning_rates: Vec<f64>,
    last_step: u64,
    last_learning_rates: Vec<f64>,
}

/// The state of an [`LrScheduler`], which a resumed run loads.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LrSchedulerState {
    /// The version of this format; 1.
    pub format_version: u32,
    /// The number of steps taken.
    pub last_step: u64,
    /// The learning rate of each group at a factor of 1.
    pub base_learning_rates: Vec<f64>,
}

impl LrScheduler {
    /// Returns a scheduler with the optimizer's current learning rates as base values, and sets those of
    /// step 0.
    ///
    /// # Errors
    /// The error of the optimizer for an invalid rate.
    pub fn new<O: Optimizer + ?Sized>(schedule: Schedule, optimizer: &mut O) -> Result<Self> {
        let base_learning_rates = optimizer.learning_rates();
        let last_learning_rates = base_learning_rates.clone();
        let mut this = Self {
            schedule,
            base_learning_rates,
            last_step: 0,
            last_learning_rates,
        };
        this.set_step(0, optimizer)?;
        Ok(this)
    }

    /// Sets the learning rates of the next step.
    ///
    /// # Errors
    /// [`Error::LearningRateCount`] if the number of the optimizer's groups has changed.
    pub fn step<O: Optimizer + ?Sized>(&mut self, optimizer: &mut O) -> Result<()> {
        self.set_step(self.last_step + 1, optimizer)
    }

    /// Sets the learning rates of any step.
    ///
    /// # Errors
    /// As [`step`](Self::step).
    pub fn set_step<O: Optimizer + ?Sized>(&mut self, step: u64, optimizer: &mut O) -> Result<()> {
        let factor = self.schedule.multiplier(step);
        let rates: Vec<f64> = self
            .base_learning_rates
            .iter()
            .map(|base| base * factor)
            .collect();
        // The scheduler changes only if the optimizer has accepted the rates.
        optimizer.set_learning_rates(&rates)?;
        self.last_step = step;
        self.last_learning_rates = rates;
        Ok(())
    }

    /// Returns the current learning rates, one per group.
    #[must_use]
    pub fn last_lr(&self) -> &[f64] {
        &self.last_learning_rates
    }

    /// Returns the number of steps taken.
    #[must_use]
    pub fn last_step(&self) -> u64 {
        self.last_step
    }

    /// Returns the schedule.
    #[must_use]
    pub fn schedule(&self) -> &Schedule {
        &self.schedule
    }

    /// Returns the state that a resumed run needs. It does not contain the schedule, which comes from the
    /// run's configuration.
    #[must_use]
    pub fn state_dict(&self) -> LrSchedulerState {
        LrSchedulerState {
            format_version: FORMAT_VERSION,
            last_step: self.last_step,
            base_learning_rates: self.base_learning_rates.clone(),
        }
    }

    /// Loads a stored state and sets the optimizer's learning rates accordingly.
    ///
    /// # Errors
    /// [`Error::StateMismatch`] if the format is unknown; [`Error::LearningRateCount`] if it is for
    /// another number of groups.
    pub fn load_state_dict<O: Optimizer + ?Sized>(
        &mut self,
        state: &LrSchedulerState,
        optimizer: &mut O,
    ) -> Result<()> {
        // On a copy, so that an error leaves the scheduler unchanged.
        let mut loaded = self.clone();
        loaded.restore(state)?;
        loaded.set_step(state.last_step, optimizer)?;
        *self = loaded;
        Ok(())
    }

    /// Loads a stored state without setting learning rates, for an optimizer that has restored its own.
    pub(crate) fn restore(&mut self, state: &LrSchedulerState) -> Result<()> {
        if state.format_version != FORMAT_VERSION {
            let found = state.format_version;
            let problem = format!("the scheduler has format {found}; it must be {FORMAT_VERSION}");
            return Err(Error::StateMismatch { problem });
        }
        let groups = self.base_learning_rates.len();
        let given = state.base_learning_rates.len();
        if given != groups {
            return Err(Error::LearningRateCount { given, groups });
        }
        let factor = self.schedule.multiplier(state.last_step);
        let rates = state.base_learning_rates.iter().map(|base| base * factor);
        self.last_learning_rates = rates.collect();
        self.base_learning_rates
            .clone_from(&state.base_learning_rates);
        self.last_step = state.last_step;
        Ok(())
    }
}
