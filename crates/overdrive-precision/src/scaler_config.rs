//! The options and the saved state of a gradient scaler.

use overdrive_core::{check_at_least, check_option};
use serde::{Deserialize, Serialize};

use crate::Result;

/// Options of [`GradScaler`](crate::GradScaler), with the names and defaults of
/// `torch.amp.GradScaler`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradScalerConfig {
    /// The initial scale. Default 65536.
    pub init_scale: f64,
    /// The factor by which the scale grows after `growth_interval` steps without an infinity. Default 2.
    pub growth_factor: f64,
    /// The factor by which the scale shrinks after a step with an infinity. Default 0.5.
    pub backoff_factor: f64,
    /// The number of consecutive steps without an infinity after which the scale grows. Default 2000.
    pub growth_interval: i64,
    /// If `false`, nothing is scaled: `scale` returns the loss, `step` steps the optimizer, the other functions do
    /// nothing. Default `true`.
    pub enabled: bool,
}

impl Default for GradScalerConfig {
    fn default() -> Self {
        Self {
            init_scale: 65536.0,
            growth_factor: 2.0,
            backoff_factor: 0.5,
            growth_interval: 2000,
            enabled: true,
        }
    }
}

impl GradScalerConfig {
    /// Checks every option against its range; those of a disabled scaler are not checked.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`] naming the first option outside its range.
    pub fn validate(&self) -> Result<()> {
        if !self.enabled {
            return Ok(());
        }
        let (scale, growth) = (self.init_scale, self.growth_factor);
        let valid = scale > 0.0 && scale.is_finite();
        check_option(valid, "init_scale", scale, "positive and finite")?;
        let valid = growth > 1.0 && growth.is_finite();
        check_option(valid, "growth_factor", growth, "greater than 1")?;
        let backoff = self.backoff_factor;
        let valid = backoff > 0.0 && backoff < 1.0;
        check_option(valid, "backoff_factor", backoff, "between 0 and 1")?;
        check_at_least("growth_interval", self.growth_interval, 1)?;
        Ok(())
    }
}

/// The state of a scaler between two steps, with the keys of PyTorch's `state_dict()`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GradScalerState {
    /// The current scale.
    pub scale: f64,
    /// The `growth_factor` of the [`GradScalerConfig`].
    pub growth_factor: f64,
    /// The `backoff_factor` of the [`GradScalerConfig`].
    pub backoff_factor: f64,
    /// The `growth_interval` of the [`GradScalerConfig`].
    pub growth_interval: i64,
    /// The number of steps without an infinity since the scale last changed.
    #[serde(rename = "_growth_tracker")]
    pub growth_tracker: i64,
}
