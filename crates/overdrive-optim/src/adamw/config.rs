//! The options of AdamW.

use serde::{Deserialize, Serialize};

use crate::Result;
use crate::checks::check_adam_options;

/// The code that applies the update.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Implementation {
    /// The fused kernel if libtorch has it for the device (CPU, CUDA), else plain. The default.
    #[default]
    Auto,
    /// libtorch's fused kernel, one pass over memory per step. An error on other devices.
    Fused,
    /// About ten elementwise operations per parameter, on any device; the reference implementation.
    Plain,
}

/// The options of [`AdamW`](crate::AdamW). The defaults are those of `torch.optim.AdamW`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct AdamWConfig {
    /// The learning rate of groups that set none. Default: 1e-3.
    pub learning_rate: f64,
    /// The decay rates of the running averages of the gradient and its square, each in [0, 1). Default:
    /// (0.9, 0.999).
    pub betas: (f64, f64),
    /// The term added to the denominator. Default: 1e-8.
    pub eps: f64,
    /// The decoupled weight decay of groups that set none: a step multiplies the parameter by
    /// `1 - learning_rate * weight_decay`. Default: 1e-2.
    pub weight_decay: f64,
    /// If `true`, the update is divided by the maximum average of squares so far (Reddi et al. 2018),
    /// which costs one more tensor per parameter. Default: `false`.
    pub amsgrad: bool,
    /// If `true`, the objective is maximized. Default: `false`.
    pub maximize: bool,
    /// If `true`, float16 and bfloat16 parameters have a float32 copy, and averages in float32: the
    /// update goes into the copy, and the parameter is the rounded copy. Without it a change below half a
    /// unit in the last place of a bfloat16 (a 512th of the value) is lost. Costs 12 bytes per parameter
    /// instead of 4. Default: `false`.
    pub master_weights: bool,
    /// If `true`, a step can be captured in a CUDA graph (`capturable=True` of torch): states are created immediately
    /// and keep their memory when a state is loaded, and learning rates are tensors on the parameters' device, so
    /// that a schedule can set them between replays. Needs the fused kernel. Default: `false`.
    pub capturable: bool,
    /// The code that applies the update. Default: [`Implementation::Auto`].
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
    /// Checks that every option is in its range.
    ///
    /// # Errors
    /// [`crate::Error::Common`] with the first option out of its range.
    pub fn validate(&self) -> Result<()> {
        check_adam_options(self.learning_rate, self.weight_decay, self.eps, self.betas)
    }
}
