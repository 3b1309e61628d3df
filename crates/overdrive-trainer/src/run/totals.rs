use overdrive_distributed::ProcessGroup;
use overdrive_profiling::StepWork;

use super::micro_batch::MicroBatch;
use crate::Result;

/// The totals of an optimizer step, from numbers that the host knows: nothing is read from the device.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct StepTotals {
    /// The number of tokens without padding.
    pub(super) tokens: u64,
    /// The number of tokens with padding.
    pub(super) padded_tokens: u64,
    examples: u64,
    /// If `true`, a process was asked to stop.
    pub(super) stop: bool,
}

impl StepTotals {
    /// Returns the totals of the micro-batches of one process.
    pub(super) fn of<B: MicroBatch>(batches: &[B]) -> Self {
        let sum = |count: fn(&B) -> usize| batches.iter().map(count).sum::<usize>() as u64;
        Self {
            tokens: sum(B::tokens),
            padded_tokens: sum(B::padded_tokens),
            examples: sum(B::examples),
            ..Self::default()
        }
    }

    /// Sums the totals of all processes in one collective; a single process needs none.
    pub(super) fn over(self, group: &ProcessGroup) -> Result<Self> {
        // Counts are exact in f64: they are far below 2^53.
        let [tokens, padded, examples, stop] = group.sums([
            self.tokens as f64,
            self.padded_tokens as f64,
            self.examples as f64,
            f64::from(u8::from(self.stop)),
        ])?;
        Ok(Self {
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
