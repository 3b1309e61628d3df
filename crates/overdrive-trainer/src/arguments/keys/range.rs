//! Ranges of numeric keys.

use serde_json::Value;

use super::{at, plain, rows};
use crate::Result;

/// The range of a numeric key.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Range {
    Any,
    /// Above 0.
    Positive,
    /// At least 0.
    NotNegative,
    /// At least 0 and below 1.
    BelowOne,
    /// Above 0 and below 1.
    Between,
    /// From 0 to 1.
    Fraction,
    /// At least this integer, and at most 2^31 - 1, as sizes in libtorch are.
    AtLeast(u32),
    /// At most this integer.
    AtMost(u32),
    /// A time in seconds above 0, and at most 10^9: clocks can be advanced by it.
    Seconds,
    /// An integer number of steps from 1, or a fraction of the run below 1.
    Steps,
    /// As `Steps`, or 0 for none.
    StepsOrZero,
}

impl Range {
    /// Returns the allowed values if `number` is not among them, to complete "it must be".
    fn violation(self, number: f64) -> Option<String> {
        let unless = |allowed: bool, expected: &str| (!allowed).then(|| expected.to_owned());
        match self {
            Self::Any => None,
            Self::Positive => unless(number > 0.0, "positive"),
            Self::NotNegative => unless(number >= 0.0, "0 or positive"),
            Self::BelowOne => unless((0.0..1.0).contains(&number), "at least 0 and below 1"),
            Self::Between => unless(number > 0.0 && number < 1.0, "above 0 and below 1"),
            Self::Fraction => unless((0.0..=1.0).contains(&number), "a fraction from 0 to 1"),
            Self::AtMost(most) => unless(number <= f64::from(most), &format!("at most {most}")),
            Self::AtLeast(_) if number > f64::from(i32::MAX) => {
                Some(format!("at most {}", i32::MAX))
            }
            Self::AtLeast(least) => {
                unless(number >= f64::from(least), &format!("at least {least}"))
            }
            Self::Seconds => unless(
                number > 0.0 && number <= 1e9,
                "positive, and at most 1000000000 seconds (31 years)",
            ),
            Self::StepsOrZero if number == 0.0 => None,
            Self::Steps | Self::StepsOrZero if number >= 1.0 => unless(
                number.fract() == 0.0,
                "a whole number of steps, or a fraction of the run below 1",
            ),
            Self::Steps | Self::StepsOrZero => Self::Positive.violation(number),
        }
    }
}

/// Checks each number of a configuration against the range of its key. `defaults` distinguishes a key that is
/// not set from NaN and infinities, which JSON also writes as `null`.
///
/// # Errors
/// [`overdrive_core::Error::InvalidOption`].
pub(crate) fn check_ranges(values: &Value, defaults: &Value) -> Result<()> {
    for (_, key) in rows().filter(|(_, key)| key.range != Range::Any) {
        let value = at(values, key.name);
        let violation = match value.as_f64() {
            Some(number) => key.range.violation(number),
            None if value.is_null() && at(defaults, key.name).is_number() => {
                key.range.violation(f64::NAN)
            }
            None => None,
        };
        if let Some(expected) = violation {
            let given = if value.is_null() {
                "not a finite number".to_owned()
            } else {
                plain(value)
            };
            let expected = match key.instead {
                "" => expected,
                remedy => format!("{expected}; {remedy}"),
            };
            return Err(overdrive_core::Error::option(key.name, given, expected).into());
        }
    }
    Ok(())
}
