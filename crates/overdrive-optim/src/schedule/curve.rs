//! Schedules: the factor of the learning rate at every step.

use std::f64::consts::PI;

use super::kind::{LrSchedulerType, RampType};
use super::options::{ScheduleLength, ScheduleOptions};
use crate::{Error, Result};

/// A pure function from the optimizer step to the factor on the learning rate.
///
/// The values equal those of transformers 5 (`optimization.py`), which the tests check to 1e-7. The first
/// step of a run uses `multiplier(0)`, which is 0 with a linear warm-up.
///
/// ```
/// use overdrive_optim::{LrSchedulerType, Schedule, ScheduleLength, ScheduleOptions};
///
/// let length = ScheduleLength { warmup_steps: 10, total_steps: 110 };
/// let schedule = Schedule::new(LrSchedulerType::Cosine, length, 2e-3, &ScheduleOptions::default())?;
/// assert_eq!(schedule.multiplier(5), 0.5);
/// assert_eq!(schedule.multiplier(10), 1.0);
/// assert!((schedule.multiplier(60) - 0.5).abs() < 1e-12);
/// assert!(schedule.multiplier(110) < 1e-12);
/// # Ok::<(), overdrive_optim::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Schedule {
    kind: LrSchedulerType,
    length: ScheduleLength,
    curve: Curve,
}

/// The curve after the warm-up, with all defaults applied.
#[derive(Debug, Clone, PartialEq)]
enum Curve {
    Constant,
    Linear,
    Cosine {
        num_cycles: f64,
        min: f64,
    },
    CosineFromRate {
        num_cycles: f64,
        min: f64,
        warmup_rate: Option<f64>,
    },
    CosineWithRestarts {
        num_cycles: f64,
    },
    Polynomial {
        end: f64,
        power: f64,
        top: f64,
    },
    InverseSqrt {
        timescale: f64,
    },
    WarmupStableDecay(WarmupStableDecay),
}

#[derive(Debug, Clone, PartialEq)]
struct WarmupStableDecay {
    decay_start: u64,
    decay_steps: u64,
    warmup: RampType,
    decay: RampType,
    min: f64,
    num_cycles: f64,
}

impl Schedule {
    /// Returns a schedule of `kind` for an optimizer whose maximum learning rate is `learning_rate`,
    /// which is needed because some schedules end at an absolute rate.
    ///
    /// # Errors
    /// [`Error::ScheduleOption`] for an option that does not apply, is out of its range, or is missing.
    pub fn new(
        kind: LrSchedulerType,
        length: ScheduleLength,
        learning_rate: f64,
        options: &ScheduleOptions,
    ) -> Result<Self> {
        options.check(kind)?;
        let cosine_cycles = options.num_cycles.unwrap_or(0.5);
        let curve = match kind {
            LrSchedulerType::Constant | LrSchedulerType::ConstantWithWarmup => Curve::Constant,
            LrSchedulerType::Linear => Curve::Linear,
            LrSchedulerType::Cosine => Curve::Cosine {
                num_cycles: cosine_cycles,
                min: 0.0,
            },
            LrSchedulerType::CosineWithMinLr => Curve::Cosine {
                num_cycles: cosine_cycles,
                min: min_rate(kind, learning_rate, options)?,
            },
            LrSchedulerType::CosineWarmupWithMinLr => Curve::CosineFromRate {
                num_cycles: cosine_cycles,
                min: min_rate(kind, learning_rate, options)?,
                warmup_rate: options.warmup_lr_rate,
            },
            LrSchedulerType::CosineWithRestarts => Curve::CosineWithRestarts {
                num_cycles: options.num_cycles.unwrap_or(1.0),
            },
            LrSchedulerType::Polynomial => polynomial(learning_rate, options)?,
            LrSchedulerType::InverseSqrt => {
                // transformers' default timescale without warm-up.
                let default = if length.warmup_steps > 0 {
                    length.warmup_steps
                } else {
                    10_000
                };
                Curve::InverseSqrt {
                    timescale: options.timescale.unwrap_or(default) as f64,
                }
            }
            LrSchedulerType::WarmupStableDecay => {
                Curve::WarmupStableDecay(warmup_stable_decay(length, options)?)
            }
        };
        Ok(Self {
            kind,
            length,
            curve,
        })
    }

    /// Returns the type of the schedule.
    #[must_use]
    pub fn kind(&self) -> LrSchedulerType {
        self.kind
    }

    /// Returns the numbers of warm-up and total steps.
    #[must_use]
    pub fn length(&self) -> ScheduleLength {
        self.length
    }

    /// Returns the factor of the learning rate for optimizer step `step`, counted from 0.
    #[must_use]
    pub fn multiplier(&self, step: u64) -> f64 {
        // `constant` ignores the warm-up; `constant_with_warmup` has the same curve after it.
        if self.kind == LrSchedulerType::Constant {
            return 1.0;
        }
        let ScheduleLength {
            warmup_steps,
            total_steps,
        } = self.length;
        if step < warmup_steps {
            return self.warmup(step as f64 / warmup_steps as f64, step);
        }
        let after_warmup = (step - warmup_steps) as f64;
        // At least 1: a schedule may consist of its warm-up only.
        let decay_steps = total_steps.saturating_sub(warmup_steps).max(1) as f64;
        let progress = after_warmup / decay_steps;
        match &self.curve {
            Curve::Constant => 1.0,
            Curve::Linear => (total_steps.saturating_sub(step) as f64 / decay_steps).max(0.0),
            Curve::Cosine { num_cycles, min } => above(cosine(*num_cycles, progress), *min),
            // One step ahead of `Cosine`, as in transformers.
            Curve::CosineFromRate {
                num_cycles, min, ..
            } => above(
                cosine(*num_cycles, (after_warmup + 1.0) / decay_steps),
                *min,
            ),
            // Without this the fraction of 1.0 would start another cycle.
            Curve::CosineWithRestarts { .. } if progress >= 1.0 => 0.0,
            Curve::CosineWithRestarts { num_cycles } => {
                cosine(0.5, (num_cycles * progress).fract()).max(0.0)
            }
            // Beyond the end, or for a schedule that is only a warm-up (where transformers divides by 0).
            Curve::Polynomial { end, top, .. }
                if step > total_steps || warmup_steps >= total_steps =>
            {
                end / top
            }
            Curve::Polynomial { end, power, top } => {
                ((top - end) * (1.0 - progress).powf(*power) + end) / top
            }
            Curve::InverseSqrt { timescale } => {
                1.0 / ((step as f64 + timescale - warmup_steps as f64) / timescale).sqrt()
            }
            Curve::WarmupStableDecay(wsd) => wsd.after_warmup(step),
        }
    }

    fn warmup(&self, progress: f64, step: u64) -> f64 {
        match &self.curve {
            Curve::CosineFromRate { warmup_rate, .. } => {
                let warmup_steps = self.length.warmup_steps as f64;
                match warmup_rate {
                    None => (step as f64 + 1.0) / warmup_steps,
                    Some(rate) => rate + (1.0 - rate) * step as f64 / (warmup_steps - 1.0).max(1.0),
                }
            }
            Curve::WarmupStableDecay(wsd) => above(rise(wsd.warmup, progress), wsd.min),
            _ => progress,
        }
    }
}

impl WarmupStableDecay {
    fn after_warmup(&self, step: u64) -> f64 {
        let Some(into_decay) = step.checked_sub(self.decay_start) else {
            return 1.0;
        };
        if into_decay >= self.decay_steps {
            return self.min;
        }
        let progress = into_decay as f64 / self.decay_steps as f64;
        let factor = match self.decay {
            RampType::Linear => 1.0 - progress,
            RampType::Cosine => cosine(self.num_cycles, progress),
            RampType::OneMinusSqrt => 1.0 - progress.sqrt(),
        };
        above(factor, self.min)
    }
}

/// Returns a cosine between 1 and 0 that starts at 1 and has `num_cycles` periods.
fn cosine(num_cycles: f64, progress: f64) -> f64 {
    0.5 * (1.0 + (PI * num_cycles * 2.0 * progress).cos())
}

/// Returns the warm-up factor of a ramp.
fn rise(shape: RampType, progress: f64) -> f64 {
    match shape {
        RampType::Linear => progress,
        RampType::Cosine => 0.5 * (1.0 - (PI * progress).cos()),
        RampType::OneMinusSqrt => 1.0 - (1.0 - progress).sqrt(),
    }
}

/// Scales a factor from [0, 1] to [min, 1].
fn above(factor: f64, min: f64) -> f64 {
    (factor * (1.0 - min) + min).max(0.0)
}

fn min_rate(kind: LrSchedulerType, learning_rate: f64, options: &ScheduleOptions) -> Result<f64> {
    let problem = match (options.min_lr, options.min_lr_rate) {
        (Some(_), Some(_)) => "and min_lr_rate are both set; set one of them",
        (None, Some(rate)) => return Ok(rate),
        (Some(min_lr), None) if learning_rate > 0.0 => return Ok(min_lr / learning_rate),
        (Some(_), None) => "needs a positive learning rate; set min_lr_rate instead",
        (None, None) => "or min_lr_rate is needed; set one in lr_scheduler_kwargs",
    };
    Err(Error::ScheduleOption {
        schedule: kind.name(),
        option: "min_lr",
        problem: problem.to_string(),
    })
}

fn polynomial(learning_rate: f64, options: &ScheduleOptions) -> Result<Curve> {
    let end = options.lr_end.unwrap_or(1e-7);
    if learning_rate > end {
        let power = options.power.unwrap_or(1.0);
        return Ok(Curve::Polynomial {
            end,
            power,
            top: learning_rate,
        });
    }
    Err(Error::ScheduleOption {
        schedule: LrSchedulerType::Polynomial.name(),
        option: "lr_end",
        problem: format!("is {end}; it must be less than the learning rate ({learning_rate})"),
    })
}

fn warmup_stable_decay(
    length: ScheduleLength,
    options: &ScheduleOptions,
) -> Result<WarmupStableDecay> {
    let problem = |option, problem| {
        let schedule = LrSchedulerType::WarmupStableDecay.name();
        Error::ScheduleOption {
            schedule,
            option,
            problem,
        }
    };
    let ScheduleLength {
        warmup_steps,
        total_steps,
    } = length;
    let decay_steps = options.num_decay_steps.ok_or_else(|| {
        problem(
            "num_decay_steps",
            "is needed; set it in lr_scheduler_kwargs".into(),
        )
    })?;
    // `checked_sub`, because a plateau cannot be negative.
    let stable_steps = match options.num_stable_steps {
        Some(stable_steps) => stable_steps,
        None => total_steps.checked_sub(warmup_steps.saturating_add(decay_steps)).ok_or_else(|| {
            let text = format!(
                "is {decay_steps}, which with {warmup_steps} warm-up steps exceeds the total of {total_steps}; shorten one of them"
            );
            problem("num_decay_steps", text)
        })?,
    };
    Ok(WarmupStableDecay {
        decay_start: warmup_steps.saturating_add(stable_steps),
        decay_steps,
        warmup: options.warmup_type.unwrap_or(RampType::Linear),
        decay: options.decay_type.unwrap_or(RampType::Cosine),
        min: options.min_lr_ratio.unwrap_or(0.0),
        num_cycles: options.num_cycles.unwrap_or(0.5),
    })
}
