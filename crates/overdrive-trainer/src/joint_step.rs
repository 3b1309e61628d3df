//! What all processes must know of a step.

use overdrive_distributed::ProcessGroup;
use overdrive_profiling::StepMetrics;

use crate::Result;
use crate::training_summary::padding;

/// A step of this process, or of all.
#[derive(Debug, Clone, Copy)]
pub(crate) struct JointStep {
    /// The mean loss over the labels.
    pub(crate) loss: f64,
    pub(crate) labels: u64,
    pub(crate) tokens: u64,
    pub(crate) places: u64,
    pub(crate) samples: u64,
    /// Whether it was to be the last.
    pub(crate) stop: bool,
}

impl JointStep {
    /// The step of all processes, by one collective; of one process, as it is.
    pub(crate) fn over(self, group: &ProcessGroup) -> Result<Self> {
        if group.world_size() == 1 {
            return Ok(self);
        }
        let [loss, labels, tokens, places, samples, stop] = group.sums([
            self.loss * self.labels as f64,
            self.labels as f64,
            self.tokens as f64,
            self.places as f64,
            self.samples as f64,
            f64::from(u8::from(self.stop)),
        ])?;
        // Counts come back exactly: they are far below 2^53.
        Ok(Self {
            loss: loss / labels.max(1.0),
            labels: labels as u64,
            tokens: tokens as u64,
            places: places as u64,
            samples: samples as u64,
            stop: stop > 0.0,
        })
    }

    /// Adds what only all processes know; the speeds in `metrics` are those of this process, `own`.
    pub(crate) fn apply_to(&self, metrics: &mut StepMetrics, own: &Self) {
        if self.tokens != own.tokens {
            metrics.tokens_per_second *= self.tokens as f64 / own.tokens.max(1) as f64;
            let samples = self.samples as f64 / own.samples.max(1) as f64;
            metrics.samples_per_second = metrics.samples_per_second.map(|speed| speed * samples);
        }
        if self.places > self.tokens {
            metrics.padding = Some(padding(self.tokens, self.places));
        }
    }
}
