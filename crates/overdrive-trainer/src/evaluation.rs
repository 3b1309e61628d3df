//! Evaluations, and the metric by which they are compared.

use overdrive_tracking::StepMetrics;
use serde::{Deserialize, Serialize};

use crate::validate::invalid;
use crate::{Result, TrainingArguments};

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// The mean loss in nats a token.
    pub loss: f64,
    /// The same in bits a byte of text, where the bytes are known.
    pub bits_per_byte: Option<f64>,
}

impl Evaluation {
    /// Makes an evaluation of a mean loss and, where the bytes are known, of bits a byte.
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

/// A metric that one model can be better in than another.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Metric {
    Loss,
    BitsPerByte,
}

impl TrainingArguments {
    /// Returns the metric of an evaluation that `metric_for_best_model` names, where it was measured.
    ///
    /// # Errors
    /// [`crate::Error::Invalid`] if the key names no metric.
    pub fn best_model_metric(&self, evaluation: &Evaluation) -> Result<Option<f64>> {
        Ok(match self.metric()? {
            Metric::Loss => Some(evaluation.loss),
            Metric::BitsPerByte => evaluation.bits_per_byte,
        })
    }

    /// The metric that `metric_for_best_model` names.
    pub(crate) fn metric(&self) -> Result<Metric> {
        let name = self.metric_for_best_model.as_deref().unwrap_or("loss");
        match name.strip_prefix("eval_").unwrap_or(name) {
            "loss" => Ok(Metric::Loss),
            "bits_per_byte" => Ok(Metric::BitsPerByte),
            _ => invalid(
                "metric_for_best_model",
                format!("`{name}`"),
                "evaluations have `loss` and `bits_per_byte`",
                "name one of them",
            ),
        }
    }
}
