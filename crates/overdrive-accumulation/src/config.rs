//! Options of the accumulator.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Options of [`GradientAccumulator`](crate::GradientAccumulator), under the names that
/// transformers gives them.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AccumulationConfig {
    /// Micro-batches of one optimizer step. Default 1.
    pub gradient_accumulation_steps: usize,
    /// Largest total norm of the gradients of a step; `None` clips nothing, as in Accelerate. Default
    /// `None`.
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
    /// [`Error::InvalidOption`] naming the first option outside its range.
    pub fn validate(&self) -> Result<()> {
        if self.gradient_accumulation_steps == 0 {
            return Err(Error::InvalidOption {
                option: "gradient_accumulation_steps",
                value: "0".into(),
                expected: "at least 1 micro-batch a step",
            });
        }
        match self.max_grad_norm {
            Some(norm) if norm.is_nan() || norm <= 0.0 => Err(Error::InvalidOption {
                option: "max_grad_norm",
                value: norm.to_string(),
                expected: "a number above 0, or none to clip nothing",
            }),
            _ => Ok(()),
        }
    }
}
