//! Options of AdamW.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Which code applies the update.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Implementation {
    /// Fused where libtorch has the kernel (CPU, CUDA), else plain.
    #[default]
    Auto,
    /// libtorch's fused kernel: one pass over memory a step. An error on other devices.
    Fused,
    /// About ten elementwise operations for each parameter. Any device; the reference.
    Plain,
}

/// Options of [`AdamW`](crate::AdamW). Defaults are those of `torch.optim.AdamW`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamWConfig {
    /// Learning rate of groups that set none. Default 1e-3.
    pub learning_rate: f64,
    /// Decay of the running averages of the gradient and its square, each in [0, 1).
    /// Default (0.9, 0.999).
    pub betas: (f64, f64),
    /// Added to the denominator. Default 1e-8.
    pub eps: f64,
    /// Decoupled weight decay of groups that set none: a step multiplies the parameter by
    /// `1 - learning_rate * weight_decay`. Default 1e-2.
    pub weight_decay: f64,
    /// Divides by the largest average of squares seen so far (Reddi et al. 2018). Costs one more
    /// tensor a parameter. Default false.
    pub amsgrad: bool,
    /// Ascends instead of descends. Default false.
    pub maximize: bool,
    /// Which code applies the update. Default [`Implementation::Auto`].
    pub implementation: Implementation,
}

impl Default for AdamWConfig {
    fn default() -> Self {
        Self {
            learning_rate: 1e-3,
            betas: (0.9, 0.999),
            eps: 1e-8,
            weight_decay: 1e-2,
            amsgrad: false,
            maximize: false,
            implementation: Implementation::Auto,
        }
    }
}

impl AdamWConfig {
    /// Checks every option against its range.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] naming the first option outside its range.
    pub fn validate(&self) -> Result<()> {
        check_learning_rate(self.learning_rate)?;
        check_weight_decay(self.weight_decay)?;
        check(
            "eps",
            self.eps,
            self.eps >= 0.0 && self.eps.is_finite(),
            "a finite number from 0",
        )?;
        for beta in [self.betas.0, self.betas.1] {
            check(
                "betas",
                beta,
                (0.0..1.0).contains(&beta),
                "two numbers from 0 to below 1",
            )?;
        }
        Ok(())
    }
}

pub(crate) fn check_learning_rate(value: f64) -> Result<()> {
    check(
        "learning_rate",
        value,
        value >= 0.0 && value.is_finite(),
        "a finite number from 0",
    )
}

pub(crate) fn check_weight_decay(value: f64) -> Result<()> {
    check(
        "weight_decay",
        value,
        value >= 0.0 && value.is_finite(),
        "a finite number from 0",
    )
}

fn check(option: &'static str, value: f64, holds: bool, expected: &'static str) -> Result<()> {
    if holds {
        Ok(())
    } else {
        Err(Error::InvalidOption {
            option,
            value: value.to_string(),
            expected,
        })
    }
}
