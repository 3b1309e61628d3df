//! What a gradient scaler went through, and when to worry.

use std::collections::VecDeque;
use std::fmt;

use serde::{Deserialize, Serialize};

/// Steps that [`ScalerStatistics::overflow_rate`] looks back on.
const WINDOW: usize = 200;

/// Changes of the scale that [`ScalerStatistics::scale_changes`] keeps.
const CHANGES_KEPT: usize = 256;

/// The loss scale from a step on.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct ScaleChange {
    /// The step after which the scale was this, counted from 1; 0 for the scale at the start.
    pub step: u64,
    /// The scale.
    pub scale: f64,
}

/// The overflows of a run, counted by [`GradScaler`](crate::GradScaler).
///
/// A step counts as skipped when any gradient held an infinity or a NaN: an optimizer that was given
/// such a gradient left its parameters alone.
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
    /// No step yet, at this scale.
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

    /// Counts a step: whether a gradient overflowed, and the scale after it.
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

    /// Notes a scale that did not come from a step: a loaded state.
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

    /// Steps counted: updates of the scaler.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// Steps in which a gradient overflowed.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Steps skipped in a row up to the last counted one.
    pub fn consecutive_skips(&self) -> u64 {
        self.consecutive_skips
    }

    /// The most steps that were ever skipped in a row.
    pub fn longest_skip_run(&self) -> u64 {
        self.longest_skip_run
    }

    /// The last step that was skipped, counted from 1.
    pub fn last_overflow_step(&self) -> Option<u64> {
        self.last_overflow_step
    }

    /// The scale after the last counted step.
    pub fn scale(&self) -> f64 {
        self.scale
    }

    /// The lowest scale so far.
    pub fn min_scale(&self) -> f64 {
        self.min_scale
    }

    /// The highest scale so far.
    pub fn max_scale(&self) -> f64 {
        self.max_scale
    }

    /// The scale at the start and after each step that changed it, oldest first; of more than 256
    /// the last ones.
    pub fn scale_changes(&self) -> impl ExactSizeIterator<Item = ScaleChange> + '_ {
        self.changes.iter().copied()
    }

    /// The part of the last 200 steps (of all, while there are fewer) that was skipped, 0 to 1. A
    /// sound run with the default configuration has about 0.0005: one in `growth_interval`.
    pub fn overflow_rate(&self) -> f64 {
        if self.window.is_empty() {
            return 0.0;
        }
        let skipped = self.window.iter().filter(|&&skipped| skipped).count();
        skipped as f64 / self.window.len() as f64
    }

    /// What is wrong by these thresholds, or `None`.
    pub fn trouble(&self, thresholds: &CollapseThresholds) -> Option<ScaleWarning> {
        let kind = if self.scale < thresholds.min_scale {
            ScaleTrouble::ScaleTooLow
        } else if self.consecutive_skips >= thresholds.consecutive_skips {
            ScaleTrouble::SkippingOnAndOn
        } else if self.window.len() == WINDOW && self.overflow_rate() >= thresholds.overflow_rate {
            ScaleTrouble::SkippingOften
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

/// From where on the loss scale counts as collapsed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CollapseThresholds {
    /// A scale below this: 1. There, scaling no longer helps small gradients, it hurts them.
    pub min_scale: f64,
    /// This many steps skipped in a row: 20. From 65536 the default scaler reaches 1 in 16.
    pub consecutive_skips: u64,
    /// This part of the last 200 steps skipped, 0 to 1: 0.2.
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

/// What is wrong with a loss scale.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ScaleTrouble {
    /// It fell below [`CollapseThresholds::min_scale`].
    ScaleTooLow,
    /// Step after step is skipped.
    SkippingOnAndOn,
    /// A large part of the steps is skipped.
    SkippingOften,
}

/// A loss scale that collapsed; [`Display`](fmt::Display) says so in a sentence, with the remedy.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ScaleWarning {
    /// What is wrong.
    pub kind: ScaleTrouble,
    /// After which step, counted from 1.
    pub step: u64,
    /// The scale then.
    pub scale: f64,
    /// Steps skipped in a row then.
    pub consecutive_skips: u64,
    /// The part of the last 200 steps that was skipped then, 0 to 1.
    pub overflow_rate: f64,
}

impl fmt::Display for ScaleWarning {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (step, scale, row) = (self.step, self.scale, self.consecutive_skips);
        match self.kind {
            ScaleTrouble::ScaleTooLow => write!(
                f,
                "the loss scale fell to {scale} at step {step} ({row} steps skipped in a row)"
            )?,
            ScaleTrouble::SkippingOnAndOn => write!(
                f,
                "{row} steps were skipped in a row up to step {step} (loss scale {scale})"
            )?,
            ScaleTrouble::SkippingOften => write!(
                f,
                "{:.0}% of the last {WINDOW} steps up to step {step} were skipped (loss scale {scale})",
                100.0 * self.overflow_rate
            )?,
        }
        f.write_str(
            ": fp16 gradients overflow again and again. Look whether the loss itself is NaN or \
             infinite; lower the learning rate or warm up longer; train in bf16 where the device has \
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
    fn skips_are_counted_in_all_in_a_row_and_by_the_last_step() {
        let statistics = after(&[false, true, true, true, false, true], 8.0);
        assert_eq!((statistics.steps(), statistics.skipped()), (6, 4));
        assert_eq!(statistics.consecutive_skips(), 1);
        assert_eq!(statistics.longest_skip_run(), 3);
        assert_eq!(statistics.last_overflow_step(), Some(6));
        assert_eq!(statistics.overflow_rate(), 4.0 / 6.0);
    }

    #[test]
    fn before_the_first_step_nothing_is_skipped_and_nothing_wrong() {
        let statistics = ScalerStatistics::new(65536.0);
        assert_eq!(statistics.overflow_rate(), 0.0);
        assert_eq!(statistics.last_overflow_step(), None);
        assert_eq!(statistics.trouble(&CollapseThresholds::default()), None);
        let start = ScaleChange {
            step: 0,
            scale: 65536.0,
        };
        assert_eq!(statistics.scale_changes().collect::<Vec<_>>(), [start]);
    }

    #[test]
    fn the_history_holds_each_change_of_the_scale_with_its_step() {
        let mut statistics = ScalerStatistics::new(8.0);
        for (overflowed, scale) in [(false, 8.0), (true, 4.0), (false, 4.0), (false, 16.0)] {
            statistics.record(overflowed, scale);
        }
        let changes: Vec<_> = statistics
            .scale_changes()
            .map(|c| (c.step, c.scale))
            .collect();
        assert_eq!(changes, [(0, 8.0), (2, 4.0), (4, 16.0)]);
        assert_eq!(
            (statistics.min_scale(), statistics.max_scale()),
            (4.0, 16.0)
        );
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
        assert_eq!(statistics.min_scale(), 1.0);
    }

    #[test]
    fn a_scale_below_one_is_a_collapse_and_the_message_names_the_remedies() {
        let mut statistics = ScalerStatistics::new(65536.0);
        let thresholds = CollapseThresholds::default();
        let mut scale = 65536.0;
        for _ in 0..16 {
            scale *= 0.5;
            statistics.record(true, scale);
            assert_eq!(statistics.trouble(&thresholds), None, "scale {scale}");
        }
        statistics.record(true, 0.5);
        let warning = statistics.trouble(&thresholds).expect("below 1");
        assert_eq!(
            (warning.kind, warning.step),
            (ScaleTrouble::ScaleTooLow, 17)
        );
        let text = warning.to_string();
        assert!(
            text.starts_with("the loss scale fell to 0.5 at step 17 (17 steps skipped in a row):"),
            "{text}"
        );
        for remedy in ["learning rate", "bf16", "loss itself is NaN"] {
            assert!(text.contains(remedy), "{text}");
        }
    }

    #[test]
    fn many_skips_in_a_row_are_a_collapse_at_any_scale() {
        let thresholds = CollapseThresholds::default();
        assert_eq!(after(&[true; 19], 1e9).trouble(&thresholds), None);
        let warning = after(&[true; 20], 1e9)
            .trouble(&thresholds)
            .expect("20 in a row");
        assert_eq!(warning.kind, ScaleTrouble::SkippingOnAndOn);
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
        assert_eq!(after(&every_fourth[1..], 64.0).trouble(&thresholds), None);
        let warning = after(&every_fourth, 64.0)
            .trouble(&thresholds)
            .expect("25%");
        assert_eq!(warning.kind, ScaleTrouble::SkippingOften);
        assert!(
            warning.to_string().starts_with("25% of the last 200 steps"),
            "{warning}"
        );
    }

    #[test]
    fn a_run_that_recovers_is_no_longer_in_trouble() {
        let mut statistics = after(&[true; 20], 64.0);
        statistics.record(false, 64.0);
        assert_eq!(statistics.trouble(&CollapseThresholds::default()), None);
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
