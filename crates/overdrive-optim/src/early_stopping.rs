//! Stopping when an evaluation metric no longer improves.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Options of [`EarlyStopping`], under the names that transformers gives them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct EarlyStoppingConfig {
    /// Evaluations in a row without improvement after which to stop. Default 1.
    pub early_stopping_patience: u32,
    /// How much the metric must exceed the best one to count as an improvement, in units of the
    /// metric. Default 0.
    pub early_stopping_threshold: f64,
    /// Whether a larger metric is a better one. Default false, for a loss.
    pub greater_is_better: bool,
}

impl Default for EarlyStoppingConfig {
    fn default() -> Self {
        Self {
            early_stopping_patience: 1,
            early_stopping_threshold: 0.0,
            greater_is_better: false,
        }
    }
}

/// Counts evaluations without improvement, as transformers' `EarlyStoppingCallback` does.
///
/// The best metric moves with every improvement, however small, while the patience is renewed only
/// by one above the threshold; NaN never is an improvement. Serialize it to store its state.
///
/// ```
/// use overdrive_optim::{EarlyStopping, EarlyStoppingConfig};
///
/// let config = EarlyStoppingConfig { early_stopping_patience: 2, ..Default::default() };
/// let mut stopping = EarlyStopping::new(config)?;
/// assert!(stopping.observe(3.0).improved);
/// assert!(!stopping.observe(3.1).stop);
/// assert!(stopping.observe(3.2).stop);
/// assert_eq!(stopping.best_metric(), Some(3.0));
/// # Ok::<(), overdrive_optim::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EarlyStopping {
    config: EarlyStoppingConfig,
    evaluations: u64,
    best_metric: Option<f64>,
    patience_counter: u32,
}

/// What an evaluation means for the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Verdict {
    /// The metric is the best so far: keep these weights.
    pub improved: bool,
    /// Patience is used up. Can come with an improvement, one too small to count.
    pub stop: bool,
}

impl EarlyStopping {
    /// Nothing observed yet.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] for a patience of 0 or a threshold that is negative or NaN.
    pub fn new(config: EarlyStoppingConfig) -> Result<Self> {
        if config.early_stopping_patience == 0 {
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
            evaluations: 0,
            best_metric: None,
            patience_counter: 0,
        })
    }

    /// Takes in the metric of one evaluation.
    pub fn observe(&mut self, metric: f64) -> Verdict {
        let threshold = self.config.early_stopping_threshold;
        let improved = self.is_better(metric);
        let enough = self
            .best_metric
            .is_none_or(|best| (metric - best).abs() > threshold);
        // The first evaluation counts as an improvement whatever it says.
        let renews = self.evaluations == 0 || (improved && enough);
        self.patience_counter = if renews { 0 } else { self.patience_counter + 1 };
        self.evaluations += 1;
        if improved {
            self.best_metric = Some(metric);
        }
        Verdict {
            improved,
            stop: self.should_stop(),
        }
    }

    /// Whether patience is used up.
    #[must_use]
    pub fn should_stop(&self) -> bool {
        self.patience_counter >= self.config.early_stopping_patience
    }

    /// The best metric so far.
    #[must_use]
    pub fn best_metric(&self) -> Option<f64> {
        self.best_metric
    }

    /// Evaluations in a row that did not renew the patience.
    #[must_use]
    pub fn patience_counter(&self) -> u32 {
        self.patience_counter
    }

    /// Infinite and NaN metrics are never better: a run that diverged has not improved.
    fn is_better(&self, metric: f64) -> bool {
        metric.is_finite()
            && self.best_metric.is_none_or(|best| {
                if self.config.greater_is_better {
                    metric > best
                } else {
                    metric < best
                }
            })
    }
}
