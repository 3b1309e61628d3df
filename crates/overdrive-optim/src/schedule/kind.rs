//! The schedules by name.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Serialize};

use crate::Error;

/// The schedules, under the names that transformers gives `lr_scheduler_type`.
///
/// `reduce_lr_on_plateau` and `greedy` follow the loss instead of the step and are not among them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum LrSchedulerType {
    /// Down to 0 in a straight line. The default, as in transformers.
    #[default]
    Linear,
    /// Down to 0 along `num_cycles` (default half) of a cosine.
    Cosine,
    /// `num_cycles` (default 1) half cosines, each from the top down to 0.
    CosineWithRestarts,
    /// Down to `lr_end` (default 1e-7) as the `power` (default 1) of what remains.
    Polynomial,
    /// Always the same, without warm-up.
    Constant,
    /// The same after the warm-up.
    ConstantWithWarmup,
    /// Falls with the square root of the step; needs no total.
    InverseSqrt,
    /// As `cosine`, but down to `min_lr` or `min_lr_rate`, one of which must be given.
    CosineWithMinLr,
    /// As `cosine_with_min_lr`, with a warm-up that starts above 0, at `warmup_lr_rate`.
    CosineWarmupWithMinLr,
    /// Warm-up, a plateau, and a decay of `num_decay_steps`, which must be given.
    WarmupStableDecay,
}

impl LrSchedulerType {
    /// All of them.
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

    /// The name as transformers writes it.
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
        Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or_else(|| Error::InvalidOption {
            option: "lr_scheduler_type",
            value: format!("`{name}`"),
            expected: "linear, cosine, cosine_with_restarts, polynomial, constant, constant_with_warmup, inverse_sqrt, cosine_with_min_lr, cosine_warmup_with_min_lr or warmup_stable_decay",
        })
    }
}

/// The shape of the warm-up and of the decay of `warmup_stable_decay`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[non_exhaustive]
pub enum RampType {
    /// A straight line.
    #[serde(rename = "linear")]
    Linear,
    /// Half a cosine.
    #[serde(rename = "cosine")]
    Cosine,
    /// One minus the square root of what has passed (decay) or remains (warm-up).
    #[serde(rename = "1-sqrt")]
    OneMinusSqrt,
}
