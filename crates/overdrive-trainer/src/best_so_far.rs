//! Which evaluation was the best, and for how long there was none better.

use overdrive_optim::EarlyStopping;

use crate::save_arguments::Metric;
use crate::{Evaluation, Result, TrainingArguments};

/// The best evaluation so far, by `metric_for_best_model`.
#[derive(Debug)]
pub(crate) struct BestSoFar {
    metric: Metric,
    stopping: EarlyStopping,
    has_patience: bool,
    step: Option<u64>,
}

impl BestSoFar {
    pub(crate) fn new(arguments: &TrainingArguments) -> Result<Self> {
        Ok(Self {
            metric: arguments.metric()?,
            stopping: arguments.early_stopping()?,
            has_patience: arguments.early_stopping_patience.is_some(),
            step: None,
        })
    }

    /// Takes over what a run knew that goes on.
    pub(crate) fn go_on(&mut self, stopping: Option<EarlyStopping>, step: Option<u64>) {
        if let Some(stopping) = stopping {
            self.stopping = stopping;
        }
        self.step = step;
    }

    /// The number that counts of an evaluation after `step`.
    pub(crate) fn observe(&mut self, step: u64, found: &Evaluation) -> Option<f64> {
        let value = self.metric.of(found)?;
        if self.stopping.observe(value).improved {
            self.step = Some(step);
        }
        Some(value)
    }

    /// The step of the best one.
    pub(crate) fn step(&self) -> Option<u64> {
        self.step
    }

    /// Whether the run has waited long enough for a better one.
    pub(crate) fn patience_is_used_up(&self) -> bool {
        self.has_patience && self.stopping.should_stop()
    }

    pub(crate) fn early_stopping(&self) -> &EarlyStopping {
        &self.stopping
    }
}
