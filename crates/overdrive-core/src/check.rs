//! Checks of options.

use std::borrow::Cow;
use std::fmt::Display;

use crate::{Error, Result};

/// Checks that `valid` holds for an option.
///
/// # Errors
/// [`Error::InvalidOption`] with the option's name, its value and `expected`, which completes the sentence "it must
/// be …".
///
/// ```
/// use overdrive_core::check_option;
/// # fn main() -> overdrive_core::Result<()> {
/// let norm = 1.0;
/// check_option(norm >= 0.0, "max_grad_norm", norm, "0 (no clipping) or positive")?;
/// # Ok(())
/// # }
/// ```
pub fn check_option(
    valid: bool,
    option: impl Into<Cow<'static, str>>,
    value: impl Display,
    expected: impl Into<Cow<'static, str>>,
) -> Result<()> {
    if valid {
        Ok(())
    } else {
        Err(Error::option(option, value, expected))
    }
}

/// Checks that an option is above zero. NaN and infinity are not.
///
/// # Errors
/// [`Error::InvalidOption`].
pub fn check_positive<T: Number>(option: impl Into<Cow<'static, str>>, value: T) -> Result<()> {
    check_option(
        value.is_finite() && value > T::ZERO,
        option,
        value,
        "positive",
    )
}

/// Checks that an option is zero or above. NaN and infinity are not.
///
/// # Errors
/// [`Error::InvalidOption`].
pub fn check_non_negative<T: Number>(option: impl Into<Cow<'static, str>>, value: T) -> Result<()> {
    let valid = value.is_finite() && value >= T::ZERO;
    check_option(valid, option, value, "0 or positive")
}

/// Checks that an option is at least `least`. NaN and infinity are not.
///
/// # Errors
/// [`Error::InvalidOption`].
pub fn check_at_least<T: Number>(
    option: impl Into<Cow<'static, str>>,
    value: T,
    least: T,
) -> Result<()> {
    let valid = value.is_finite() && value >= least;
    check_option(valid, option, value, format!("at least {least}"))
}

/// Checks that an option is in `[0, 1)`, as a dropout probability or the beta of an average.
///
/// # Errors
/// [`Error::InvalidOption`].
pub fn check_fraction(option: impl Into<Cow<'static, str>>, value: f64) -> Result<()> {
    let valid = (0.0..1.0).contains(&value);
    check_option(valid, option, value, "at least 0 and below 1")
}

/// The numbers that the checks take.
pub trait Number: Copy + PartialOrd + Display {
    /// Zero.
    const ZERO: Self;
    /// Returns `false` for NaN and infinities.
    fn is_finite(self) -> bool;
}

macro_rules! integers {
    ($($type:ty),*) => {$(
        impl Number for $type {
            const ZERO: Self = 0;
            fn is_finite(self) -> bool {
                true
            }
        }
    )*};
}
integers!(i32, i64, u32, u64, usize);

macro_rules! floats {
    ($($type:ty),*) => {$(
        impl Number for $type {
            const ZERO: Self = 0.0;
            fn is_finite(self) -> bool {
                <$type>::is_finite(self)
            }
        }
    )*};
}
floats!(f32, f64);

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bounds_are_exact_and_nan_passes_no_check() {
        assert!(check_positive("x", 1e-300).is_ok());
        assert!(check_positive("x", 0).is_err());
        assert!(check_non_negative("x", 0.0).is_ok());
        assert!(check_non_negative("x", -1i64).is_err());
        assert!(check_at_least("x", 2usize, 2).is_ok());
        assert!(check_at_least("x", 1usize, 2).is_err());
        assert!(check_fraction("x", 0.0).is_ok());
        for out in [1.0, -0.1, f64::NAN, f64::INFINITY] {
            assert!(check_fraction("x", out).is_err());
        }
        for bad in [f64::NAN, f64::INFINITY] {
            assert!(check_positive("x", bad).is_err());
            assert!(check_non_negative("x", bad).is_err());
            assert!(check_at_least("x", bad, 0.0).is_err());
        }
    }
}
