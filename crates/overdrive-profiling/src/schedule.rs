//! The schedule of a profiler.

use overdrive_core::check_option;
use serde::{Deserialize, Serialize};

use crate::Result;

/// The steps that a [`Profiler`](crate::Profiler) records (`torch.profiler.schedule`): after `skip_first` steps
/// follow cycles of `wait` steps without recording, `warmup` steps whose recording is discarded (the first recorded
/// steps pay for the profiler's setup), and `active` steps whose trace is kept.
///
/// ```
/// use overdrive_profiling::{Schedule, ScheduledAction};
///
/// let schedule = Schedule { wait: 1, warmup: 1, active: 2, repeat: 1, skip_first: 0 };
/// let actions: Vec<_> = (0..5).map(|step| schedule.action(step)).collect();
/// use ScheduledAction::*;
/// assert_eq!(actions, [Idle, WarmUp, Record, RecordAndSave, Idle]);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Schedule {
    /// The number of steps of a cycle without recording. Default 0.
    pub wait: u64,
    /// The number of steps whose recording is discarded. Default 0.
    pub warmup: u64,
    /// The number of steps whose trace is kept, at least 1. Default: all.
    pub active: u64,
    /// The number of cycles. Default 0: until the end of the run.
    pub repeat: u64,
    /// The number of steps before the first cycle. Default 0.
    pub skip_first: u64,
}

impl Default for Schedule {
    fn default() -> Self {
        Self {
            wait: 0,
            warmup: 0,
            active: u64::MAX,
            repeat: 0,
            skip_first: 0,
        }
    }
}

/// The action of a profiler in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScheduledAction {
    /// Does not record.
    Idle,
    /// Records, and discards the recording.
    WarmUp,
    /// Records.
    Record,
    /// Records, and delivers the trace at the end of the step.
    RecordAndSave,
}

impl Schedule {
    /// Returns the action in a step, counted from 0.
    pub fn action(&self, step: u64) -> ScheduledAction {
        let Some(step) = step.checked_sub(self.skip_first) else {
            return ScheduledAction::Idle;
        };
        // Saturating: `active` is u64::MAX by default.
        let cycle = self
            .wait
            .saturating_add(self.warmup)
            .saturating_add(self.active.max(1));
        if self.repeat > 0 && step / cycle >= self.repeat {
            return ScheduledAction::Idle;
        }
        match step % cycle {
            position if position < self.wait => ScheduledAction::Idle,
            position if position < self.wait + self.warmup => ScheduledAction::WarmUp,
            position if position + 1 < cycle => ScheduledAction::Record,
            _ => ScheduledAction::RecordAndSave,
        }
    }

    /// Checks that the schedule records something.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`] where no step is active.
    pub fn validate(&self) -> Result<()> {
        Ok(check_option(
            self.active > 0,
            "active",
            self.active,
            "at least 1: a schedule without active steps records nothing",
        )?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ScheduledAction::{Idle, Record, RecordAndSave, WarmUp};

    fn actions(schedule: Schedule, steps: u64) -> Vec<ScheduledAction> {
        (0..steps).map(|step| schedule.action(step)).collect()
    }

    #[test]
    fn cycles_follow_one_another_until_they_are_repeated_enough() {
        let schedule = Schedule {
            skip_first: 2,
            wait: 1,
            warmup: 1,
            active: 2,
            repeat: 2,
        };
        // torch.profiler.schedule(wait=1, warmup=1, active=2, repeat=2, skip_first=2), 2.11.0:
        let cycle = [Idle, WarmUp, Record, RecordAndSave];
        let expected = [&[Idle, Idle], &cycle[..], &cycle, &[Idle, Idle]].concat();
        assert_eq!(actions(schedule, 12), expected);
    }

    #[test]
    fn without_repeat_cycles_continue_to_the_end() {
        let schedule = Schedule {
            wait: 1,
            active: 1,
            ..Schedule::default()
        };
        assert_eq!(
            actions(schedule, 4),
            [Idle, RecordAndSave, Idle, RecordAndSave]
        );
        assert_eq!(schedule.action(1_000_001), RecordAndSave);
    }

    #[test]
    fn the_default_records_every_step() {
        assert_eq!(actions(Schedule::default(), 3), [Record; 3]);
    }

    #[test]
    fn a_schedule_without_active_steps_is_refused() {
        let schedule = Schedule {
            active: 0,
            ..Schedule::default()
        };
        let text = schedule
            .validate()
            .expect_err("nothing to record")
            .to_string();
        assert!(
            text.starts_with("`active` is 0; it must be at least 1"),
            "{text}"
        );
    }
}
