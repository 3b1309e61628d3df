//! The time of an epoch and of a run.

use overdrive_core::units;

use super::plan::TrainingPlan;

/// The number of steps that are measured, after the first one, in which caches fill.
const STEPS: u64 = 5;
/// The number of seconds after which fewer steps suffice, so that slow runs also get an early estimate.
const SOON: f64 = 20.0;

/// The time of an epoch and of the run, which is known after the first steps of a process.
#[derive(Debug)]
pub(crate) struct DurationEstimate {
    plan: TrainingPlan,
    /// The first step of this process, and its end in seconds.
    first: Option<(u64, f64)>,
    is_reported: bool,
}

impl DurationEstimate {
    /// Creates the estimate of a run.
    pub(crate) fn new(plan: &TrainingPlan) -> Self {
        Self {
            plan: *plan,
            first: None,
            is_reported: false,
        }
    }

    /// Records the time at which a step (counted from 1) was finished, in seconds since an arbitrary start. Returns the
    /// log line about the durations once five steps after the first of this process, or 20 seconds, have been measured.
    /// A run that is almost over by then gets no line.
    pub(crate) fn after_step(&mut self, step: u64, elapsed_seconds: f64) -> Option<String> {
        if self.is_reported {
            return None;
        }
        let Some((first, began)) = self.first else {
            self.first = Some((step, elapsed_seconds));
            return None;
        };
        let (steps, seconds) = (step.saturating_sub(first), elapsed_seconds - began);
        if steps == 0 || (steps < STEPS && seconds < SOON) {
            return None;
        }
        self.is_reported = true;
        // A run that is almost over needs no estimate.
        if step + STEPS > self.plan.total_steps {
            return None;
        }
        Some(self.line(step, seconds / steps as f64))
    }

    fn line(&self, step: u64, per_step: f64) -> String {
        let seconds = |steps: u64| units::seconds(per_step * steps as f64);
        let without = match self.plan.eval_steps {
            Some(_) => ", without evaluations",
            None => "",
        };
        let (epoch, run) = (self.plan.steps_per_epoch, self.plan.total_steps);
        format!(
            "time        {} a step, {} an epoch of {epoch} steps, {} the run of {run} steps, {} of it left{without}",
            units::seconds(per_step),
            seconds(epoch),
            seconds(run),
            seconds(run - step),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::arguments::{IntervalStrategy, TrainingArguments};

    fn estimate() -> DurationEstimate {
        let arguments = TrainingArguments {
            max_steps: 300,
            gradient_accumulation_steps: 1,
            eval_strategy: IntervalStrategy::Steps,
            ..TrainingArguments::default()
        };
        DurationEstimate::new(&arguments.plan(100).expect("valid"))
    }

    #[test]
    fn the_line_has_the_times_of_a_step_an_epoch_and_the_run() {
        assert_eq!(
            estimate().line(6, 2.0),
            "time        2s a step, 3m 20s an epoch of 100 steps, 10m 00s the run of 300 steps, 9m 48s of it left, \
             without evaluations"
        );
    }

    #[test]
    fn it_is_reported_once_after_the_first_steps() {
        let mut estimate = estimate();
        // A run that resumes after step 40. Its first step takes a minute, the others two seconds.
        let reported: Vec<(u64, String)> = (41..=300)
            .filter_map(|step| {
                let elapsed = 60.0 + 2.0 * (step - 41) as f64;
                Some((step, estimate.after_step(step, elapsed)?))
            })
            .collect();
        assert_eq!(reported, [(46, estimate.line(46, 2.0))]);
    }

    #[test]
    fn it_is_reported_after_twenty_seconds_of_slow_steps() {
        let mut estimate = estimate();
        let mut after = |step| estimate.after_step(step, 15.0 * step as f64);
        assert!(after(1).is_none() && after(2).is_none());
        assert!(after(3).is_some_and(|line| line.starts_with("time        15s a step")));
    }

    #[test]
    fn a_short_run_ends_before_it_would_be_told() {
        let mut estimate = estimate();
        estimate.plan.total_steps = 8;
        assert!((1..=8).all(|step| estimate.after_step(step, step as f64).is_none()));
    }
}
