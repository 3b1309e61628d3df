//! The overflows of a gradient scaler, and the warning about a collapsed scale.

use std::collections::VecDeque;
use std::fmt;

use serde::{Deserialize, Serialize};

// The steps of `ScalerStatistics::overflow_rate`: enough for a rate in percent, few enough to see a change soon.
const WINDOW: usize = 200;

// The changes that `ScalerStatistics::scale_changes` keeps. A sound run has one in 2000 steps; a run whose scale
// oscillates must not fill the memory.
const CHANGES_KEPT: usize = 256;

/// The loss scale from a step on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ScaleChange {
    /// The step after which the scale had this value, counted from 1; 0 for the initial scale.
    pub step: u64,
    /// The scale.
    pub scale: f64,
}

/// The overflows of a run, counted by [`GradScaler`](crate::GradScaler).
///
/// A step counts as skipped if any gradient contained an infinity or a NaN: the optimizer of that gradient changed
/// no parameter.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScalerStatistics {
    steps: u64,
    skipped: u64,
    consecutive_skips: u64,
    longest_skip_run: u64,
    last_overflow_step: Option<u64>,
    scale: f64,
    min_scale: f64,
    max_scale: f64,
    changes: VecDeque<ScaleChange>,
    window: VecDeque<bool>,
}

impl ScalerStatistics {
    /// Creates statistics without steps, at this scale.
    pub(crate) fn new(scale: f64) -> Self {
        Self {
            steps: 0,
            skipped: 0,
            consecutive_skips: 0,
            longest_skip_run: 0,
            last_overflow_step: None,
            scale,
            min_scale: scale,
            max_scale: scale,
            changes: VecDeque::from([ScaleChange { step: 0, scale }]),
            window: VecDeque::new(),
        }
    }

    /// Counts a step, with `true` if a gradient overflowed, and the scale after it.
    pub(crate) fn record(&mut self, overflowed: bool, scale: f64) {
        self.steps += 1;
        if overflowed {
            self.skipped += 1;
            self.consecutive_skips += 1;
            self.longest_skip_run = self.longest_skip_run.max(self.consecutive_skips);
            self.last_overflow_step = Some(self.steps);
        } else {
            self.consecutive_skips = 0;
        }
        if self.window.len() == WINDOW {
            self.window.pop_front();
        }
        self.window.push_back(overflowed);
        self.set_scale(scale);
    }

    /// Records a scale, that of a step or of a loaded state.
    pub(crate) fn set_scale(&mut self, scale: f64) {
        #[expect(clippy::float_cmp, reason = "a scale is the same or another one")]
        if scale == self.scale {
            return;
        }
        self.scale = scale;
        self.min_scale = self.min_scale.min(scale);
        self.max_scale = self.max_scale.max(scale);
        if self.changes.len() == CHANGES_KEPT {
            self.changes.pop_front();
        }
        let step = self.steps;
        self.changes.push_back(ScaleChange { step, scale });
    }

    /// Returns the number of counted steps, the updates of the scaler.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Returns the number of steps in which a gradient overflowed.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Returns the number of consecutive skipped steps up to the last counted one.
    pub fn consecutive_skips(&self) -> u64 {
        self.consecutive_skips
    }

    /// Returns the largest number of consecutive skipped steps so far.
    pub fn longest_skip_run(&self) -> u64 {
        self.longest_skip_run
    }

    /// Returns the last skipped step, counted from 1.
    pub fn last_overflow_step(&self) -> Option<u64> {
        self.last_overflow_step
    }

    /// Returns the scale after the last counted step.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// Returns the lowest scale so far.
    pub fn min_scale(&self) -> f64 {
        self.min_scale
    }

    /// Returns the highest scale so far.
    pub fn max_scale(&self) -> f64 {
        self.max_scale
    }

    /// Returns the initial scale and the scale after each step that changed it, oldest first; only the last 256 of
    /// them.
    pub fn scale_changes(&self) -> impl ExactSizeIterator<Item = ScaleChange> + '_ {
        self.changes.iter().copied()
    }

    /// Returns the fraction of the last 200 steps (of all, while there are fewer) that was skipped, 0 to 1. A
    /// healthy run with the default configuration has about 0.0005: one in `growth_interval`.
    pub fn overflow_rate(&self) -> f64 {
        if self.window.is_empty() {
            return 0.0;
        }
        let skipped = self.window.iter().filter(|&&skipped| skipped).count();
        skipped as f64 / self.window.len() as f64
    }

    /// Returns a warning if the scale has collapsed by these thresholds.
    pub fn collapse_warning(&self, thresholds: &CollapseThresholds) -> Option<ScaleWarning> {
        let kind = if self.scale < thresholds.min_scale {
            CollapseKind::ScaleTooLow
        } else if self.consecutive_skips >= thresholds.consecutive_skips {
            CollapseKind::ConsecutiveSkips
        // Only for a full window: every run skips its first steps, until the scale is small enough.
        } else if self.window.len() == WINDOW && self.overflow_rate() >= thresholds.overflow_rate {
            CollapseKind::FrequentSkips
        } else {
            return None;
        };
        Some(ScaleWarning {
            kind,
            step: self.steps,
            scale: self.scale,
            consecutive_skips: self.consecutive_skips,
            overflow_rate: self.overflow_rate(),
        })
    }
}

/// The thresholds from which on the loss scale counts as collapsed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CollapseThresholds {
    /// The smallest healthy scale. Default 1; below it, scaling makes small gradients smaller.
    pub min_scale: f64,
    /// The number of consecutive skipped steps. Default 20; from 65536 the default scaler reaches 1 in 16.
    pub consecutive_skips: u64,
    /// The skipped fraction of the last 200 steps, 0 to 1. Default 0.2.
    pub overflow_rate: f64,
}

impl Default for CollapseThresholds {
    fn default() -> Self {
        Self {
            min_scale: 1.0,
            consecutive_skips: 20,
            overflow_rate: 0.2,
        }
    }
}

/// The kind of a collapse of the loss scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum CollapseKind {
    /// The scale fell below [`CollapseThresholds::min_scale`].
    ScaleTooLow,
    /// Too many consecutive steps are skipped.
    ConsecutiveSkips,
    /// A large fraction of the steps is skipped.
    FrequentSkips,
}

/// A warning about a collapsed loss scale. [`Display`](fmt::Display) is a sentence with the remedy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ScaleWarning {
    /// The kind of the collapse.
    pub kind: CollapseKind,
    /// The step after which it was found, counted from 1.
    pub step: u64,
    /// The scale after that step.
    pub scale: f64,
    /// The number of consecutive skipped steps.
    pub consecutive_skips: u64,
    /// The skipped fraction of the last 200 steps, 0 to 1.
    pub overflow_rate: f64,
}

impl fmt::Display for ScaleWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (step, scale, skips) = (self.step, self.scale, self.consecutive_skips);
        match self.kind {
            CollapseKind::ScaleTooLow => write!(
                f,
                "the loss scale fell to {scale} at step {step} ({skips} steps skipped in a row)"
            )?,
            CollapseKind::ConsecutiveSkips => write!(
                f,
                "{skips} steps were skipped in a row up to step {step} (loss scale {scale})"
            )?,
            CollapseKind::FrequentSkips => write!(
                f,
                "{:.0}% of the last {WINDOW} steps up to step {step} were skipped (loss scale {scale})",
                100.0 * self.overflow_rate
            )?,
        }
        f.write_str(
            ": fp16 gradients overflow repeatedly. Check that the loss itself is not NaN or \
             infinite; lower the learning rate or warm up longer; train in bf16 if the device has \
             it (Precision::recommend), which needs no scaling",
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn after(overflows: &[bool], scale: f64) -> ScalerStatistics {
        let mut statistics = ScalerStatistics::new(scale);
        overflows.iter().for_each(|&o| statistics.record(o, scale));
        statistics
    }

    #[test]
    fn before_the_first_step_nothing_is_skipped_and_nothing_wrong() {
        let statistics = ScalerStatistics::new(65536.0);
        assert_eq!(statistics.overflow_rate(), 0.0);
        assert_eq!(statistics.last_overflow_step(), None);
        assert_eq!(
            statistics.collapse_warning(&CollapseThresholds::default()),
            None
        );
        let start = ScaleChange {
            step: 0,
            scale: 65536.0,
        };
        assert_eq!(statistics.scale_changes().collect::<Vec<_>>(), [start]);
    }

    #[test]
    fn a_long_history_forgets_its_beginning_and_nothing_else() {
        let mut statistics = ScalerStatistics::new(1.0);
        (0..1000).for_each(|k| statistics.record(false, f64::from(k) + 2.0));
        assert_eq!(statistics.scale_changes().len(), CHANGES_KEPT);
        assert_eq!(
            statistics.scale_changes().last().map(|c| c.step),
            Some(1000)
        );
        assert_eq!(
            (statistics.min_scale(), statistics.max_scale()),
            (1.0, 1001.0)
        );
    }

    #[test]
    fn a_scale_below_one_is_a_collapse_and_the_message_names_the_remedies() {
        let mut statistics = ScalerStatistics::new(65536.0);
        let thresholds = CollapseThresholds::default();
        let mut scale = 65536.0;
        for _ in 0..16 {
            scale *= 0.5;
            statistics.record(true, scale);
            assert_eq!(
                statistics.collapse_warning(&thresholds),
                None,
                "scale {scale}"
            );
        }
        statistics.record(true, 0.5);
        let warning = statistics.collapse_warning(&thresholds).expect("below 1");
        assert_eq!(
            (warning.kind, warning.step),
            (CollapseKind::ScaleTooLow, 17)
        );
        let text = warning.to_string();
        assert!(
            text.starts_with("the loss scale fell to 0.5 at step 17 (17 steps skipped in a row):"),
            "{text}"
        );
        for remedy in ["learning rate", "bf16", "loss itself is not NaN"] {
            assert!(text.contains(remedy), "{text}");
        }
    }

    #[test]
    fn many_skips_in_a_row_are_a_collapse_at_any_scale() {
        let thresholds = CollapseThresholds::default();
        assert_eq!(after(&[true; 19], 1e9).collapse_warning(&thresholds), None);
        let warning = after(&[true; 20], 1e9)
            .collapse_warning(&thresholds)
            .expect("20 in a row");
        assert_eq!(warning.kind, CollapseKind::ConsecutiveSkips);
        assert!(
            warning
                .to_string()
                .starts_with("20 steps were skipped in a row up to step 20")
        );
    }

    #[test]
    fn skipping_every_fourth_step_is_a_collapse_once_the_window_is_full() {
        let thresholds = CollapseThresholds::default();
        let every_fourth: Vec<bool> = (1..=WINDOW).map(|step| step % 4 == 0).collect();
        assert_eq!(
            after(&every_fourth[1..], 64.0).collapse_warning(&thresholds),
            None
        );
        let warning = after(&every_fourth, 64.0)
            .collapse_warning(&thresholds)
            .expect("25%");
        assert_eq!(warning.kind, CollapseKind::FrequentSkips);
        assert!(
            warning.to_string().starts_with("25% of the last 200 steps"),
            "{warning}"
        );
    }

    #[test]
    fn a_run_that_recovers_is_no_longer_in_trouble() {
        let mut statistics = after(&[true; 20], 64.0);
        statistics.record(false, 64.0);
        assert_eq!(
            statistics.collapse_warning(&CollapseThresholds::default()),
            None
        );
        assert_eq!(statistics.longest_skip_run(), 20);
    }

    proptest! {
        #[test]
        fn the_counts_are_those_of_the_sequence(overflows in prop::collection::vec(any::<bool>(), 0..600)) {
            let statistics = after(&overflows, 2.0);
            let skipped = overflows.iter().filter(|&&o| o).count();
            prop_assert_eq!(statistics.skipped(), skipped as u64);
            let run = overflows.iter().rev().take_while(|&&o| o).count();
            prop_assert_eq!(statistics.consecutive_skips(), run as u64);
            let last = overflows.iter().rposition(|&o| o).map(|index| index as u64 + 1);
            prop_assert_eq!(statistics.last_overflow_step(), last);
            let tail = &overflows[overflows.len().saturating_sub(WINDOW)..];
            let rate = tail.iter().filter(|&&o| o).count() as f64 / tail.len().max(1) as f64;
            prop_assert_eq!(statistics.overflow_rate(), rate);
        }
    }
}
