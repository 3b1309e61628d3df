//! The bottleneck of a step, with its remedy.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::{Phase, PhaseSeconds};

/// The measurements of some steps, for [`Bottleneck::find`].
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct StepProfile {
    /// Seconds by phase, of one step or of many; in device time where the device has its own clock.
    pub phases: PhaseSeconds,
    /// Model FLOPs utilisation, 0 to 1.
    pub mfu: Option<f64>,
    /// The fraction of the time in which the GPU ran any kernel, 0 to 1.
    pub gpu_utilization: Option<f64>,
}

/// The fractions of a step from which on a phase counts as a bottleneck, each 0 to 1.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct BottleneckThresholds {
    /// Loading data. Default 0.1; prefetched data costs next to nothing.
    pub data: f64,
    /// Copies to the device. Default 0.05; they can overlap with the step.
    pub host_to_device: f64,
    /// Gradient accumulation. Default 0.2.
    pub accumulate: f64,
    /// The optimizer. Default 0.25; a fused one takes a few percent of a step of 2000 tokens.
    pub optimizer: f64,
    /// Time that belongs to no phase. Default 0.1.
    pub other: f64,
    /// The idle fraction of the GPU. Default 0.3.
    pub idle_gpu: f64,
    /// The MFU below which a busy device spends most of its time outside matrix products. Default 0.2.
    pub low_mfu: f64,
}

impl Default for BottleneckThresholds {
    fn default() -> Self {
        Self {
            data: 0.1,
            host_to_device: 0.05,
            accumulate: 0.2,
            optimizer: 0.25,
            other: 0.1,
            idle_gpu: 0.3,
            low_mfu: 0.2,
        }
    }
}

/// The bottleneck of a step. [`Display`](fmt::Display) is a sentence with the remedy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(tag = "kind", rename_all = "snake_case")]
#[non_exhaustive]
pub enum Bottleneck {
    /// The step waits for its batch.
    Data {
        /// The fraction of the step, 0 to 1.
        share: f64,
    },
    /// The step waits for copies to the device.
    HostToDevice {
        /// The fraction of the step, 0 to 1.
        share: f64,
    },
    /// Gradient accumulation takes long.
    Accumulate {
        /// The fraction of the step, 0 to 1.
        share: f64,
    },
    /// The update takes long.
    Optimizer {
        /// The fraction of the step, 0 to 1.
        share: f64,
    },
    /// The loop around the model takes long.
    Loop {
        /// The fraction of the step, 0 to 1.
        share: f64,
    },
    /// The GPU waits for the host to launch kernels.
    Launches {
        /// The fraction of the time in which no kernel ran, 0 to 1.
        idle: f64,
    },
    /// The device is busy with other work than the matrix products of the model.
    SmallKernels {
        /// Model FLOPs utilisation, 0 to 1.
        mfu: f64,
    },
    /// The model's own arithmetic: only a faster device, a lower precision or fewer FLOPs would help.
    Compute {
        /// The fraction of the step in forward and backward, 0 to 1.
        share: f64,
    },
}

type FromShare = fn(f64) -> Bottleneck;

impl Bottleneck {
    /// Returns the largest bottleneck: of the phases above their threshold the one that is furthest
    /// above it, else an idle or a badly used device, else the model's own arithmetic. `None` where no time was
    /// measured.
    pub fn find(step: &StepProfile, thresholds: &BottleneckThresholds) -> Option<Self> {
        let total = step.phases.total();
        if !(total > 0.0 && total.is_finite()) {
            return None;
        }
        let share = |phase| step.phases.get(phase) / total;
        let phases: [(Phase, f64, FromShare); 5] = [
            (Phase::Data, thresholds.data, |share| Self::Data { share }),
            (Phase::HostToDevice, thresholds.host_to_device, |share| {
                Self::HostToDevice { share }
            }),
            (Phase::Accumulate, thresholds.accumulate, |share| {
                Self::Accumulate { share }
            }),
            (Phase::Optimizer, thresholds.optimizer, |share| {
                Self::Optimizer { share }
            }),
            (Phase::Other, thresholds.other, |share| Self::Loop { share }),
        ];
        // By the distance to the threshold, not by the share: a quarter of the step is usual for one phase and
        // far too much for another.
        let worst = phases
            .into_iter()
            .map(|(phase, threshold, make)| (share(phase) - threshold, make(share(phase))))
            .filter(|(above, _)| *above >= 0.0)
            .max_by(|(a, _), (b, _)| a.total_cmp(b));
        if let Some((_, bottleneck)) = worst {
            return Some(bottleneck);
        }
        // Before MFU: an idle GPU has a low MFU too, and launches are the cause.
        let idle = step.gpu_utilization.map(|busy| 1.0 - busy);
        if let Some(idle) = idle.filter(|&idle| idle >= thresholds.idle_gpu) {
            return Some(Self::Launches { idle });
        }
        if let Some(mfu) = step.mfu.filter(|&mfu| mfu < thresholds.low_mfu) {
            return Some(Self::SmallKernels { mfu });
        }
        Some(Self::Compute {
            share: share(Phase::Forward) + share(Phase::Backward),
        })
    }
}

fn percent(share: f64) -> f64 {
    100.0 * share
}

impl fmt::Display for Bottleneck {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Data { share } => write!(
                f,
                "data loading takes {:.0}% of the step: raise num_workers or prefetch_factor, or \
                 tokenize the data beforehand",
                percent(share)
            ),
            Self::HostToDevice { share } => write!(
                f,
                "copying batches to the device takes {:.0}% of the step: pin the memory \
                 (pin_memory) and copy the next batch while this one is computed",
                percent(share)
            ),
            Self::Accumulate { share } => write!(
                f,
                "gradient accumulation takes {:.0}% of the step: use fewer and larger micro-batches",
                percent(share)
            ),
            Self::Optimizer { share } => write!(
                f,
                "the optimizer takes {:.0}% of the step: use a fused one, or accumulate gradients \
                 over more tokens",
                percent(share)
            ),
            Self::Loop { share } => write!(
                f,
                "the loop around the model takes {:.0}% of the step: log, evaluate and read values \
                 back less often",
                percent(share)
            ),
            Self::Launches { idle } => write!(
                f,
                "the GPU is idle {:.0}% of the time though data is ready: it waits for kernel launches; raise \
                 the batch size, read no value back inside the step, use fused kernels",
                percent(idle)
            ),
            Self::SmallKernels { mfu } => write!(
                f,
                "the device is busy but only {:.0}% of its peak goes into the model (MFU): use a \
                 larger batch, lower precision, and fused kernels and flash attention where they are off",
                percent(mfu)
            ),
            Self::Compute { share } => write!(
                f,
                "the model's own arithmetic takes {:.0}% of the step, so there is no bottleneck; only a lower \
                 precision or a smaller model would make it faster",
                percent(share)
            ),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn find(profile: StepProfile) -> Bottleneck {
        Bottleneck::find(&profile, &BottleneckThresholds::default()).expect("time was measured")
    }

    /// A step of 100 with the given parts; forward takes the rest.
    fn step(parts: &[(Phase, f64)]) -> StepProfile {
        let mut phases = PhaseSeconds::default();
        parts
            .iter()
            .for_each(|&(phase, part)| phases.add(phase, part));
        phases.add(Phase::Forward, 100.0 - phases.total());
        StepProfile {
            phases,
            ..StepProfile::default()
        }
    }

    #[test]
    fn the_sentence_of_slow_data_names_the_remedy() {
        let text = find(step(&[(Phase::Data, 31.0)])).to_string();
        assert!(
            text.starts_with("data loading takes 31% of the step: raise num_workers"),
            "{text}"
        );
    }

    #[test]
    fn each_phase_counts_from_its_threshold_on_and_not_below() {
        for (phase, threshold) in [
            (Phase::Data, 10.0),
            (Phase::HostToDevice, 5.0),
            (Phase::Accumulate, 20.0),
            (Phase::Optimizer, 25.0),
            (Phase::Other, 10.0),
        ] {
            let below = find(step(&[(phase, threshold - 0.1)]));
            assert!(
                matches!(below, Bottleneck::Compute { .. }),
                "{phase:?}: {below}"
            );
            let above = find(step(&[(phase, threshold + 0.1)]));
            let expected = match phase {
                Phase::Data => matches!(above, Bottleneck::Data { .. }),
                Phase::HostToDevice => matches!(above, Bottleneck::HostToDevice { .. }),
                Phase::Accumulate => matches!(above, Bottleneck::Accumulate { .. }),
                Phase::Optimizer => matches!(above, Bottleneck::Optimizer { .. }),
                _ => matches!(above, Bottleneck::Loop { .. }),
            };
            assert!(expected, "{phase:?}: {above}");
        }
    }

    #[test]
    fn of_two_the_one_further_above_its_threshold_counts() {
        let both = step(&[(Phase::Data, 20.0), (Phase::Optimizer, 30.0)]);
        assert_eq!(find(both), Bottleneck::Data { share: 0.2 });
    }

    #[test]
    fn without_a_slow_phase_the_device_is_the_bottleneck() {
        let idle = StepProfile {
            gpu_utilization: Some(0.6),
            mfu: Some(0.1),
            ..step(&[])
        };
        assert!(
            find(idle).to_string().starts_with("the GPU is idle 40%"),
            "{}",
            find(idle)
        );
        let busy = StepProfile {
            gpu_utilization: Some(0.99),
            mfu: Some(0.1),
            ..step(&[])
        };
        assert_eq!(find(busy), Bottleneck::SmallKernels { mfu: 0.1 });
        let fine = StepProfile {
            mfu: Some(0.45),
            ..busy
        };
        assert_eq!(find(fine), Bottleneck::Compute { share: 1.0 });
    }

    #[test]
    fn no_time_is_no_bottleneck() {
        assert_eq!(
            Bottleneck::find(&StepProfile::default(), &BottleneckThresholds::default()),
            None
        );
    }

    proptest! {
        #[test]
        fn the_answer_does_not_depend_on_the_unit_of_time(
            parts in prop::array::uniform7(0.001_f64..1.0), scale in 0.01_f64..100.0,
        ) {
            let mut one = StepProfile::default();
            let mut other = StepProfile::default();
            for (phase, part) in Phase::ALL.into_iter().zip(parts) {
                one.phases.add(phase, part);
                other.phases.add(phase, part * scale);
            }
            prop_assert_eq!(find(one).to_string(), find(other).to_string());
        }
    }
}
