//! The arguments about snapshots.

use std::path::PathBuf;

use overdrive_optim::{EarlyStopping, EarlyStoppingConfig};
use overdrive_snapshot::{Best, SnapshotOptions};
use serde::{Deserialize, Deserializer, Serialize};

use crate::validate::invalid;
use crate::{IntervalStrategy, Result, TrainingArguments};

/// The times of a snapshot (`SaveStrategy` of transformers).
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SaveStrategy {
    /// Never, also not after a signal. The model is saved at the end nevertheless.
    No,
    /// Every `save_steps` steps, and at the end.
    #[default]
    Steps,
    /// At the end of each epoch, and at the end.
    Epoch,
    /// Whenever `metric_for_best_model` improves.
    Best,
}

/// The snapshot from which a run resumes.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum ResumeFromCheckpoint {
    /// `true`: the newest complete snapshot of the run. `false`: none, it is a new run.
    Latest(bool),
    /// The snapshot in this folder.
    Folder(PathBuf),
}

/// Reads `true`, `false` or a folder, as a flag gives them.
impl From<&str> for ResumeFromCheckpoint {
    fn from(text: &str) -> Self {
        match text.to_lowercase().as_str() {
            "true" => Self::Latest(true),
            "false" => Self::Latest(false),
            _ => Self::Folder(text.into()),
        }
    }
}

impl<'de> Deserialize<'de> for ResumeFromCheckpoint {
    /// Deserializes `true` and `false` also from strings, because flags are strings.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "true, or the folder of a snapshot")]
        enum Given {
            Truth(bool),
            Text(String),
        }
        Ok(match Given::deserialize(deserializer)? {
            Given::Truth(latest) => Self::Latest(latest),
            Given::Text(text) => text.as_str().into(),
        })
    }
}

impl TrainingArguments {
    /// Returns `true` if an option depends on the best evaluation.
    fn needs_best(&self) -> bool {
        self.load_best_model_at_end
            || self.save_strategy == SaveStrategy::Best
            || self.early_stopping_patience.is_some()
    }

    /// Returns the options of the snapshots.
    pub(crate) fn snapshot_options(&self) -> SnapshotOptions {
        let best = match self.greater_is_better {
            Some(true) => Best::Highest,
            // Both metrics, loss and bits per byte, are better if lower.
            _ => Best::Lowest,
        };
        SnapshotOptions {
            total_limit: self.save_total_limit,
            // Whatever is loaded at the end: without evaluations no snapshot has a metric, and none is the best.
            best: Some(best),
            ..SnapshotOptions::default()
        }
    }

    /// Returns the tracker of the best evaluation, which ends the run after `early_stopping_patience`
    /// evaluations without improvement.
    ///
    /// # Errors
    /// An error if the patience or the threshold is outside its range.
    pub fn early_stopping(&self) -> Result<EarlyStopping> {
        Ok(EarlyStopping::new(EarlyStoppingConfig {
            early_stopping_patience: self.early_stopping_patience,
            early_stopping_threshold: self.early_stopping_threshold,
            greater_is_better: self.greater_is_better.unwrap_or(false),
        })?)
    }

    /// Checks the keys about snapshots against each other.
    pub(crate) fn validate_saving(&self) -> Result<()> {
        self.metric()?;
        if self.needs_best() && self.eval_strategy == IntervalStrategy::No {
            let (key, value, allowed) = if self.load_best_model_at_end {
                ("load_best_model_at_end", "true".to_owned(), "false")
            } else if let Some(patience) = self.early_stopping_patience {
                ("early_stopping_patience", patience.to_string(), "left out")
            } else {
                ("save_strategy", "best".to_owned(), "another one")
            };
            let expected = format!(
                "{allowed} with `eval_strategy: no`, because only evaluations find the best model; set \
                 `eval_strategy` (`--eval-steps N`)"
            );
            return invalid(key, value, expected);
        }
        if self.load_best_model_at_end && !self.evaluates_every_snapshot() {
            let expected = format!(
                "false unless every snapshot follows an evaluation (`save_strategy`, `save_steps`: {}; \
                 `eval_strategy`, `eval_steps`: {}); make `save_steps` a multiple of `eval_steps`, or write \
                 `save_strategy: best`",
                self.save_steps,
                self.eval_steps.unwrap_or(self.logging_steps)
            );
            return invalid("load_best_model_at_end", true, expected);
        }
        match self.early_stopping_patience {
            Some(_) => self.early_stopping().map(drop),
            None => Ok(()),
        }
    }

    /// Returns `true` if each snapshot follows an evaluation at the same step.
    fn evaluates_every_snapshot(&self) -> bool {
        match (self.save_strategy, self.eval_strategy) {
            (SaveStrategy::Best, _) | (SaveStrategy::Epoch, IntervalStrategy::Epoch) => true,
            (SaveStrategy::Steps, IntervalStrategy::Steps) => {
                let every = self.eval_steps.unwrap_or(self.logging_steps);
                // Fractions of the run cannot be compared with steps before its length is known.
                match (self.save_steps < 1.0, every < 1.0) {
                    (false, false) => self.save_steps % every == 0.0,
                    (true, true) => {
                        let times = self.save_steps / every;
                        // 0.3 / 0.1 is not exactly 3.
                        (times - times.round()).abs() < 1e-9
                    }
                    _ => false,
                }
            }
            _ => false,
        }
    }
}
