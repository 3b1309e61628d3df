//! The length of the warm-up.

use overdrive_core::check_option;
use serde::{Deserialize, Serialize};

use crate::Result;

/// The length of a warm-up in steps or as a fraction of the run; steps take precedence.
///
/// A `warmup_steps` of 1 or more is a number of steps and a value between 0 and 1 a fraction, as in
/// transformers 5; with 0 `warmup_ratio` is used, as in transformers 4. Fractions of a step are
/// rounded up.
///
/// ```
/// use overdrive_optim::Warmup;
///
/// assert_eq!(Warmup { warmup_steps: 0.0, warmup_ratio: 0.03 }.resolve(1001)?, 31);
/// assert_eq!(Warmup { warmup_steps: 20.0, warmup_ratio: 0.03 }.resolve(1001)?, 20);
/// # Ok::<(), overdrive_optim::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct Warmup {
    /// The number of steps, or a fraction of the total if below 1. Default: 0.
    pub warmup_steps: f64,
    /// The fraction of the total in [0, 1], used if `warmup_steps` is 0. Default: 0.
    pub warmup_ratio: f64,
}

impl Warmup {
    /// Returns a warm-up of this number of steps.
    #[must_use]
    pub fn steps(steps: u32) -> Self {
        Self {
            warmup_steps: f64::from(steps),
            warmup_ratio: 0.0,
        }
    }

    /// Returns a warm-up of this fraction of the run.
    #[must_use]
    pub fn ratio(ratio: f64) -> Self {
        Self {
            warmup_steps: 0.0,
            warmup_ratio: ratio,
        }
    }

    /// Returns the number of warm-up steps of a run of `total_steps`.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) if a value is out of its range.
    pub fn resolve(self, total_steps: u64) -> Result<u64> {
        let Self {
            warmup_steps,
            warmup_ratio,
        } = self;
        let valid = warmup_steps >= 0.0 && warmup_steps.is_finite();
        let expected = "0, a number of steps, or a fraction of the run below 1";
        check_option(valid, "warmup_steps", warmup_steps, expected)?;
        let valid = (0.0..=1.0).contains(&warmup_ratio);
        let expected = "a fraction of the run, at least 0 and at most 1";
        check_option(valid, "warmup_ratio", warmup_ratio, expected)?;
        // Rounded up, as transformers' `math.ceil`.
        let fraction_of_total = |fraction: f64| (total_steps as f64 * fraction).ceil() as u64;
        Ok(match warmup_steps {
            steps if steps >= 1.0 => steps as u64,
            fraction if fraction > 0.0 => fraction_of_total(fraction),
            _ => fraction_of_total(warmup_ratio),
        })
    }
}
