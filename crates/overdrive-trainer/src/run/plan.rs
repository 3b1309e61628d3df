//! The numbers of steps of a run.

use overdrive_datasets::LoaderState;
use overdrive_optim::{ScheduleLength, Warmup};

use crate::Result;
use crate::arguments::{IntervalStrategy, SaveStrategy, TrainingArguments};

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
    /// The times of an evaluation.
    pub eval_strategy: IntervalStrategy,
    /// The number of steps between snapshots; `None` if snapshots do not depend on the step.
    pub save_steps: Option<u64>,
    /// The times of a snapshot.
    pub save_strategy: SaveStrategy,
    /// The number of micro-batches of an optimizer step; the last step of an epoch has the rest.
    pub micro_batches: usize,
    /// The first step at which an epoch ends, and all that `steps_per_epoch` separates from it.
    first_epoch_end: u64,
    /// If `true`, the run ends after a number of epochs and not of steps.
    ends_by_epochs: bool,
}

impl TrainingPlan {
    /// Returns `true` if a log line is due after this step (counted from 1): after the first, after the last, and
    /// at every `logging_steps`. The losses and norms of other steps are read from the device together with those
    /// of the next such step.
    pub fn log_due(&self, step: u64) -> bool {
        step == 1 || step.is_multiple_of(self.logging_steps.max(1)) || step == self.total_steps
    }

    /// Returns `true` if an evaluation follows this step (counted from 1): at every interval and after the
    /// last step.
    pub fn eval_due(&self, step: u64) -> bool {
        let is_due = match self.eval_strategy {
            IntervalStrategy::Epoch => self.epoch_ends(step),
            _ => self.eval_steps.is_some_and(|n| step.is_multiple_of(n)),
        };
        is_due || (self.eval_steps.is_some() && step == self.total_steps)
    }

    /// Returns `true` if a snapshot follows this step (counted from 1): at every interval, after the last step,
    /// if the run `ends` early, and with `save_strategy: best` if the evaluation `improved`.
    pub fn save_due(&self, step: u64, improved: bool, ends: bool) -> bool {
        match self.save_strategy {
            SaveStrategy::No => false,
            SaveStrategy::Best => improved || ends,
            SaveStrategy::Epoch => self.epoch_ends(step) || step == self.total_steps || ends,
            SaveStrategy::Steps => {
                let every = self.save_steps.unwrap_or(self.total_steps);
                step.is_multiple_of(every) || step == self.total_steps || ends
            }
        }
    }

    /// Returns `true` if this step (counted from 1) is the last of an epoch.
    pub fn epoch_ends(&self, step: u64) -> bool {
        let since = step.checked_sub(self.first_epoch_end);
        since.is_some_and(|steps| steps.is_multiple_of(self.steps_per_epoch))
    }

    /// Returns the plan of a run that has done `steps` steps and is at `position` in the data. It differs from the
    /// plan of a new run only if some of the steps had another number of examples: then a run of
    /// `num_train_epochs` still ends after that number of passes, with another number of steps.
    #[must_use]
    pub fn resumed(self, steps: u64, position: LoaderState) -> Self {
        let left = position.batches.saturating_sub(position.next_batch);
        let left_in_epoch = left.div_ceil(self.micro_batches.max(1)) as u64;
        // The number of steps that lead to this position if all steps have the size in this plan.
        // Saturating, because the position comes from a file.
        let epochs = position.epoch.saturating_add(1);
        let done = epochs
            .saturating_mul(self.steps_per_epoch)
            .saturating_sub(left_in_epoch);
        Self {
            total_steps: match self.ends_by_epochs {
                true => steps.saturating_add(self.total_steps.saturating_sub(done)),
                false => self.total_steps,
            },
            first_epoch_end: steps.saturating_add(left_in_epoch),
            ..self
        }
    }

    /// Returns the lengths that a learning-rate schedule needs.
    pub(super) fn schedule_length(&self) -> ScheduleLength {
        ScheduleLength {
            warmup_steps: self.warmup_steps,
            total_steps: self.total_steps,
        }
    }
}

impl TrainingArguments {
    /// Computes the numbers of steps as Hugging Face's trainer does: an epoch has
    /// `ceil(micro_batches_per_epoch / gradient_accumulation_steps)` steps, of which the last has fewer
    /// micro-batches if they do not divide, and fractions of the run are rounded up.
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
            eval_strategy: self.eval_strategy,
            save_steps,
            save_strategy: self.save_strategy,
            first_epoch_end: steps_per_epoch,
            ends_by_epochs: self.max_steps <= 0,
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
    fn a_resumed_run_ends_after_as_many_passes_whatever_the_size_of_its_first_steps() {
        let plan = |accumulation| {
            TrainingArguments {
                max_steps: -1,
                num_train_epochs: 2.0,
                gradient_accumulation_steps: accumulation,
                ..arguments()
            }
            .plan(25)
            .expect("valid")
        };
        let at = |epoch, next_batch| LoaderState {
            epoch,
            next_batch,
            batches: 25,
            joint_batch_size: 1,
            ..LoaderState::default()
        };
        // 16 + 9 micro-batches an epoch.
        let whole = plan(16);
        assert_eq!((whole.steps_per_epoch, whole.total_steps), (2, 4));
        for (steps, position) in [
            (0, at(0, 0)),
            (1, at(0, 16)),
            (2, at(0, 25)),
            (2, at(1, 0)),
            (3, at(1, 16)),
            (4, at(1, 25)),
        ] {
            let resumed = whole.resumed(steps, position);
            assert_eq!(resumed.total_steps, 4, "{position:?}");
            for step in steps + 1..=4 {
                assert_eq!(resumed.epoch_ends(step), step % 2 == 0, "{position:?}");
            }
        }
        // One step of 16, then steps of 4: 3 for the rest of this epoch and 7 for the next.
        let smaller = plan(4).resumed(1, at(0, 16));
        assert_eq!(smaller.total_steps, 1 + 3 + 7);
        let ends: Vec<u64> = (2..=11).filter(|&step| smaller.epoch_ends(step)).collect();
        assert_eq!(ends, [4, 11]);
        // A given number of steps does not change.
        assert_eq!(
            arguments()
                .plan(25)
                .expect("valid")
                .resumed(1, at(0, 16))
                .total_steps,
            100
        );
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
