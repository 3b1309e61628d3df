//! The result of an evaluation, and the metric that compares evaluations.

use std::collections::BTreeMap;

use overdrive_tracking::StepMetrics;
use serde::{Deserialize, Serialize};

use crate::Result;
use crate::arguments::{BITS_PER_BYTE, TrainingArguments, no_metric};

/// The result of an evaluation: its loss, and other metrics by their names, which are those that transformers' programs
/// return from `compute_metrics`.
///
/// ```
/// use overdrive_trainer::{Evaluation, TrainingArguments};
///
/// let evaluation = Evaluation::new(0.31).with_metric("accuracy", 0.92);
/// let arguments = TrainingArguments {
///     metric_for_best_model: Some("accuracy".to_owned()),
///     ..TrainingArguments::default()
/// };
/// assert_eq!(arguments.best_model_metric(&evaluation)?, 0.92);
/// # Ok::<(), overdrive_trainer::Error>(())
/// ```
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Evaluation {
    /// The mean loss, in language modelling in nats per token.
    pub loss: f64,
    /// The other metrics. They are logged under their names after `eval_`, and `metric_for_best_model` may name one.
    /// `bits_per_byte` is the mean loss in bits per byte of text.
    pub metrics: BTreeMap<String, f64>,
}

impl Evaluation {
    /// Returns an evaluation with a mean loss.
    pub fn new(loss: f64) -> Self {
        Self {
            loss,
            metrics: BTreeMap::new(),
        }
    }

    /// Adds a metric; `None` adds nothing.
    #[must_use]
    pub fn with_metric(mut self, name: impl Into<String>, value: impl Into<Option<f64>>) -> Self {
        self.metrics
            .extend(value.into().map(|value| (name.into(), value)));
        self
    }

    /// Adds the evaluation to the metrics of the step before it.
    pub(super) fn apply_to(&self, metrics: &mut StepMetrics) {
        metrics.eval_loss = Some(self.loss);
        for (name, &value) in &self.metrics {
            match name.as_str() {
                BITS_PER_BYTE => metrics.eval_bits_per_byte = Some(value),
                name => drop(metrics.extra.insert(format!("eval_{name}"), value.into())),
            }
        }
    }
}

impl TrainingArguments {
    /// Returns the value of the metric that `metric_for_best_model` names.
    ///
    /// # Errors
    /// [`crate::Error::Common`] if the evaluation has no such metric.
    pub fn best_model_metric(&self, evaluation: &Evaluation) -> Result<f64> {
        match self.best_metric() {
            "loss" => Ok(evaluation.loss),
            name => match evaluation.metrics.get(name) {
                Some(value) => Ok(*value),
                None => no_metric(name, evaluation.metrics.keys().map(String::as_str)),
            },
        }
    }
}
