//! The search for the fastest settings of a run: by the estimate of the memory first, by short trials after.

mod grid;
mod search;
#[cfg(test)]
mod tests;
mod trials;

pub use grid::{TuneCandidate, TuneOutcome, TuneRow, Tuning};
pub use trials::Trials;

use overdrive_precision::Precision;
use overdrive_profiling::DecoderShape;
use serde::{Deserialize, Serialize};

use crate::Error;
use crate::arguments::TrainingArguments;
use search::Search;

/// The options of [`TrainingArguments::tune`].
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TuneOptions {
    /// The greatest peak of the tensors in bytes.
    pub limit_bytes: u64,
    /// The precisions to try, the recommended one first.
    pub precisions: Vec<Precision>,
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
    /// `trial` measures a configuration, and returns [`TuneOutcome::Measured`] or [`TuneOutcome::OutOfMemory`]; it is called only for those whose estimated peak is within the limit and
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
        mut trial: impl FnMut(&TuneCandidate) -> Result<TuneOutcome, E>,
    ) -> Result<Tuning, E> {
        Search::new(self, shape, options, &mut trial)?.run()
    }
}
