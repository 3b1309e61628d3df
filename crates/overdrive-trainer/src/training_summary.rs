//! What a run came to.

use std::fmt;

use overdrive_profiling::{Bottleneck, DataLoading};

/// What an evaluation found.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Evaluation {
    /// The mean loss in nats a token.
    pub loss: f64,
    /// The same in bits a byte of text, where the bytes are known.
    pub bits_per_byte: Option<f64>,
}

/// What a run came to.
#[derive(Debug, Clone, Default)]
#[non_exhaustive]
pub struct TrainingSummary {
    /// The loss of each step since this process began, over all processes, in nats a token.
    pub losses: Vec<f64>,
    /// The last evaluation.
    pub evaluation: Option<Evaluation>,
    /// Tokens worked through by all processes, padding not counted.
    pub tokens: u64,
    /// The same with padding.
    pub places: u64,
    /// Seconds of all steps, evaluations not counted.
    pub step_seconds: f64,
    /// Bytes of the optimizer's state.
    pub optimizer_bytes: u64,
    /// What held the steps up.
    pub bottleneck: Option<Bottleneck>,
    /// How long the steps waited for their batches.
    pub data_loading: Option<DataLoading>,
    /// The step after which it went on; 0 for a new run.
    pub resumed_step: u64,
    /// The step whose weights the model has at the end, where it has those of the best snapshot.
    pub best_step: Option<u64>,
    /// Whether a signal ended it early.
    pub interrupted: bool,
}

impl TrainingSummary {
    /// Tokens a second over all steps.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.step_seconds.max(f64::MIN_POSITIVE)
    }

    /// The part of all places that was padding, 0 to 1.
    pub fn padding(&self) -> f64 {
        padding(self.tokens, self.places)
    }
}

/// What is worth a line at the end: padding, waiting for data, what held the steps up.
impl fmt::Display for TrainingSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.padding() > 0.0 {
            let padding = 100.0 * self.padding();
            writeln!(f, "{padding:.1}% of the places were padding")?;
        }
        if let Some(loading) = self.data_loading {
            writeln!(f, "{loading}")?;
        }
        if let Some(bottleneck) = &self.bottleneck {
            writeln!(f, "{bottleneck}")?;
        }
        if let Some(step) = self.best_step {
            writeln!(f, "the weights are those of step {step}, the best")?;
        }
        Ok(())
    }
}

/// The part of all places that holds no token, 0 to 1.
pub(crate) fn padding(tokens: u64, places: u64) -> f64 {
    1.0 - tokens as f64 / places.max(1) as f64
}
