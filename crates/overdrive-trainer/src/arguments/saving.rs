//! The arguments about snapshots.

use std::path::{Path, PathBuf};
use std::time::Duration;

use overdrive_optim::{EarlyStopping, EarlyStoppingConfig};
use overdrive_snapshot::{Best, Snapshot, SnapshotOptions};

use super::choices::{IntervalStrategy, ResumeFromCheckpoint, SaveStrategy};
use super::training::TrainingArguments;
use crate::Result;
use crate::error::{invalid, refuse};

/// The file of the arguments in the folder of a run.
pub(crate) const ARGUMENTS: &str = "training_args.json";

/// A metric by which models are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Metric {
    Loss,
    BitsPerByte,
}

impl TrainingArguments {
    /// Returns the options of the snapshots.
    pub(crate) fn snapshot_options(&self) -> SnapshotOptions {
        let best = match self.greater_is_better {
            Some(true) => Best::Highest,
            // Both metrics, loss and bits per byte, are better if lower.
            _ => Best::Lowest,
        };
        SnapshotOptions {
            total_limit: self.save_total_limit,
            // Set regardless of the model that is loaded at the end: without evaluations no snapshot has a
            // metric, so there is no best snapshot.
            best: Some(best),
            peer_timeout: Duration::try_from_secs_f64(self.ddp_timeout).unwrap_or(Duration::MAX),
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

    /// Returns the folder of the run that `resume_from_checkpoint` resumes, if there is a run.
    pub(crate) fn resumed_root(&self) -> Result<Option<PathBuf>> {
        let root = match &self.resume_from_checkpoint {
            None | Some(ResumeFromCheckpoint::Latest(false)) => None,
            Some(ResumeFromCheckpoint::Latest(true)) if self.output_dir.is_none() => {
                let expected = "the folder of a snapshot, unless `output_dir` names the run to resume; \
                                give it with `--out DIR`";
                return invalid("resume_from_checkpoint", true, expected);
            }
            Some(ResumeFromCheckpoint::Latest(true)) => self.output_dir.clone(),
            Some(ResumeFromCheckpoint::Folder(snapshot)) => {
                let run = || Snapshot::run_folder(snapshot).map(Path::to_path_buf);
                self.output_dir.clone().or_else(run)
            }
        };
        // A folder without a run is not an error: when a job that always resumes starts for the
        // first time, there is no run.
        Ok(root.filter(|root| root.join(ARGUMENTS).is_file()))
    }

    /// Returns the snapshots from which the run may resume, the preferred one first. The lengths of their files were
    /// checked, but not their contents.
    pub(crate) fn listed_snapshots(&self) -> Result<Vec<Snapshot>> {
        if let Some(ResumeFromCheckpoint::Folder(folder)) = &self.resume_from_checkpoint {
            return Ok(vec![Snapshot::open_unverified(folder)?]);
        }
        Ok(match self.resumed_root()? {
            Some(root) => Snapshot::list(root)?,
            None => Vec::new(),
        })
    }

    /// Checks the keys about snapshots against each other.
    pub(crate) fn validate_saving(&self) -> Result<()> {
        self.metric()?;
        let never = |allowed: &str| {
            format!(
                "{allowed} with `eval_strategy: no`, because only evaluations find the best model; set \
                 `eval_strategy` (`--eval-steps N`)"
            )
        };
        let unevaluated = self.eval_strategy == IntervalStrategy::No;
        let (loads, patience) = (self.load_best_model_at_end, self.early_stopping_patience);
        let between = format!(
            "false unless every snapshot follows an evaluation (`save_strategy`, `save_steps`: {}; \
             `eval_strategy`, `eval_steps`: {}); make `save_steps` a multiple of `eval_steps`, or write \
             `save_strategy: best`",
            self.save_steps,
            self.eval_steps.unwrap_or(self.logging_steps)
        );
        #[rustfmt::skip]
        refuse(&[
            (loads && unevaluated, "load_best_model_at_end", &true, &never("false")),
            (patience.is_some() && unevaluated, "early_stopping_patience", &patience.unwrap_or(0), &never("left out")),
            (self.save_strategy == SaveStrategy::Best && unevaluated, "save_strategy", &"best", &never("`no`, `steps` or `epoch`")),
            (loads && !self.evaluates_every_snapshot(), "load_best_model_at_end", &true, &between),
        ])?;
        if patience.is_some() {
            self.early_stopping()?;
        }
        Ok(())
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

    /// Checks that evaluations, if there are any, have the metric that `metric_for_best_model` names.
    pub(crate) fn check_metric(&self, counts_bytes: bool) -> Result<()> {
        let evaluates = self.eval_on_start || self.eval_strategy != IntervalStrategy::No;
        match self.metric()? {
            Metric::BitsPerByte if evaluates && !counts_bytes => not_counted(),
            _ => Ok(()),
        }
    }

    /// Returns the metric that `metric_for_best_model` names.
    pub(crate) fn metric(&self) -> Result<Metric> {
        let name = self.metric_for_best_model.as_deref().unwrap_or("loss");
        // transformers prefixes evaluation metrics with `eval_` and accepts names without it.
        match name.strip_prefix("eval_").unwrap_or(name) {
            "loss" => Ok(Metric::Loss),
            "bits_per_byte" => Ok(Metric::BitsPerByte),
            _ => invalid("metric_for_best_model", name, "`loss` or `bits_per_byte`"),
        }
    }
}

/// Returns the error for a task that has no bits per byte.
pub(crate) fn not_counted<T>() -> Result<T> {
    let expected = "`loss` where the bytes of the text are not known: in fine-tuning, and for files of tokens such \
                    as nanoGPT's";
    invalid("metric_for_best_model", "bits_per_byte", expected)
}
