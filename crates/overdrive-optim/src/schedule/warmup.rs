//! How long the warm-up is.

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The length of a warm-up as steps or as a fraction of the run; steps win.
///
/// As in transformers: `warmup_steps` of 1 or more is a count, a value between 0 and 1 is a
/// fraction (transformers 5), and with 0 `warmup_ratio` decides (transformers 4). Fractions of a
/// step are rounded up.
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
    /// Steps, or a fraction of the total if below 1. Default 0.
    pub warmup_steps: f64,
    /// Fraction of the total in [0, 1], used if `warmup_steps` is 0. Default 0.
    pub warmup_ratio: f64,
}

impl Warmup {
    /// A warm-up of so many steps.
    #[must_use]
    pub fn steps(steps: u32) -> Self {
        Self {
            warmup_steps: f64::from(steps),
            warmup_ratio: 0.0,
        }
    }

    /// A warm-up of this fraction of the run.
    #[must_use]
    pub fn ratio(ratio: f64) -> Self {
        Self {
            warmup_steps: 0.0,
            warmup_ratio: ratio,
        }
    }

    /// The warm-up steps of a run of `total_steps`.
    ///
    /// # Errors
    /// [`Error::InvalidOption`] if a value is outside its range.
    pub fn resolve(self, total_steps: u64) -> Result<u64> {
        let Self {
            warmup_steps,
            warmup_ratio,
        } = self;
        if !(warmup_steps >= 0.0 && warmup_steps.is_finite()) {
            return Err(Error::InvalidOption {
                option: "warmup_steps",
                value: warmup_steps.to_string(),
                expected: "a number of steps from 0, or a fraction of the run below 1",
            });
        }
        if !(0.0..=1.0).contains(&warmup_ratio) {
            return Err(Error::InvalidOption {
                option: "warmup_ratio",
                value: warmup_ratio.to_string(),
                expected: "a fraction of the run, from 0 to 1",
            });
        }
        let part = |fraction: f64| (total_steps as f64 * fraction).ceil() as u64;
        Ok(match warmup_steps {
            steps if steps >= 1.0 => steps as u64,
            fraction if fraction > 0.0 => part(fraction),
            _ => part(warmup_ratio),
        })
    }
}
