//! The options of the accumulator.

use overdrive_core::{check_at_least, check_option};
use serde::{Deserialize, Serialize};

use crate::Result;

/// The options of [`GradientAccumulator`](crate::GradientAccumulator), with the names of transformers.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AccumulationConfig {
    /// The number of micro-batches of one optimizer step; at least 1. Default: 1.
    pub gradient_accumulation_steps: usize,
    /// The maximum total norm of the gradients of a step, above 0; `None` (the default) disables
    /// clipping, as in Accelerate.
    pub max_grad_norm: Option<f64>,
}

impl Default for AccumulationConfig {
    fn default() -> Self {
        Self {
            gradient_accumulation_steps: 1,
            max_grad_norm: None,
        }
    }
}

impl AccumulationConfig {
    /// Checks every option against its range.
    ///
    /// # Errors
    /// [`crate::Error::Common`] with the first option out of its range.
    pub fn validate(&self) -> Result<()> {
        let steps = self.gradient_accumulation_steps;
        check_at_least("gradient_accumulation_steps", steps, 1)?;
        if let Some(norm) = self.max_grad_norm {
            // Infinity is allowed: it measures the norm without clipping.
            let expected = "positive, or none to disable clipping";
            check_option(norm > 0.0, "max_grad_norm", norm, expected)?;
        }
        Ok(())
    }
}
