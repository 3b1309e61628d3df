use std::fmt;

use overdrive::profiling::{Bottleneck, DataLoading};
use overdrive::trainer::Evaluation;

/// What a run came to.
#[derive(Debug, Clone, Default)]
pub struct Summary {
    /// The loss of each step since this process began, over all processes, in nats a token.
    pub losses: Vec<f64>,
    /// The last evaluation.
    pub evaluation: Option<Evaluation>,
    /// Tokens of all processes, padding not counted.
    pub tokens: u64,
    /// Tokens of all processes with padding.
    pub padded_tokens: u64,
    /// Seconds of all steps, evaluations not counted.
    pub step_seconds: f64,
    /// Bytes of the optimizer's state.
    pub optimizer_bytes: u64,
    /// What slowed the steps down.
    pub bottleneck: Option<Bottleneck>,
    /// How long the steps waited for their batches.
    pub data_loading: Option<DataLoading>,
    /// The step after which the run resumed; 0 for a new run.
    pub resumed_step: u64,
    /// The step whose weights the model has at the end, where it has those of the best snapshot.
    pub best_step: Option<u64>,
    /// Whether a signal ended it early.
    pub interrupted: bool,
}

impl Summary {
    /// Returns the tokens a second over all steps.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.step_seconds.max(f64::MIN_POSITIVE)
    }

    /// Returns the share of padding among all tokens, 0 to 1.
    pub fn padding(&self) -> f64 {
        1.0 - self.tokens as f64 / self.padded_tokens.max(1) as f64
    }
}

/// What is worth a line at the end: padding, waiting for data, the bottleneck.
impl fmt::Display for Summary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.padding() > 0.0 {
            writeln!(f, "{:.1}% of the tokens were padding", 100.0 * self.padding())?;
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
