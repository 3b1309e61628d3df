use overdrive_accumulation::AccumulatedStep;
use overdrive_distributed::ProcessGroup;
use overdrive_profiling::StepWork;

use super::micro_batch::MicroBatch;
use crate::Result;

/// The counts of a micro-batch.
#[derive(Debug, Clone, Copy)]
pub(super) struct Counts {
    /// `None` if its loss is a mean.
    pub(super) labels: Option<u64>,
    tokens: usize,
    padded_tokens: usize,
    examples: usize,
}

impl Counts {
    pub(super) fn of<B: MicroBatch>(batch: &B) -> Self {
        Self {
            labels: batch.label_count().map(|count| count as u64),
            tokens: batch.tokens(),
            padded_tokens: batch.padded_tokens(),
            examples: batch.examples(),
        }
    }
}

/// The totals of one optimizer step over all processes, from numbers that the host knows: nothing is read from the
/// device.
#[derive(Debug, Clone, Copy)]
pub(super) struct StepTotals {
    /// The divisor of the loss: the labels, or the micro-batches whose losses are means.
    pub(super) labels: u64,
    /// The number of tokens without padding.
    pub(super) tokens: u64,
    /// The number of tokens with padding.
    pub(super) padded_tokens: u64,
    examples: u64,
    /// If `true`, a process was asked to stop.
    pub(super) stop: bool,
}

impl StepTotals {
    /// Sums the step over all processes in one collective; a single process needs none.
    pub(super) fn over(
        group: &ProcessGroup,
        window: &[Counts],
        step: &AccumulatedStep,
        stop: bool,
    ) -> Result<Self> {
        let sum = |count: fn(&Counts) -> usize| window.iter().map(count).sum::<usize>() as f64;
        // Counts are exact in f64: they are far below 2^53.
        let [labels, tokens, padded, examples, stop] = group.sums([
            step.tokens as f64,
            sum(|counts| counts.tokens),
            sum(|counts| counts.padded_tokens),
            sum(|counts| counts.examples),
            f64::from(u8::from(stop)),
        ])?;
        Ok(Self {
            labels: labels as u64,
            tokens: tokens as u64,
            padded_tokens: padded as u64,
            examples: examples as u64,
            stop: stop > 0.0,
        })
    }

    /// Returns the totals that a recorder of steps needs.
    pub(super) fn work(&self) -> StepWork {
        StepWork {
            tokens: self.tokens,
            samples: self.examples,
        }
    }

    /// Returns the fraction of padding, if there is any.
    pub(super) fn padding(&self) -> Option<f64> {
        (self.padded_tokens > self.tokens)
            .then(|| 1.0 - self.tokens as f64 / self.padded_tokens as f64)
    }
}
