//! The length and the options of a schedule.

use serde::{Deserialize, Serialize};

use super::kind::{LrSchedulerType, RampType};
use crate::{Error, Result};

/// The length of a schedule.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScheduleLength {
    /// The number of steps over which the learning rate rises from 0 (see [`Warmup`](crate::Warmup)).
    pub warmup_steps: u64,
    /// The number of optimizer steps of the whole run, including the warm-up.
    pub total_steps: u64,
}

/// The options of individual schedules (transformers' `lr_scheduler_kwargs`). An option that does not
/// apply to the chosen schedule is an error.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct ScheduleOptions {
    /// The number of periods of a cosine (default 0.5), or of restarts of `cosine_with_restarts` (an
    /// integer, default 1).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_cycles: Option<f64>,
    /// The final learning rate of `polynomial`. Default: 1e-7.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub lr_end: Option<f64>,
    /// The exponent of `polynomial`. Default: 1.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub power: Option<f64>,
    /// The time scale of `inverse_sqrt` in steps: after the warm-up and `t` more steps the factor is
    /// `1/√(1 + t / timescale)`. Default: the warm-up steps, or 10,000 without warm-up.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub timescale: Option<u64>,
    /// The final learning rate of a cosine with a minimum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_lr: Option<f64>,
    /// The final learning rate as a fraction of the maximum, as an alternative to `min_lr`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_lr_rate: Option<f64>,
    /// The initial learning rate of `cosine_warmup_with_min_lr` as a fraction of the maximum. Default: 1
    /// divided by the number of warm-up steps.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_lr_rate: Option<f64>,
    /// The number of decay steps of `warmup_stable_decay`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_decay_steps: Option<u64>,
    /// The number of steps of its plateau. Default: the total minus warm-up and decay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_stable_steps: Option<u64>,
    /// The shape of its warm-up. Default: linear.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_type: Option<RampType>,
    /// The shape of its decay. Default: cosine.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub decay_type: Option<RampType>,
    /// The initial and final learning rate of `warmup_stable_decay`, as a fraction of the maximum.
    /// Default: 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_lr_ratio: Option<f64>,
}

impl ScheduleOptions {
    /// Checks that the options apply to `kind` and are in their ranges.
    pub(super) fn check(&self, kind: LrSchedulerType) -> Result<()> {
        use LrSchedulerType as K;
        let known: &[&str] = match kind {
            K::Linear | K::Constant | K::ConstantWithWarmup => &[],
            K::Cosine | K::CosineWithRestarts => &["num_cycles"],
            K::Polynomial => &["lr_end", "power"],
            K::InverseSqrt => &["timescale"],
            K::CosineWithMinLr => &["num_cycles", "min_lr", "min_lr_rate"],
            K::CosineWarmupWithMinLr => &["num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"],
            K::WarmupStableDecay => &[
                "num_cycles",
                "num_decay_steps",
                "num_stable_steps",
                "warmup_type",
                "decay_type",
                "min_lr_ratio",
            ],
        };
        // An ignored option would be a typing error that nobody notices.
        if let Some((option, _)) = self
            .set_options()
            .find(|(option, _)| !known.contains(option))
        {
            let problem = if known.is_empty() {
                "does not apply; this schedule has none".to_string()
            } else {
                format!("does not apply; this schedule has {}", known.join(", "))
            };
            return Err(Error::ScheduleOption {
                schedule: kind.name(),
                option,
                problem,
            });
        }
        self.check_ranges(kind)
    }

    /// Returns the options that are set, each with its number; a shape counts as 0.
    fn set_options(&self) -> impl Iterator<Item = (&'static str, f64)> {
        let steps = |steps: Option<u64>| steps.map(|steps| steps as f64);
        let shape = |shape: Option<RampType>| shape.map(|_| 0.0);
        let options = [
            ("num_cycles", self.num_cycles),
            ("lr_end", self.lr_end),
            ("power", self.power),
            ("timescale", steps(self.timescale)),
            ("min_lr", self.min_lr),
            ("min_lr_rate", self.min_lr_rate),
            ("warmup_lr_rate", self.warmup_lr_rate),
            ("num_decay_steps", steps(self.num_decay_steps)),
            ("num_stable_steps", steps(self.num_stable_steps)),
            ("warmup_type", shape(self.warmup_type)),
            ("decay_type", shape(self.decay_type)),
            ("min_lr_ratio", self.min_lr_ratio),
        ];
        let set = options.into_iter();
        set.filter_map(|(option, number)| Some((option, number?)))
    }

    fn check_ranges(&self, kind: LrSchedulerType) -> Result<()> {
        let bad = |option, value: f64, expected| {
            let problem = format!("is {value}; it must be {expected}");
            Err(Error::ScheduleOption {
                schedule: kind.name(),
                option,
                problem,
            })
        };
        for (option, value) in self.set_options() {
            if !(value >= 0.0 && value.is_finite()) {
                return bad(option, value, "0 or positive");
            }
        }
        if self.timescale == Some(0) {
            return bad("timescale", 0.0, "at least 1");
        }
        // Half a restart would end in the middle of a cycle.
        if let (LrSchedulerType::CosineWithRestarts, Some(cycles)) = (kind, self.num_cycles)
            && (cycles < 1.0 || cycles.fract() != 0.0)
        {
            return bad("num_cycles", cycles, "an integer of at least 1");
        }
        Ok(())
    }
}
