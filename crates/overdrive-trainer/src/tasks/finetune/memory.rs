use std::fmt;

use serde::{Deserialize, Serialize};

use super::FinetuneModel;
use crate::Result;
use crate::memory_estimate::MemoryPlan;
use crate::run::{RunSummary, tensor_bytes};

/// The memory of a fine-tuning run, in bytes.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrainingMemory {
    /// The number of trainable parameters.
    pub trainable_parameters: u64,
    /// The number of parameters.
    pub all_parameters: u64,
    /// The weights and adapters.
    pub weight_bytes: u64,
    /// The gradients of the trainable parameters.
    pub gradient_bytes: u64,
    /// The optimizer's state.
    pub optimizer_bytes: u64,
    /// The measured peak of all tensors; `None` if the device does not report it.
    pub peak_bytes: Option<u64>,
    /// The estimated peak for training all weights.
    pub full_peak_bytes: u64,
    /// The optimizer's state for training all weights.
    pub full_optimizer_bytes: u64,
}

impl TrainingMemory {
    /// Returns the memory of a run during which the memory statistics were recorded. `plan` is that of its micro-batches,
    /// for the estimate.
    ///
    /// # Errors
    /// An error if the memory cannot be estimated.
    pub fn of(
        plan: &MemoryPlan,
        model: &FinetuneModel,
        summary: &RunSummary,
        peak_bytes: Option<u64>,
    ) -> Result<Self> {
        let full = plan.estimate()?;
        let gradients = model
            .trainable
            .iter()
            .map(|(_, weight)| tensor_bytes(weight));
        Ok(Self {
            trainable_parameters: model.trainable_parameters(),
            all_parameters: model.all_parameters(),
            weight_bytes: model.weight_bytes(),
            gradient_bytes: gradients.sum(),
            optimizer_bytes: summary.optimizer_bytes,
            peak_bytes,
            full_peak_bytes: full.peak,
            full_optimizer_bytes: full.optimizer,
        })
    }
}

pub(super) fn mebibytes(bytes: u64) -> String {
    format!("{:.1} MiB", bytes as f64 / f64::from(1 << 20))
}

impl fmt::Display for TrainingMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let percent =
            100.0 * self.trainable_parameters as f64 / (self.all_parameters.max(1)) as f64;
        writeln!(
            f,
            "trainable   {} of {} parameters, {percent:.2}%",
            self.trainable_parameters, self.all_parameters
        )?;
        write!(
            f,
            "memory      weights {}, gradients {}, optimizer {}",
            mebibytes(self.weight_bytes),
            mebibytes(self.gradient_bytes),
            mebibytes(self.optimizer_bytes),
        )?;
        if let Some(peak) = self.peak_bytes {
            write!(f, ", peak {}", mebibytes(peak))?;
        }
        write!(
            f,
            "\n            full fine-tuning: optimizer {}, peak about {} by estimate",
            mebibytes(self.full_optimizer_bytes),
            mebibytes(self.full_peak_bytes)
        )
    }
}
