//! Ranges of numbers.

use serde_json::Value;

use super::{at, plain, rows};
use crate::{Error, Result};

/// The numbers that a key may have.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Range {
    Any,
    /// Above 0.
    Positive,
    /// From 0.
    NotNegative,
    /// From 0, and below 1.
    BelowOne,
    /// Above 0, and below 1.
    Between,
    /// From 0 to 1.
    Part,
    /// From this whole number.
    AtLeast(u32),
    /// Up to this whole number.
    AtMost(u32),
    /// A whole number of steps from 1, or a part of the run below 1.
    Steps,
    /// The same, or 0 for none.
    StepsOrZero,
}

impl Range {
    /// What is wrong with a number, and the way out.
    fn problem(self, number: f64) -> Option<(String, String)> {
        let numbers = |allowed: bool, range: &str| {
            let way_out = "give such a number, or leave the key out for the default";
            (!allowed).then(|| (format!("it must be {range}"), way_out.to_owned()))
        };
        match self {
            Self::Any => None,
            Self::Positive => numbers(number > 0.0, "a number above 0"),
            Self::NotNegative => numbers(number >= 0.0, "0 or a number above 0"),
            Self::BelowOne => numbers((0.0..1.0).contains(&number), "at least 0 and below 1"),
            Self::Between => numbers(number > 0.0 && number < 1.0, "above 0 and below 1"),
            Self::Part => numbers((0.0..=1.0).contains(&number), "a part, from 0 to 1"),
            Self::AtMost(most) => numbers(number <= f64::from(most), &format!("at most {most}")),
            Self::AtLeast(least) if number < f64::from(least) => Some((
                format!("it must be at least {least}"),
                format!("give {least} or more"),
            )),
            Self::AtLeast(_) => None,
            Self::StepsOrZero if number == 0.0 => None,
            Self::Steps | Self::StepsOrZero if number >= 1.0 && number.fract() != 0.0 => Some((
                "from 1 on it is a number of steps and must be whole".to_owned(),
                "give a whole number, or a part of the run below 1".to_owned(),
            )),
            Self::Steps | Self::StepsOrZero => Self::Positive.problem(number),
        }
    }
}

/// Checks each number of a configuration against the range of its key. `defaults` tells a key that is not
/// set from a number that JSON does not have (NaN and the infinities are written as `null`).
///
/// # Errors
/// [`Error::Invalid`].
pub(crate) fn check_ranges(values: &Value, defaults: &Value) -> Result<()> {
    for (_, key) in rows().filter(|(_, key)| key.range != Range::Any) {
        let value = at(values, key.name);
        let problem = match value.as_f64() {
            Some(number) => key.range.problem(number),
            None if value.is_null() && at(defaults, key.name).is_number() => {
                key.range.problem(f64::NAN)
            }
            None => None,
        };
        if let Some((problem, way_out)) = problem {
            return Err(Error::Invalid {
                key: key.name,
                given: if value.is_null() {
                    "not a finite number".to_owned()
                } else {
                    plain(value)
                },
                problem,
                way_out: if key.instead.is_empty() {
                    way_out
                } else {
                    key.instead.to_owned()
                },
            });
        }
    }
    Ok(())
}
