//! The numbers of steps of a run.

use overdrive_optim::{ScheduleLength, Warmup};

use crate::{IntervalStrategy, Result, SaveStrategy, TrainingArguments};

/// The numbers of steps of a run, computed from the configuration and the size of the data.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TrainingPlan {
    /// The number of optimizer steps of the run.
    pub total_steps: u64,
    /// The number of optimizer steps of an epoch.
    pub steps_per_epoch: u64,
    /// The number of optimizer steps of the warm-up.
    pub warmup_steps: u64,
    /// The number of steps between log lines.
    pub logging_steps: u64,
    /// The number of steps between evaluations; `None` for no evaluation.
    pub eval_steps: Option<u64>,
    /// The number of steps between snapshots; `None` if snapshots do not depend on the step.
    pub save_steps: Option<u64>,
    /// The times of a snapshot.
    pub save_strategy: SaveStrategy,
    /// The number of micro-batches of an optimizer step.
    pub micro_batches: usize,
}

impl TrainingPlan {
    /// Returns `true` if an evaluation follows this step (counted from 1): at every interval and after the
    /// last step.
    pub fn eval_due(&self, step: u64) -> bool {
        self.eval_steps
            .is_some_and(|every| step.is_multiple_of(every) || step == self.total_steps)
    }

    /// Returns `true` if a snapshot follows this step (counted from 1): at every interval, after the last step,
    /// if the run `ends` early, and with `save_strategy: best` if the evaluation `improved`.
    pub fn save_due(&self, step: u64, improved: bool, ends: bool) -> bool {
        match self.save_strategy {
            SaveStrategy::No => false,
            SaveStrategy::Best => improved || ends,
            SaveStrategy::Steps | SaveStrategy::Epoch => {
                let every = self.save_steps.unwrap_or(self.total_steps);
                step.is_multiple_of(every) || step == self.total_steps || ends
            }
        }
    }

    /// Returns the lengths that a learning-rate schedule needs.
    pub fn schedule_length(&self) -> ScheduleLength {
        ScheduleLength {
            warmup_steps: self.warmup_steps,
            total_steps: self.total_steps,
        }
    }
}

impl TrainingArguments {
    /// Computes the numbers of steps as Hugging Face's trainer does: an epoch has
    /// `ceil(micro_batches_per_epoch / gradient_accumulation_steps)` steps, and fractions of the run are
    /// rounded up.
    ///
    /// # Errors
    /// As [`TrainingArguments::validate`].
    pub fn plan(&self, micro_batches_per_epoch: u64) -> Result<TrainingPlan> {
        self.validate()?;
        // At least one, so that a tiny data set still trains.
        let steps_per_epoch = micro_batches_per_epoch
            .div_ceil(self.gradient_accumulation_steps)
            .max(1);
        let total_steps = match u64::try_from(self.max_steps) {
            Ok(steps) if steps > 0 => steps,
            _ => (self.num_train_epochs * steps_per_epoch as f64)
                .ceil()
                .max(1.0) as u64,
        };
        let steps = |interval: f64| match interval {
            fraction if fraction < 1.0 => ((fraction * total_steps as f64).ceil() as u64).max(1),
            steps => steps as u64,
        };
        // The optimizer crate resolves fractions, so that its schedules and this plan agree.
        let warmup = Warmup {
            warmup_steps: self.warmup_steps,
            warmup_ratio: self.warmup_ratio,
        };
        let warmup_steps = warmup.resolve(total_steps)?;
        let logging_steps = steps(self.logging_steps);
        let eval_steps = match self.eval_strategy {
            IntervalStrategy::No => None,
            IntervalStrategy::Steps => Some(self.eval_steps.map_or(logging_steps, steps)),
            IntervalStrategy::Epoch => Some(steps_per_epoch),
        };
        let save_steps = match self.save_strategy {
            SaveStrategy::No | SaveStrategy::Best => None,
            SaveStrategy::Steps => Some(steps(self.save_steps)),
            SaveStrategy::Epoch => Some(steps_per_epoch),
        };
        Ok(TrainingPlan {
            total_steps,
            steps_per_epoch,
            warmup_steps,
            logging_steps,
            eval_steps,
            save_steps,
            save_strategy: self.save_strategy,
            micro_batches: usize::try_from(self.gradient_accumulation_steps).unwrap_or(usize::MAX),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arguments() -> TrainingArguments {
        TrainingArguments {
            max_steps: 100,
            logging_steps: 10.0,
            ..Default::default()
        }
    }

    #[test]
    fn max_steps_overrides_the_epochs() {
        let plan = arguments().plan(7).expect("valid");
        assert_eq!(plan.total_steps, 100);
        let by_epochs = TrainingArguments {
            max_steps: -1,
            num_train_epochs: 1.5,
            ..arguments()
        };
        let by_epochs = TrainingArguments {
            gradient_accumulation_steps: 4,
            ..by_epochs
        }
        .plan(10)
        .expect("valid");
        // ceil(10 / 4) = 3 steps per epoch, ceil(1.5 · 3) = 5
        assert_eq!((by_epochs.steps_per_epoch, by_epochs.total_steps), (3, 5));
    }

    #[test]
    fn warmup_is_a_number_of_steps_or_a_fraction_of_them() {
        let warmup = |warmup_steps, warmup_ratio| {
            let arguments = TrainingArguments {
                warmup_steps,
                warmup_ratio,
                ..arguments()
            };
            arguments.plan(7).expect("valid").warmup_steps
        };
        assert_eq!(warmup(0.0, 0.0), 0);
        assert_eq!(warmup(0.0, 0.031), 4);
        assert_eq!(warmup(0.25, 0.0), 25);
        assert_eq!(warmup(12.0, 0.5), 12);
    }

    #[test]
    fn evaluations_follow_each_interval_and_the_last_step() {
        let plan = |eval_strategy, eval_steps| {
            let arguments = TrainingArguments {
                eval_strategy,
                eval_steps,
                ..arguments()
            };
            arguments.plan(7).expect("valid")
        };
        let due = |plan: TrainingPlan| {
            (1..=100)
                .filter(|&step| plan.eval_due(step))
                .collect::<Vec<_>>()
        };
        assert!(due(plan(IntervalStrategy::No, Some(5.0))).is_empty());
        assert_eq!(
            due(plan(IntervalStrategy::Steps, Some(40.0))),
            [40, 80, 100]
        );
        assert_eq!(due(plan(IntervalStrategy::Steps, Some(0.5))), [50, 100]);
        assert_eq!(plan(IntervalStrategy::Steps, None).eval_steps, Some(10));
        assert_eq!(due(plan(IntervalStrategy::Epoch, None))[..3], [7, 14, 21]);
    }
}
