//! The arguments about snapshots.

use std::path::PathBuf;

use overdrive_optim::{EarlyStopping, EarlyStoppingConfig};
use overdrive_snapshot::{Best, SnapshotOptions};
use serde::{Deserialize, Deserializer, Serialize};

use crate::validate::invalid;
use crate::{IntervalStrategy, Result, TrainingArguments};

/// When a snapshot is saved: `SaveStrategy` of transformers.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SaveStrategy {
    /// Never. The model is saved at the end all the same.
    No,
    /// Every `save_steps` steps, and at the end.
    #[default]
    Steps,
    /// At the end of each pass over the data, and at the end.
    Epoch,
    /// Whenever `metric_for_best_model` improves.
    Best,
}

/// The snapshot that a run resumes from.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum ResumeFromCheckpoint {
    /// True: the newest whole snapshot of the run. False: none, it is a new run.
    Latest(bool),
    /// The snapshot in this folder.
    Folder(PathBuf),
}

impl<'de> Deserialize<'de> for ResumeFromCheckpoint {
    /// `true` and `false` may also be texts, as flags are.
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> std::result::Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(untagged, expecting = "true, or the folder of a snapshot")]
        enum Given {
            Truth(bool),
            Text(String),
        }
        Ok(match Given::deserialize(deserializer)? {
            Given::Truth(latest) => Self::Latest(latest),
            Given::Text(text) => match text.to_lowercase().as_str() {
                "true" => Self::Latest(true),
                "false" => Self::Latest(false),
                _ => Self::Folder(text.into()),
            },
        })
    }
}

impl TrainingArguments {
    /// Whether anything depends on which evaluation was best.
    fn looks_for_best(&self) -> bool {
        self.load_best_model_at_end
            || self.save_strategy == SaveStrategy::Best
            || self.early_stopping_patience.is_some()
    }

    /// Returns how snapshots are kept.
    pub(crate) fn snapshot_options(&self) -> SnapshotOptions {
        let best = match self.greater_is_better {
            Some(true) => Best::Highest,
            _ => Best::Lowest,
        };
        SnapshotOptions {
            total_limit: self.save_total_limit,
            best: self.load_best_model_at_end.then_some(best),
            ..SnapshotOptions::default()
        }
    }

    /// Makes what keeps track of the best evaluation, and ends the run where `early_stopping_patience` says
    /// so.
    ///
    /// # Errors
    /// When the patience or the threshold is out of its range.
    pub fn early_stopping(&self) -> Result<EarlyStopping> {
        Ok(EarlyStopping::new(EarlyStoppingConfig {
            early_stopping_patience: self.early_stopping_patience,
            early_stopping_threshold: self.early_stopping_threshold,
            greater_is_better: self.greater_is_better.unwrap_or(false),
        })?)
    }

    /// Checks the keys about snapshots together.
    pub(crate) fn validate_saving(&self) -> Result<()> {
        self.metric()?;
        if self.looks_for_best() && self.eval_strategy == IntervalStrategy::No {
            let (key, given) = if self.load_best_model_at_end {
                ("load_best_model_at_end", "true".to_owned())
            } else if let Some(patience) = self.early_stopping_patience {
                ("early_stopping_patience", patience.to_string())
            } else {
                ("save_strategy", "best".to_owned())
            };
            let problem = "`eval_strategy` is `no`, and only evaluations find what is best";
            return invalid(
                key,
                given,
                problem,
                "set `eval_strategy` (`--eval-steps N`)",
            );
        }
        if self.load_best_model_at_end && !self.saves_what_it_evaluates() {
            let problem = format!(
                "snapshots (`save_strategy`, `save_steps`: {}) are not at evaluations (`eval_strategy`, `eval_steps`: {})",
                self.save_steps,
                self.eval_steps.unwrap_or(self.logging_steps)
            );
            let way_out =
                "make `save_steps` a multiple of `eval_steps`, or write `save_strategy: best`";
            return invalid("load_best_model_at_end", true, problem, way_out);
        }
        match self.early_stopping_patience {
            Some(_) => self.early_stopping().map(drop),
            None => Ok(()),
        }
    }

    /// Whether each snapshot has an evaluation of its own.
    fn saves_what_it_evaluates(&self) -> bool {
        match (self.save_strategy, self.eval_strategy) {
            (SaveStrategy::Best, _) | (SaveStrategy::Epoch, IntervalStrategy::Epoch) => true,
            (SaveStrategy::Steps, IntervalStrategy::Steps) => {
                let every = self.eval_steps.unwrap_or(self.logging_steps);
                // Parts of the run cannot be compared with steps before its length is known.
                match (self.save_steps < 1.0, every < 1.0) {
                    (false, false) => self.save_steps % every == 0.0,
                    (true, true) => {
                        let times = self.save_steps / every;
                        (times - times.round()).abs() < 1e-9
                    }
                    _ => false,
                }
            }
            _ => false,
        }
    }
}
