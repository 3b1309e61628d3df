//! The parameters and the saved state of a gradient scaler.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Parameters of [`GradScaler`](crate::GradScaler), with the names and defaults of
/// `torch.amp.GradScaler`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradScalerConfig {
    /// The scale at first: 65536.
    pub init_scale: f64,
    /// The factor by which the scale grows after `growth_interval` steps without an infinity: 2.
    pub growth_factor: f64,
    /// The factor by which it shrinks after a step with one: 0.5.
    pub backoff_factor: f64,
    /// Steps without an infinity in a row until the scale grows: 2000.
    pub growth_interval: i64,
    /// Whether it scales at all. Disabled, every function passes through: `scale` returns the loss,
    /// `step` steps, the rest does nothing. Default: true.
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
    /// Whether the parameters make sense; a disabled scaler's are not looked at.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] naming the first that does not.
    pub fn validate(&self) -> Result<()> {
        if !self.enabled {
            return Ok(());
        }
        let invalid = |name, value, expected| {
            Err(Error::InvalidConfig {
                name,
                value,
                expected,
            })
        };
        if !(self.init_scale > 0.0 && self.init_scale.is_finite()) {
            return invalid("init_scale", self.init_scale, "positive and finite");
        }
        if !(self.growth_factor > 1.0 && self.growth_factor.is_finite()) {
            return invalid("growth_factor", self.growth_factor, "greater than 1");
        }
        if !(self.backoff_factor > 0.0 && self.backoff_factor < 1.0) {
            return invalid("backoff_factor", self.backoff_factor, "between 0 and 1");
        }
        if self.growth_interval < 1 {
            #[expect(clippy::cast_precision_loss, reason = "for a message")]
            let value = self.growth_interval as f64;
            return invalid("growth_interval", value, "at least 1");
        }
        Ok(())
    }
}

/// The state of a scaler between two steps, with the keys of PyTorch's `state_dict()`.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GradScalerState {
    /// The present scale.
    pub scale: f64,
    /// As in [`GradScalerConfig`].
    pub growth_factor: f64,
    /// As in [`GradScalerConfig`].
    pub backoff_factor: f64,
    /// As in [`GradScalerConfig`].
    pub growth_interval: i64,
    /// Steps without an infinity since the scale last changed.
    #[serde(rename = "_growth_tracker")]
    pub growth_tracker: i64,
}
