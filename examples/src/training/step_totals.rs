use anyhow::Result;
use overdrive::accumulation::AccumulatedStep;
use overdrive::datasets::Batch;
use overdrive::distributed::ProcessGroup;
use overdrive::profiling::StepWork;
use overdrive::tracking::StepMetrics;

/// The totals of one optimizer step over all processes, from numbers that the host knows: nothing is read from the
/// device.
#[derive(Debug, Clone, Copy)]
pub struct StepTotals {
    /// The number of labels.
    pub labels: u64,
    /// The number of tokens without padding.
    pub tokens: u64,
    /// The number of tokens with padding.
    pub padded_tokens: u64,
    /// The number of sequences.
    pub sequences: u64,
    /// If `true`, a process was asked to stop.
    pub stop: bool,
}

impl StepTotals {
    /// Sums the step over all processes in one collective; in a world of one there is none.
    pub fn over(
        group: &ProcessGroup,
        window: &[Batch],
        step: &AccumulatedStep,
        stop: bool,
    ) -> Result<Self> {
        let sum = |count: fn(&Batch) -> usize| window.iter().map(count).sum::<usize>() as f64;
        // Counts are exact in f64: they are far below 2^53.
        let [labels, tokens, padded, sequences, stop] = group.sums([
            step.tokens as f64,
            sum(|batch| batch.tokens),
            sum(Batch::padded_tokens),
            sum(|batch| batch.sequences),
            f64::from(u8::from(stop)),
        ])?;
        Ok(Self {
            labels: labels as u64,
            tokens: tokens as u64,
            padded_tokens: padded as u64,
            sequences: sequences as u64,
            stop: stop > 0.0,
        })
    }

    /// Returns the totals that a recorder of steps needs.
    pub fn work(&self) -> StepWork {
        StepWork {
            tokens: self.tokens,
            samples: self.sequences,
        }
    }

    /// Adds the padding to the metrics of the step.
    pub fn apply_to(&self, metrics: &mut StepMetrics) {
        metrics.padding = (self.padded_tokens > self.tokens)
            .then(|| 1.0 - self.tokens as f64 / self.padded_tokens as f64);
    }
}
