//! The result of an evaluation, and the metric that compares evaluations.

use overdrive_tracking::StepMetrics;
use serde::{Deserialize, Serialize};

use crate::validate::invalid;
use crate::{IntervalStrategy, Result, TrainingArguments};

/// The result of an evaluation.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// The mean loss in nats per token.
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

/// A metric by which models are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Metric {
    Loss,
    BitsPerByte,
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

    /// Checks that evaluations, if there are any, have the metric that `metric_for_best_model` names.
    pub(crate) fn check_metric(&self, counts_bytes: bool) -> Result<()> {
        let evaluates = self.eval_on_start || self.eval_strategy != IntervalStrategy::No;
        match self.metric()? {
            Metric::BitsPerByte if evaluates && !counts_bytes => not_counted(),
            _ => Ok(()),
        }
    }

    /// Returns the metric that `metric_for_best_model` names.
    pub(crate) fn metric(&self) -> Result<Metric> {
        let name = self.metric_for_best_model.as_deref().unwrap_or("loss");
        // transformers prefixes evaluation metrics with `eval_` and accepts names without it.
        match name.strip_prefix("eval_").unwrap_or(name) {
            "loss" => Ok(Metric::Loss),
            "bits_per_byte" => Ok(Metric::BitsPerByte),
            _ => invalid("metric_for_best_model", name, "`loss` or `bits_per_byte`"),
        }
    }
}

/// Returns the error of bits per byte where they do not exist.
fn not_counted<T>() -> Result<T> {
    let expected = "`loss` where the bytes of the text are not known: in fine-tuning, and for files of tokens such \
                    as nanoGPT's";
    invalid("metric_for_best_model", "bits_per_byte", expected)
}
