//! The time of an epoch and of a run.

use std::time::{Duration, Instant};

use overdrive_core::units;
use overdrive_sys::profiler::DeviceEvent;
use tch::Device;

use crate::TrainingPlan;

/// The number of steps that are measured, after the first one, in which caches fill.
const STEPS: u64 = 5;
/// The time after which fewer steps suffice: whoever waits for slow steps wants to know soon.
const SOON: Duration = Duration::from_secs(20);

/// The time of an epoch and of the run, which is known after the first steps of a process.
///
/// ```
/// use overdrive_trainer::{DurationEstimate, Preset};
/// use tch::Device;
///
/// let plan = Preset::Tiny.arguments().plan(1000)?;
/// let mut estimate = DurationEstimate::new(&plan, Device::Cpu);
/// for step in 1..=plan.total_steps {
///     // … train …
///     if let Some(line) = estimate.after_step(step) {
///         println!("{line}"); // once, after the sixth step
///     }
/// }
/// # Ok::<(), overdrive_trainer::Error>(())
/// ```
#[derive(Debug)]
pub struct DurationEstimate {
    device: Device,
    steps_per_epoch: u64,
    total_steps: u64,
    evaluates: bool,
    /// The first step of this process, and its end.
    first: Option<(u64, Instant)>,
    is_reported: bool,
}

impl DurationEstimate {
    /// Creates the estimate of a run on `device`.
    pub fn new(plan: &TrainingPlan, device: Device) -> Self {
        Self {
            device,
            steps_per_epoch: plan.steps_per_epoch,
            total_steps: plan.total_steps,
            evaluates: plan.eval_steps.is_some(),
            first: None,
            is_reported: false,
        }
    }

    /// Returns the line about the durations after the step (counted from 1) at which it is due: when five steps after
    /// the first of this process, or 20 seconds of them, are measured. A run that is almost over by then has none.
    pub fn after_step(&mut self, step: u64) -> Option<String> {
        if self.is_reported {
            return None;
        }
        let Some((first, began)) = self.first else {
            self.wait_for_device();
            self.first = Some((step, Instant::now()));
            return None;
        };
        let steps = step - first;
        if steps < STEPS && began.elapsed() < SOON {
            return None;
        }
        self.is_reported = true;
        // A run that is almost over needs no estimate.
        if step + STEPS > self.total_steps {
            return None;
        }
        self.wait_for_device();
        let per_step = began.elapsed().as_secs_f64() / steps as f64;
        Some(self.line(step, per_step))
    }

    /// Waits until the steps so far are computed: the host only launches the work of a GPU.
    fn wait_for_device(&self) {
        if self.device != Device::Cpu
            && let Ok(mut event) = DeviceEvent::new(self.device)
            && event.record().is_ok()
        {
            // An error of the device ends the next step.
            let _ = event.wait();
        }
    }

    fn line(&self, step: u64, per_step: f64) -> String {
        let seconds = |steps: u64| units::seconds(per_step * steps as f64);
        let without = match self.evaluates {
            true => ", without evaluations",
            false => "",
        };
        format!(
            "time        {} a step, {} an epoch of {} steps, {} the run of {} steps, {} of it left{without}",
            units::seconds(per_step),
            seconds(self.steps_per_epoch),
            self.steps_per_epoch,
            seconds(self.total_steps),
            self.total_steps,
            seconds(self.total_steps - step),
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn estimate() -> DurationEstimate {
        DurationEstimate {
            device: Device::Cpu,
            steps_per_epoch: 100,
            total_steps: 300,
            evaluates: true,
            first: None,
            is_reported: false,
        }
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
        // A run that resumes after step 40.
        let reported: Vec<u64> = (41..=300)
            .filter(|&step| estimate.after_step(step).is_some())
            .collect();
        assert_eq!(reported, [46]);
    }

    #[test]
    fn a_short_run_ends_before_it_would_be_told() {
        let mut estimate = DurationEstimate {
            total_steps: 8,
            ..estimate()
        };
        assert!((1..=8).all(|step| estimate.after_step(step).is_none()));
    }
}
