//! Which steps a profiler records.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// Which steps a [`Profiler`](crate::Profiler) records: after `skip_first` steps come cycles of `wait`
/// steps without it, `warmup` steps that are recorded and thrown away (the first recorded steps pay for
/// starting up), and `active` steps whose trace is kept (`torch.profiler.schedule`).
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
    /// Steps of a cycle without the profiler: 0.
    pub wait: u64,
    /// Steps recorded and thrown away: 0.
    pub warmup: u64,
    /// Steps recorded and kept, at least 1: the default, with no end, is all of them.
    pub active: u64,
    /// Cycles; 0, the default, goes on until the end.
    pub repeat: u64,
    /// Steps before the first cycle: 0.
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

/// What a profiler does in a step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ScheduledAction {
    /// Nothing: the step runs at its own speed.
    Idle,
    /// Records what is thrown away.
    WarmUp,
    /// Records.
    Record,
    /// Records, and hands the trace over at the end of the step.
    RecordAndSave,
}

impl Schedule {
    /// What is done in a step, counted from 0.
    pub fn action(&self, step: u64) -> ScheduledAction {
        let Some(step) = step.checked_sub(self.skip_first) else {
            return ScheduledAction::Idle;
        };
        let cycle = self
            .wait
            .saturating_add(self.warmup)
            .saturating_add(self.active.max(1));
        if self.repeat > 0 && step / cycle >= self.repeat {
            return ScheduledAction::Idle;
        }
        match step % cycle {
            within if within < self.wait => ScheduledAction::Idle,
            within if within < self.wait + self.warmup => ScheduledAction::WarmUp,
            within if within + 1 < cycle => ScheduledAction::Record,
            _ => ScheduledAction::RecordAndSave,
        }
    }

    /// Whether it makes sense.
    ///
    /// # Errors
    /// [`Error::InvalidConfig`] where no step is active.
    pub fn validate(&self) -> Result<()> {
        if self.active == 0 {
            return Err(Error::InvalidConfig {
                name: "active",
                value: self.active.to_string(),
                expected: "at least 1: a schedule without active steps records nothing",
            });
        }
        Ok(())
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
    fn without_repeat_cycles_go_on() {
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
            text.starts_with("active is 0, but must be at least 1"),
            "{text}"
        );
    }
}
