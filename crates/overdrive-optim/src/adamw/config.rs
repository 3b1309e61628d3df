//! Options of AdamW.

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::checks::{check_betas, check_finite_from_zero};

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
    /// Keeps a float32 copy of float16 and bfloat16 parameters, and their averages in float32: the
    /// update goes into the copy, the parameter is the copy rounded. Without it a change smaller than
    /// half a unit in a bfloat16's last place (a 512th of the value) is lost. Costs 12 bytes a
    /// parameter instead of 4. Default false.
    pub master_weights: bool,
    /// If `true`, a step can be captured in a CUDA graph (`capturable=True` of torch): states are made at once
    /// and keep their memory when a state is loaded, and learning rates are tensors on the parameters' device, so
    /// that a schedule can set them between replays. Needs the fused kernel. Default `false`.
    pub capturable: bool,
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
            master_weights: false,
            capturable: false,
            implementation: Implementation::Auto,
        }
    }
}

impl AdamWConfig {
    /// Checks every option against its range.
    ///
    /// # Errors
    /// [`crate::Error::InvalidOption`] naming the first option outside its range.
    pub fn validate(&self) -> Result<()> {
        check_finite_from_zero("learning_rate", self.learning_rate)?;
        check_finite_from_zero("weight_decay", self.weight_decay)?;
        check_finite_from_zero("eps", self.eps)?;
        check_betas(self.betas)
    }
}
