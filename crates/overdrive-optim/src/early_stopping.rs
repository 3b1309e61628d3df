//! The best evaluation so far, and stopping when there is no better one any more.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Options of [`EarlyStopping`], under the names that transformers gives them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EarlyStoppingConfig {
    /// Evaluations in a row without improvement after which to stop; `None` never stops and only keeps
    /// track of the best. Default 1.
    pub early_stopping_patience: Option<u32>,
    /// How much the metric must exceed the best one to count as an improvement, in units of the
    /// metric. Default 0.
    pub early_stopping_threshold: f64,
    /// Whether a larger metric is a better one. Default false, for a loss.
    pub greater_is_better: bool,
}

impl Default for EarlyStoppingConfig {
    fn default() -> Self {
        Self {
            early_stopping_patience: Some(1),
            early_stopping_threshold: 0.0,
            greater_is_better: false,
        }
    }
}

/// Keeps track of the best evaluation, and counts those without improvement, as transformers'
/// `EarlyStoppingCallback` does.
///
/// The best metric moves with every improvement, however small, while the patience is renewed only
/// by one above the threshold; NaN never is an improvement.
///
/// ```
/// use overdrive_optim::{EarlyStopping, EarlyStoppingConfig};
///
/// let config = EarlyStoppingConfig { early_stopping_patience: Some(2), ..Default::default() };
/// let mut stopping = EarlyStopping::new(config)?;
/// assert!(stopping.observe(100, 3.0).improved);
/// assert!(!stopping.observe(200, 3.1).stop);
/// assert!(stopping.observe(300, 3.2).stop);
/// assert_eq!((stopping.best_step(), stopping.best_metric()), (Some(100), Some(3.0)));
/// # Ok::<(), overdrive_optim::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct EarlyStopping {
    config: EarlyStoppingConfig,
    state: EarlyStoppingState,
}

/// The state of an [`EarlyStopping`] that a resumed run needs. The options are not part of it: a resumed run
/// stops by the patience that it is given, not by that of the run before.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EarlyStoppingState {
    /// Evaluations so far.
    pub evaluations: u64,
    /// The best metric.
    pub best_metric: Option<f64>,
    /// The step of the best metric.
    pub best_step: Option<u64>,
    /// Evaluations in a row that did not renew the patience.
    pub patience_counter: u32,
}

/// The consequences of an evaluation for the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// The metric is the best so far: keep these weights.
    pub improved: bool,
    /// Patience is used up. Can come with an improvement, one too small to count.
    pub stop: bool,
}

impl EarlyStopping {
    /// Makes one that has observed nothing yet.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a patience of 0 or a threshold that is negative or NaN.
    pub fn new(config: EarlyStoppingConfig) -> Result<Self> {
        if config.early_stopping_patience == Some(0) {
            return Err(Error::InvalidOption {
                option: "early_stopping_patience",
                value: "0".into(),
                expected: "at least 1 evaluation; leave early stopping out to train to the end",
            });
        }
        if config.early_stopping_threshold.is_nan() || config.early_stopping_threshold < 0.0 {
            return Err(Error::InvalidOption {
                option: "early_stopping_threshold",
                value: config.early_stopping_threshold.to_string(),
                expected: "a number from 0, in units of the metric",
            });
        }
        Ok(Self {
            config,
            state: EarlyStoppingState::default(),
        })
    }

    /// Takes in the metric of an evaluation after `step`.
    pub fn observe(&mut self, step: u64, metric: f64) -> Verdict {
        let threshold = self.config.early_stopping_threshold;
        let improved = self.is_better(metric);
        let state = &mut self.state;
        let enough = state
            .best_metric
            .is_none_or(|best| (metric - best).abs() > threshold);
        // The first evaluation counts as an improvement whatever it says.
        let renews = state.evaluations == 0 || (improved && enough);
        state.patience_counter = if renews {
            0
        } else {
            state.patience_counter + 1
        };
        state.evaluations += 1;
        if improved {
            state.best_metric = Some(metric);
            state.best_step = Some(step);
        }
        Verdict {
            improved,
            stop: self.should_stop(),
        }
    }

    /// Returns whether patience is used up.
    #[must_use]
    pub fn should_stop(&self) -> bool {
        let patience = self.config.early_stopping_patience;
        patience.is_some_and(|patience| self.state.patience_counter >= patience)
    }

    /// Returns the best metric so far.
    #[must_use]
    pub fn best_metric(&self) -> Option<f64> {
        self.state.best_metric
    }

    /// Returns the step of the best metric so far.
    #[must_use]
    pub fn best_step(&self) -> Option<u64> {
        self.state.best_step
    }

    /// Returns the number of evaluations in a row that did not renew the patience.
    #[must_use]
    pub fn patience_counter(&self) -> u32 {
        self.state.patience_counter
    }

    /// Returns the counters and the best metric.
    #[must_use]
    pub fn state_dict(&self) -> EarlyStoppingState {
        self.state
    }

    /// Takes over the counters and the best metric of a run that is resumed; the options stay.
    pub fn load_state_dict(&mut self, state: EarlyStoppingState) {
        self.state = state;
    }

    /// Infinite and NaN metrics are never better: a run that diverged has not improved.
    fn is_better(&self, metric: f64) -> bool {
        metric.is_finite()
            && self.state.best_metric.is_none_or(|best| {
                if self.config.greater_is_better {
                    metric > best
                } else {
                    metric < best
                }
            })
    }
}
