//! The phases of a training step.

use std::ops::AddAssign;

use serde::{Deserialize, Serialize};

/// A phase of a training step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Reading, tokenizing and collating the batch.
    Data,
    /// Copying the batch to the device. Included in [`Phase::Data`] if a loop does not time it separately.
    HostToDevice,
    /// Forward passes of the model and its loss.
    Forward,
    /// Backward passes.
    Backward,
    /// Summing the gradients of micro-batches and of processes, if a loop times it separately.
    Accumulate,
    /// Unscaling, clipping, the update and clearing the gradients.
    Optimizer,
    /// Everything outside the other phases: logging, evaluation, the loop itself.
    Other,
}

impl Phase {
    /// All phases, in the order of a step.
    pub const ALL: [Self; 7] = [
        Self::Data,
        Self::HostToDevice,
        Self::Forward,
        Self::Backward,
        Self::Accumulate,
        Self::Optimizer,
        Self::Other,
    ];

    /// Returns the name in metrics files and traces: `data`, `host_to_device`, `forward`, `backward`,
    /// `accumulate`, `optimizer` or `other`.
    pub fn name(self) -> &'static str {
        match self {
            Self::Data => "data",
            Self::HostToDevice => "host_to_device",
            Self::Forward => "forward",
            Self::Backward => "backward",
            Self::Accumulate => "accumulate",
            Self::Optimizer => "optimizer",
            Self::Other => "other",
        }
    }

    /// Returns `true` if loops may leave the phase out, which then is not displayed.
    pub(crate) fn is_optional(self) -> bool {
        matches!(self, Self::HostToDevice | Self::Accumulate)
    }
}

/// The seconds of each phase. Phases never overlap: their sum is the time of the step.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct PhaseSeconds {
    /// The seconds in [`Phase::Data`].
    pub data: f64,
    /// The seconds in [`Phase::HostToDevice`].
    #[serde(skip_serializing_if = "is_zero")]
    pub host_to_device: f64,
    /// The seconds in [`Phase::Forward`].
    pub forward: f64,
    /// The seconds in [`Phase::Backward`].
    pub backward: f64,
    /// The seconds in [`Phase::Accumulate`].
    #[serde(skip_serializing_if = "is_zero")]
    pub accumulate: f64,
    /// The seconds in [`Phase::Optimizer`].
    pub optimizer: f64,
    /// The seconds in [`Phase::Other`].
    pub other: f64,
}

fn is_zero(seconds: &f64) -> bool {
    *seconds == 0.0
}

impl PhaseSeconds {
    /// Returns the seconds of one phase.
    pub fn get(&self, phase: Phase) -> f64 {
        match phase {
            Phase::Data => self.data,
            Phase::HostToDevice => self.host_to_device,
            Phase::Forward => self.forward,
            Phase::Backward => self.backward,
            Phase::Accumulate => self.accumulate,
            Phase::Optimizer => self.optimizer,
            Phase::Other => self.other,
        }
    }

    /// Returns the sum over all phases, in seconds.
    pub fn total(&self) -> f64 {
        Phase::ALL.iter().map(|&phase| self.get(phase)).sum()
    }

    /// Adds seconds to one phase.
    pub fn add(&mut self, phase: Phase, seconds: f64) {
        *self.slot(phase) += seconds;
    }

    fn slot(&mut self, phase: Phase) -> &mut f64 {
        match phase {
            Phase::Data => &mut self.data,
            Phase::HostToDevice => &mut self.host_to_device,
            Phase::Forward => &mut self.forward,
            Phase::Backward => &mut self.backward,
            Phase::Accumulate => &mut self.accumulate,
            Phase::Optimizer => &mut self.optimizer,
            Phase::Other => &mut self.other,
        }
    }

    /// Returns the phases to display with their seconds: all but the optional ones without any time.
    pub fn shown(&self) -> impl Iterator<Item = (Phase, f64)> {
        let seconds = *self;
        Phase::ALL
            .into_iter()
            .map(move |phase| (phase, seconds.get(phase)))
            .filter(|&(phase, seconds)| seconds != 0.0 || !phase.is_optional())
    }
}

impl AddAssign for PhaseSeconds {
    fn add_assign(&mut self, rhs: Self) {
        for phase in Phase::ALL {
            self.add(phase, rhs.get(phase));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_phase_has_its_own_name_and_seconds() {
        let mut seconds = PhaseSeconds::default();
        for (index, phase) in Phase::ALL.into_iter().enumerate() {
            seconds.add(phase, f64::from(1 << index));
        }
        assert_eq!(seconds.total(), 127.0);
        for (index, phase) in Phase::ALL.into_iter().enumerate() {
            assert_eq!(seconds.get(phase), f64::from(1 << index));
            let json = serde_json::to_value(phase).expect("JSON");
            assert_eq!(json, phase.name());
            let all = serde_json::to_value(seconds).expect("JSON");
            assert_eq!(all[phase.name()], f64::from(1 << index));
        }
    }

    #[test]
    fn records_without_the_optional_phases_are_read() {
        let line = r#"{"data":1.0,"forward":2.0,"backward":3.0,"optimizer":4.0,"other":5.0}"#;
        let seconds: PhaseSeconds = serde_json::from_str(line).expect("an older record");
        assert_eq!(seconds.total(), 15.0);
        assert_eq!(serde_json::to_string(&seconds).expect("JSON"), line);
        assert_eq!(seconds.shown().count(), 5);
    }
}
