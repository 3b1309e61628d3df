//! The arguments about snapshots.

use std::path::{Path, PathBuf};
use std::time::Duration;

use overdrive_optim::{EarlyStopping, EarlyStoppingConfig};
use overdrive_snapshot::{Best, Snapshot, SnapshotOptions};

use super::choices::{IntervalStrategy, ResumeFromCheckpoint, SaveStrategy};
use super::training::TrainingArguments;
use crate::Result;
use crate::error::{invalid, listed, refuse};

/// The file of the arguments in the folder of a run.
pub(crate) const ARGUMENTS: &str = "training_args.json";

/// The name of the mean loss in bits per byte of text among the metrics of an evaluation.
pub(crate) const BITS_PER_BYTE: &str = "bits_per_byte";

impl TrainingArguments {
    /// Returns the options of the snapshots.
    pub(crate) fn snapshot_options(&self) -> SnapshotOptions {
        let best = match self.is_greater_better() {
            true => Best::Highest,
            false => Best::Lowest,
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
            greater_is_better: self.is_greater_better(),
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

    /// Checks before a run that its evaluations, if there are any, have the metric that `metric_for_best_model` names: the
    /// loss, or one of `others`, which are those of the program's [`Evaluation`](crate::Evaluation). Without this check, the
    /// first evaluation is the error.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with the names.
    pub fn check_metric(&self, others: &[&str]) -> Result<()> {
        let evaluates = self.eval_on_start || self.eval_strategy != IntervalStrategy::No;
        match self.best_metric() {
            name if evaluates && name != "loss" && !others.contains(&name) => {
                no_metric(name, others.iter().copied())
            }
            _ => Ok(()),
        }
    }

    /// Returns the name of the metric that determines the best model, without the prefix `eval_`, which transformers accepts
    /// too.
    pub(crate) fn best_metric(&self) -> &str {
        let name = self.metric_for_best_model.as_deref().unwrap_or("loss");
        name.strip_prefix("eval_").unwrap_or(name)
    }

    /// Returns `true` if a greater value of that metric is better. As in transformers, losses are better if lower, which bits
    /// per byte are too, and all others if greater.
    fn is_greater_better(&self) -> bool {
        let name = self.best_metric();
        let is_loss = name.ends_with("loss") || name == BITS_PER_BYTE;
        self.greater_is_better.unwrap_or(!is_loss)
    }
}

/// Returns the error for an evaluation without the metric `name`, which has the loss and `others`.
pub(crate) fn no_metric<'n, T>(name: &str, others: impl Iterator<Item = &'n str>) -> Result<T> {
    let names: Vec<&str> = std::iter::once("loss").chain(others).collect();
    let expected = match names.len() {
        1 if name == BITS_PER_BYTE => {
            "`loss` where the bytes of the text are not known: in fine-tuning, and for files of tokens such as nanoGPT's"
                .to_owned()
        }
        1 => "`loss`, the only metric of these evaluations".to_owned(),
        _ => format!("a metric of the evaluations: {}", listed(&names)),
    };
    invalid("metric_for_best_model", name, expected)
}
