//! The search for the fastest settings of a run: by the estimate of the memory first, by short trials after.

mod search;
#[cfg(test)]
mod tests;
mod trials;

pub use trials::Trials;

use std::fmt::{self, Write as _};

use overdrive_accumulation::BatchPlan;
use overdrive_core::units;
use overdrive_precision::Precision;
use serde::{Deserialize, Serialize};
use tch::Device;

use crate::Error;
use crate::arguments::TrainingArguments;
use crate::memory_estimate::DecoderShape;
use search::Search;

/// The options of [`TrainingArguments::tune`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TuneOptions {
    /// The greatest peak of the tensors in bytes.
    pub limit_bytes: u64,
    /// The precisions to try, the recommended one first.
    pub precisions: Vec<Precision>,
    /// The device of the trials. Default: the CPU.
    pub device: Device,
    /// The numbers of workers to try after the batch is found.
    pub workers: Vec<usize>,
    /// The greatest number of trials. Default 24.
    pub max_trials: usize,
}

impl TuneOptions {
    /// Returns the options for a limit: the given precisions, and 0, 1, 2 and 4 workers.
    pub fn new(limit_bytes: u64, precisions: Vec<Precision>) -> Self {
        Self {
            limit_bytes,
            precisions,
            device: Device::Cpu,
            workers: vec![0, 1, 2, 4],
            max_trials: 24,
        }
    }
}

/// The measurements of a trial.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Trial {
    /// The peak of the tensors in bytes.
    pub peak_bytes: u64,
    /// The training tokens a second, for the whole effective batch.
    pub tokens_per_second: f64,
    /// The fraction of the steps' time that data loading took, 0 to 1.
    pub data_share: f64,
}

impl TrainingArguments {
    /// Finds the fastest micro-batch, accumulation, precision, checkpointing and number of workers for a model of
    /// `shape`, for the effective batch of these arguments, within `options.limit_bytes`.
    ///
    /// `trial` measures a configuration, and returns [`TuneOutcome::Measured`] or [`TuneOutcome::OutOfMemory`]; it is
    /// called only for those whose estimated peak is within the limit and that could be the fastest:
    ///
    /// 1. Each precision with one micro-batch; the others are left out with the slower precisions.
    /// 2. The micro-batches without checkpointing, from the largest that fits down, until two in a row are slower than
    ///    the fastest by more than 5%.
    /// 3. With checkpointing, only micro-batches that do not fit without it.
    /// 4. The numbers of workers with the fastest of these, if data loading takes at least 1% of its steps.
    ///
    /// A trial that runs out of memory, or whose peak is above the limit, is not chosen. Of the rows within 2% of the
    /// fastest, the one with the lowest peak is.
    ///
    /// # Errors
    /// An error of the estimate, or of `trial`.
    pub fn tune<E: From<Error>>(
        &self,
        shape: DecoderShape,
        options: &TuneOptions,
        mut trial: impl FnMut(&TuneCandidate) -> Result<TuneOutcome, E>,
    ) -> Result<Tuning, E> {
        Search::new(self, shape, options, &mut trial)?.run()
    }
}

/// Settings to try.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct TuneCandidate {
    /// The micro-batch and the accumulation.
    pub batch: BatchPlan,
    /// The precision.
    pub precision: Precision,
    /// The value of `gradient_checkpointing`.
    pub gradient_checkpointing: bool,
    /// The value of `dataloader_num_workers`.
    pub dataloader_num_workers: usize,
}

impl TuneCandidate {
    /// Returns `arguments` with these settings.
    pub fn of(&self, arguments: &TrainingArguments) -> TrainingArguments {
        let mut changed = TrainingArguments {
            gradient_checkpointing: self.gradient_checkpointing,
            dataloader_num_workers: self.dataloader_num_workers,
            ..arguments.clone()
        };
        if self.dataloader_num_workers == 0 {
            // The two keys exclude each other.
            changed.dataloader_prefetch_factor = None;
        }
        changed.set_precision(self.precision);
        changed.set_batch_plan(self.batch);
        changed
    }
}

impl fmt::Display for TuneCandidate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "{} × {} in {}, {}checkpointing, {} workers",
            self.batch.micro_batch(),
            self.batch.accumulation_steps(),
            self.precision,
            if self.gradient_checkpointing {
                ""
            } else {
                "no "
            },
            self.dataloader_num_workers
        )
    }
}

/// The outcome of a row.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TuneOutcome {
    /// It was not tried, for this reason.
    LeftOut(String),
    /// Memory ran out in its trial, with this message.
    OutOfMemory(String),
    /// It was measured, and its peak is above the limit.
    OverLimit(Trial),
    /// It was measured.
    Measured(Trial),
}

impl fmt::Display for TuneOutcome {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::LeftOut(reason) => write!(f, "left out: {reason}"),
            Self::OutOfMemory(message) => write!(f, "out of memory: {message}"),
            Self::OverLimit(_) => f.write_str("over the limit"),
            Self::Measured(trial) => write!(
                f,
                "{} tokens/s, peak {}",
                units::rounded(trial.tokens_per_second),
                units::bytes(trial.peak_bytes)
            ),
        }
    }
}

/// A row of the grid.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct TuneRow {
    /// The settings.
    pub candidate: TuneCandidate,
    /// The estimated peak of the tensors in bytes.
    pub estimated_bytes: u64,
    /// The outcome.
    pub outcome: TuneOutcome,
}

impl TuneRow {
    /// Returns the measurements of a row that may be chosen.
    pub fn measured(&self) -> Option<&Trial> {
        match &self.outcome {
            TuneOutcome::Measured(trial) => Some(trial),
            _ => None,
        }
    }
}

/// The result of a search.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Tuning {
    /// The greatest peak of the tensors in bytes.
    pub limit_bytes: u64,
    /// All rows.
    pub rows: Vec<TuneRow>,
    /// The index of the chosen row; `None` if none could be measured within the limit.
    pub best: Option<usize>,
}

impl Tuning {
    /// Returns the chosen row.
    pub fn best(&self) -> Option<&TuneRow> {
        self.rows.get(self.best?)
    }

    /// Returns the grid as a table in Markdown; the chosen row is in bold.
    pub fn markdown(&self) -> String {
        let mut text = "| micro-batch × accumulation | precision | checkpointing | workers | estimate | peak | tokens/s | |\n\
                        |---|---|---|---|---|---|---|---|\n"
            .to_owned();
        for (index, row) in self.rows.iter().enumerate() {
            let TuneCandidate {
                batch,
                precision,
                gradient_checkpointing,
                dataloader_num_workers,
            } = row.candidate;
            let (trial, note) = match &row.outcome {
                TuneOutcome::Measured(trial) => (Some(trial), String::new()),
                TuneOutcome::OverLimit(trial) => (Some(trial), row.outcome.to_string()),
                other => (None, other.to_string()),
            };
            let (strong, note) = match self.best == Some(index) {
                true => ("**", "chosen".to_owned()),
                false => ("", note),
            };
            let peak = trial.map_or_else(String::new, |trial| units::bytes(trial.peak_bytes));
            let rate =
                trial.map_or_else(String::new, |trial| units::rounded(trial.tokens_per_second));
            let _ = writeln!(
                text,
                "| {strong}{} × {}{strong} | {precision} | {} | {dataloader_num_workers} | {} | {peak} | {rate} | {note} |",
                batch.micro_batch(),
                batch.accumulation_steps(),
                if gradient_checkpointing { "yes" } else { "no" },
                units::bytes(row.estimated_bytes),
            );
        }
        text
    }
}
