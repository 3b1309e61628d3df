//! Early stopping: tracks the best evaluation, and stops a run that no longer improves.

use overdrive_core::{check_at_least, check_option};
use serde::{Deserialize, Serialize};

use crate::Result;

/// The options of [`EarlyStopping`], with the names of transformers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EarlyStoppingConfig {
    /// The number of consecutive evaluations without improvement after which the run stops; `None` never
    /// stops and only tracks the best evaluation. Default: 1.
    pub early_stopping_patience: Option<u32>,
    /// The minimum difference from the best metric that counts as an improvement, in units of the metric;
    /// 0 or positive. Default: 0.
    pub early_stopping_threshold: f64,
    /// If `true`, a larger metric is better. Default: `false`, for a loss.
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

/// Tracks the best evaluation and counts those without improvement (transformers' `EarlyStoppingCallback`).
///
/// Every improvement updates the best metric, but only one above the threshold resets the patience
/// counter. NaN is never an improvement.
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

/// The state of an [`EarlyStopping`] that a resumed run needs. It does not contain the options: a resumed
/// run uses its own patience, not that of the previous run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EarlyStoppingState {
    /// The number of evaluations.
    pub evaluations: u64,
    /// The best metric.
    pub best_metric: Option<f64>,
    /// The step of the best metric.
    pub best_step: Option<u64>,
    /// The number of consecutive evaluations that did not reset the counter.
    pub patience_counter: u32,
}

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct EvaluationOutcome {
    /// If `true`, the metric is the best so far, and the weights should be kept.
    pub improved: bool,
    /// If `true`, the patience is exhausted. This can happen together with an improvement below the
    /// threshold.
    pub stop: bool,
}

impl EarlyStopping {
    /// Returns a tracker without evaluations.
    ///
    /// # Errors
    /// [`crate::Error::Common`] for a patience of 0 or a threshold that is negative or NaN.
    pub fn new(config: EarlyStoppingConfig) -> Result<Self> {
        if let Some(patience) = config.early_stopping_patience {
            check_at_least("early_stopping_patience", patience, 1)?;
        }
        // Infinity is allowed: then only the first evaluation resets the counter.
        let threshold = config.early_stopping_threshold;
        let expected = "0 or positive, in units of the metric";
        check_option(
            threshold >= 0.0,
            "early_stopping_threshold",
            threshold,
            expected,
        )?;
        Ok(Self {
            config,
            state: EarlyStoppingState::default(),
        })
    }

    /// Records the metric of an evaluation after `step`.
    pub fn observe(&mut self, step: u64, metric: f64) -> EvaluationOutcome {
        let threshold = self.config.early_stopping_threshold;
        let improved = self.is_better(metric);
        let state = &mut self.state;
        let enough = state
            .best_metric
            .is_none_or(|best| (metric - best).abs() > threshold);
        // As in transformers, the first evaluation counts as an improvement whatever its metric.
        let resets = state.evaluations == 0 || (improved && enough);
        state.patience_counter = if resets {
            0
        } else {
            state.patience_counter + 1
        };
        state.evaluations += 1;
        // After the comparison above, which needs the previous best metric.
        if improved {
            state.best_metric = Some(metric);
            state.best_step = Some(step);
        }
        EvaluationOutcome {
            improved,
            stop: self.should_stop(),
        }
    }

    /// Returns `true` if the patience is exhausted.
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

    /// Returns the number of consecutive evaluations that did not reset the counter.
    #[must_use]
    pub fn patience_counter(&self) -> u32 {
        self.state.patience_counter
    }

    /// Returns the counters and the best metric.
    #[must_use]
    pub fn state_dict(&self) -> EarlyStoppingState {
        self.state
    }

    /// Loads the counters and the best metric of the run that is resumed; the options stay.
    pub fn load_state_dict(&mut self, state: EarlyStoppingState) {
        self.state = state;
    }

    /// Returns `true` if the metric is better than the best. Infinite and NaN metrics never are: a run
    /// that diverged has not improved.
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
