//! The search for the fastest settings of a run: by the estimate of the memory first, by short trials after.

mod grid;
mod search;
#[cfg(test)]
mod tests;
mod trials;

pub use grid::{TuneCandidate, TuneOutcome, TuneRow, Tuning};
pub use trials::Trials;

use std::fmt;

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

/// The end of a trial.
#[derive(Debug, Clone, PartialEq)]
pub enum TrialEnd {
    /// It ran.
    Measured(Trial),
    /// Memory ran out, with a message.
    OutOfMemory(String),
}

impl fmt::Display for TrialEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Measured(trial) => write!(
                f,
                "{} tokens/s, peak {}",
                units::rounded(trial.tokens_per_second),
                units::bytes(trial.peak_bytes)
            ),
            Self::OutOfMemory(message) => write!(f, "out of memory: {message}"),
        }
    }
}

impl TrainingArguments {
    /// Finds the fastest micro-batch, accumulation, precision, checkpointing and number of workers for a model of
    /// `shape`, for the effective batch of these arguments, within `options.limit_bytes`.
    ///
    /// `trial` measures a configuration; it is called only for those whose estimated peak is within the limit and
    /// that could be the fastest:
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
        mut trial: impl FnMut(&TuneCandidate) -> Result<TrialEnd, E>,
    ) -> Result<Tuning, E> {
        Search::new(self, shape, options, &mut trial)?.run()
    }
}
