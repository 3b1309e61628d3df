//! The types of schedules.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;

/// The types of schedules, with the names of transformers' `lr_scheduler_type`.
///
/// `reduce_lr_on_plateau` and `greedy` depend on the loss instead of the step and are not supported.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LrSchedulerType {
    /// Decreases linearly to 0. The default, as in transformers.
    #[default]
    Linear,
    /// Decreases to 0 along `num_cycles` periods (default 0.5) of a cosine.
    Cosine,
    /// Runs through `num_cycles` (default 1) half cosines, each from the maximum to 0.
    CosineWithRestarts,
    /// Decreases to `lr_end` (default 1e-7) with the `power` (default 1) of the remaining fraction of the
    /// steps.
    Polynomial,
    /// Is constant, without warm-up.
    Constant,
    /// Is constant after the warm-up.
    ConstantWithWarmup,
    /// Decreases with the inverse square root of the step, independently of the total number of steps.
    InverseSqrt,
    /// As `cosine`, but decreases to `min_lr` or `min_lr_rate`, one of which must be set.
    CosineWithMinLr,
    /// As `cosine_with_min_lr`, with a warm-up that starts at `warmup_lr_rate` instead of 0.
    CosineWarmupWithMinLr,
    /// A warm-up, a plateau, and a decay of `num_decay_steps`, which must be set.
    WarmupStableDecay,
}

impl LrSchedulerType {
    /// All types.
    pub const ALL: [Self; 10] = [
        Self::Linear,
        Self::Cosine,
        Self::CosineWithRestarts,
        Self::Polynomial,
        Self::Constant,
        Self::ConstantWithWarmup,
        Self::InverseSqrt,
        Self::CosineWithMinLr,
        Self::CosineWarmupWithMinLr,
        Self::WarmupStableDecay,
    ];

    /// Returns the name in transformers.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Linear => "linear",
            Self::Cosine => "cosine",
            Self::CosineWithRestarts => "cosine_with_restarts",
            Self::Polynomial => "polynomial",
            Self::Constant => "constant",
            Self::ConstantWithWarmup => "constant_with_warmup",
            Self::InverseSqrt => "inverse_sqrt",
            Self::CosineWithMinLr => "cosine_with_min_lr",
            Self::CosineWarmupWithMinLr => "cosine_warmup_with_min_lr",
            Self::WarmupStableDecay => "warmup_stable_decay",
        }
    }
}

impl fmt::Display for LrSchedulerType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for LrSchedulerType {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        let found = Self::ALL.into_iter().find(|kind| kind.name() == name);
        found.ok_or_else(|| {
            // From the list, so that a new type appears in the message.
            let names = Self::ALL.map(Self::name).join(", ");
            let expected = format!("one of {names}");
            overdrive_core::Error::option("lr_scheduler_type", format!("`{name}`"), expected).into()
        })
    }
}

/// The shape of the warm-up and of the decay of `warmup_stable_decay`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RampType {
    /// A linear ramp.
    #[serde(rename = "linear")]
    Linear,
    /// Half a cosine.
    #[serde(rename = "cosine")]
    Cosine,
    /// One minus the square root of the progress (decay) or of the remaining fraction (warm-up).
    #[serde(rename = "1-sqrt")]
    OneMinusSqrt,
}
