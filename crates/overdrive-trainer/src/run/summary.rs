//! The results of a run: its evaluations and its summary.

use std::collections::BTreeMap;
use std::fmt;

use overdrive_optim::Optimizer;
use overdrive_profiling::{Bottleneck, DataLoading, StepRecorder, TargetResult, Targets};
use overdrive_tracking::StepMetrics;
use serde::{Deserialize, Serialize};
use tch::Tensor;

use super::snapshots::BestModel;
use crate::arguments::{BITS_PER_BYTE, TrainingArguments, no_metric};
use crate::{Result, RunEnd};

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

/// The summary of a run.
#[derive(Debug, Clone, Default)]
pub struct RunSummary {
    /// The loss of each step since the start of this process, over all processes.
    pub losses: Vec<f64>,
    /// The last evaluation.
    pub evaluation: Option<Evaluation>,
    /// The number of tokens of all processes without padding.
    pub tokens: u64,
    /// The number of tokens of all processes with padding.
    pub padded_tokens: u64,
    /// The seconds of all steps that the device has finished, without evaluations.
    pub step_seconds: f64,
    /// The size of the optimizer's state in bytes.
    pub optimizer_bytes: u64,
    /// The phase that slowed the steps down.
    pub bottleneck: Option<Bottleneck>,
    /// The time that steps waited for their batches.
    pub data_loading: Option<DataLoading>,
    /// The targets of a run with its values: data loading, and the use of a monitored GPU.
    pub targets: Vec<TargetResult>,
    /// The step from which the run resumed; 0 for a new run.
    pub resumed_step: u64,
    /// The step and the metric of the model's weights at the end, if they are those of the best snapshot.
    pub best: Option<BestModel>,
    /// If `true`, a signal ended the run early.
    pub interrupted: bool,
    /// The step of the newest snapshot that this process has saved.
    pub saved_step: Option<u64>,
}

impl RunSummary {
    /// Sets the values that are known at the end of the run.
    pub(super) fn finish(&mut self, recorder: &StepRecorder, optimizer: &dyn Optimizer) {
        self.bottleneck = recorder.bottleneck();
        self.data_loading = recorder.data_loading();
        let loading = self.data_loading.map(|loading| loading.share);
        self.targets = Targets::default().check(loading, recorder.gpu_utilization());
        // 0 if the optimizer has no state to store.
        self.optimizer_bytes = optimizer
            .state_dict()
            .map_or(0, |state| state.tensors.values().map(tensor_bytes).sum());
    }

    /// Returns the way in which the run ended. A snapshot of an earlier step does not make it one that was saved.
    pub fn end(&self) -> RunEnd {
        match (self.interrupted, self.is_saved()) {
            (false, _) => RunEnd::Finished,
            (true, true) => RunEnd::Saved,
            (true, false) => RunEnd::NotSaved,
        }
    }

    /// Returns `true` if this process has saved a snapshot of the last step.
    pub(super) fn is_saved(&self) -> bool {
        self.saved_step == Some(self.resumed_step + self.losses.len() as u64)
    }

    /// Returns the tokens per second over all steps.
    pub fn tokens_per_second(&self) -> f64 {
        self.tokens as f64 / self.step_seconds.max(f64::MIN_POSITIVE)
    }

    /// Returns the fraction of padding among all tokens, 0 to 1.
    pub fn padding(&self) -> f64 {
        match self.padded_tokens {
            0 => 0.0,
            all => 1.0 - self.tokens as f64 / all as f64,
        }
    }
}

/// Formats one line each for padding, data loading, the bottleneck, the targets and the best step.
impl fmt::Display for RunSummary {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.padding() > 0.0 {
            writeln!(
                f,
                "{:.1}% of the tokens were padding",
                100.0 * self.padding()
            )?;
        }
        if let Some(loading) = self.data_loading {
            writeln!(f, "{loading}")?;
        }
        if let Some(bottleneck) = &self.bottleneck {
            writeln!(f, "{bottleneck}")?;
        }
        for target in &self.targets {
            writeln!(f, "{target}")?;
        }
        if let Some(best) = &self.best {
            writeln!(f, "the weights are the best ones: {best}")?;
        }
        Ok(())
    }
}

/// Returns the bytes of the elements of a tensor.
pub(crate) fn tensor_bytes(tensor: &Tensor) -> u64 {
    (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
}
