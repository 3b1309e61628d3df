//! The result of a check.

use serde::{Deserialize, Serialize};

/// The detail of a check that was skipped because no time was left.
pub(crate) const NO_TIME: &str = "no time left";

/// The outcome of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Outcome {
    /// The result is right, or the figure was measured.
    Passed,
    /// The result is wrong, the work failed, or the work did not end in time.
    Failed,
    /// The work did not run; the detail says why.
    Skipped,
}

/// A measured value.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Figure {
    /// The name with the unit, such as `tokens/s`.
    pub(crate) name: String,
    /// The value; `None` if it is not finite.
    pub(crate) value: Option<f64>,
}

/// The result of a check: its outcome, a remark and figures.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Finding {
    /// The outcome.
    pub(crate) outcome: Outcome,
    /// `true` for a skip that is not a failure if a GPU is required.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub(crate) allowed: bool,
    /// A remark, or the reason of a failure or a skip.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub(crate) detail: String,
    /// The figures.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub(crate) figures: Vec<Figure>,
}

impl Finding {
    fn new(outcome: Outcome, detail: impl Into<String>) -> Self {
        Self {
            outcome,
            allowed: false,
            detail: detail.into(),
            figures: Vec::new(),
        }
    }

    /// Returns a finding that passed.
    pub(crate) fn passed() -> Self {
        Self::new(Outcome::Passed, "")
    }

    /// Returns a finding that failed for `reason`.
    pub(crate) fn failed(reason: impl Into<String>) -> Self {
        Self::new(Outcome::Failed, reason)
    }

    /// Returns a skip, which counts as a failure if a GPU is required.
    pub(crate) fn skipped(reason: impl Into<String>) -> Self {
        Self::new(Outcome::Skipped, reason)
    }

    /// Returns a skip that is not a failure even if a GPU is required: the machine lacks a second GPU or a Python
    /// package to compare with.
    pub(crate) fn skipped_allowed(reason: impl Into<String>) -> Self {
        Self {
            allowed: true,
            ..Self::new(Outcome::Skipped, reason)
        }
    }

    /// Returns a finding that passed if `right`, and otherwise failed for `reason`.
    pub(crate) fn judged(right: bool, reason: impl Into<String>) -> Self {
        if right {
            Self::passed()
        } else {
            Self::failed(reason)
        }
    }

    /// Returns a finding that passed if the distance `far` from the reference is at most `allowed`.
    pub(crate) fn within(far: f64, allowed: f64, reason: &str) -> Self {
        Self::judged(far <= allowed, reason)
            .with("output error", far)
            .with("tolerance", allowed)
    }

    /// Adds a figure.
    #[must_use]
    pub(crate) fn with(mut self, name: &str, value: f64) -> Self {
        self.figures.push(Figure {
            name: name.to_owned(),
            value: value.is_finite().then_some(value),
        });
        self
    }

    /// Adds a remark.
    #[must_use]
    pub(crate) fn noting(mut self, remark: impl AsRef<str>) -> Self {
        let remark = remark.as_ref();
        if !remark.is_empty() {
            let separator = if self.detail.is_empty() { "" } else { "; " };
            self.detail = format!("{}{separator}{remark}", self.detail);
        }
        self
    }

    /// Returns the check with this finding.
    pub(crate) fn into_check(self, name: String, seconds: f64) -> Check {
        Check {
            name,
            finding: self,
            seconds,
        }
    }
}

/// A check and its result, as in the report.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub(crate) struct Check {
    /// The name, unique in its section.
    pub(crate) name: String,
    #[serde(flatten)]
    pub(crate) finding: Finding,
    /// The time of the check in seconds.
    pub(crate) seconds: f64,
}

impl Check {
    /// Returns the check as a failure if it is a skip that a required GPU does not allow.
    #[must_use]
    pub(crate) fn required(mut self) -> Self {
        let found = &mut self.finding;
        if found.outcome == Outcome::Skipped && !found.allowed {
            found.outcome = Outcome::Failed;
            found.detail = format!("skipped, although a GPU is required: {}", found.detail);
        }
        self
    }
}
