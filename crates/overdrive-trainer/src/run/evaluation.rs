//! The result of an evaluation, and the metric that compares evaluations.

use overdrive_tracking::StepMetrics;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::arguments::{Metric, TrainingArguments, not_counted};

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// The mean loss, in language modelling in nats per token.
    pub loss: f64,
    /// The mean loss in bits per byte of text, if the bytes were counted.
    pub bits_per_byte: Option<f64>,
}

impl Evaluation {
    /// Returns an evaluation with a mean loss and, if the bytes were counted, the bits per byte.
    pub fn new(loss: f64, bits_per_byte: Option<f64>) -> Self {
        Self {
            loss,
            bits_per_byte,
        }
    }

    /// Adds the evaluation to the metrics of the step before it.
    pub fn apply_to(&self, metrics: &mut StepMetrics) {
        metrics.eval_loss = Some(self.loss);
        metrics.eval_bits_per_byte = self.bits_per_byte;
    }
}

impl TrainingArguments {
    /// Returns the value of the metric that `metric_for_best_model` names.
    ///
    /// # Errors
    /// [`crate::Error::Common`] if the key names no metric, or bits per byte and the bytes were not counted.
    pub fn best_model_metric(&self, evaluation: &Evaluation) -> Result<f64> {
        match self.metric()? {
            Metric::Loss => Ok(evaluation.loss),
            Metric::BitsPerByte => evaluation.bits_per_byte.map_or_else(not_counted, Ok),
        }
    }
}
