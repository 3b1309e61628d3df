//! Numbers as Python reads, rounds and prints them.

use std::cmp::Ordering;

use crate::error::{Error, ErrorKind, Result};
use crate::unicode::{decimal_value, is_space};

/// Returns Python's `repr` of a float.
pub(crate) fn float_repr(number: f64) -> String {
    if number.is_nan() {
        return "nan".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 { "inf" } else { "-inf" }.to_owned();
    }
    // Rust and Python both write the shortest digits that read back, and switch to exponents at the
    // same magnitudes; only the exponents look different.
    let text = format!("{number:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => {
            let digits = digits.strip_suffix(".0").unwrap_or(digits);
            format!("{digits}e{}", python_exponent(exponent))
        }
    }
}

/// Returns an exponent with its sign and at least two digits.
pub(crate) fn python_exponent(exponent: &str) -> String {
    match exponent.strip_prefix('-') {
        Some(digits) => format!("-{digits:0>2}"),
        None => format!("+{exponent:0>2}"),
    }
}

/// Returns the order of an integer and a float, without rounding the integer; `None` for a NaN.
pub(crate) fn compare_int_float(int: i128, float: f64) -> Option<Ordering> {
    if float.is_nan() {
        return None;
    }
    // Casts saturate, and 2^127 is exact as a float.
    if float >= 1.701_411_834_604_692_3e38 {
        return Some(Ordering::Less);
    }
    if float < -1.701_411_834_604_692_3e38 {
        return Some(Ordering::Greater);
    }
    let whole = float.trunc() as i128;
    Some(int.cmp(&whole).then_with(|| {
        let fraction = float.fract();
        0.0.partial_cmp(&fraction).unwrap_or(Ordering::Equal)
    }))
}

/// Returns Python's `int(number)`, which rounds towards zero.
pub(crate) fn float_to_int(number: f64) -> Result<i128> {
    if number.is_nan() {
        return Err(Error::value("cannot convert float NaN to integer"));
    }
    if number.abs() >= 1.701_411_834_604_692_3e38 {
        return Err(Error::new(
            ErrorKind::Overflow,
            format!("cannot convert {number} to an integer of 128 bits"),
        ));
    }
    Ok(number as i128)
}

/// Returns an integer as a float.
pub(crate) fn int_to_float(number: i128) -> f64 {
    number as f64
}

/// Reads an integer as Python's `int(text, base)`.
pub(crate) fn parse_int(text: &str, base: i128) -> Result<i128> {
    let invalid = || {
        Error::value(format!(
            "invalid literal for int() with base {base}: {text:?}"
        ))
    };
    if base != 0 && !(2..=36).contains(&base) {
        let detail = "int() base must be >= 2 and <= 36, or 0";
        return Err(Error::value(detail));
    }
    let trimmed = text.trim_matches(is_space);
    let (negative, digits) = match trimmed.strip_prefix(['+', '-']) {
        Some(digits) => (trimmed.starts_with('-'), digits),
        None => (false, trimmed),
    };
    let prefix = digits.get(..2).unwrap_or_default().to_ascii_lowercase();
    let prefixed = match prefix.as_str() {
        "0b" => 2,
        "0o" => 8,
        "0x" => 16,
        _ => 0,
    };
    let (radix, digits) = match (base, prefixed) {
        (0, 0) => (10, digits),
        (0, radix) => (radix, digits[2..].strip_prefix('_').unwrap_or(&digits[2..])),
        (base, radix) if radix != 0 && base == i128::from(radix) => {
            (radix, digits[2..].strip_prefix('_').unwrap_or(&digits[2..]))
        }
        (base, _) => (u32::try_from(base).unwrap_or(10), digits),
    };
    if base == 0 && prefixed == 0 && digits.starts_with('0') {
        // Python refuses a leading zero, which meant an octal number in Python 2.
        let zeros = digits.chars().all(|c| c == '0' || c == '_');
        if !zeros {
            return Err(invalid());
        }
    }
    let (mut value, mut previous_is_digit) = (0i128, false);
    let mut any = false;
    for letter in digits.chars() {
        if letter == '_' && previous_is_digit {
            previous_is_digit = false;
            continue;
        }
        let digit = letter
            .to_digit(radix)
            .or_else(|| decimal_value(letter).filter(|digit| *digit < radix))
            .ok_or_else(invalid)?;
        value = value
            .checked_mul(i128::from(radix))
            .and_then(|value| value.checked_add(i128::from(digit)))
            .ok_or_else(too_large)?;
        (previous_is_digit, any) = (true, true);
    }
    match any && previous_is_digit {
        true => Ok(if negative { -value } else { value }),
        false => Err(invalid()),
    }
}

/// Reads a float as Python's `float(text)`.
pub(crate) fn parse_float(text: &str) -> Result<f64> {
    let invalid = || Error::value(format!("could not convert string to float: {text:?}"));
    let trimmed = text.trim_matches(is_space);
    let mut plain = String::with_capacity(trimmed.len());
    let mut previous = ' ';
    let mut letters = trimmed.chars().peekable();
    while let Some(letter) = letters.next() {
        if letter == '_' {
            // Underscores stand between digits.
            let next_is_digit = letters.peek().is_some_and(char::is_ascii_digit);
            if !previous.is_ascii_digit() || !next_is_digit {
                return Err(invalid());
            }
        } else if letter.is_ascii() {
            plain.push(letter);
        } else {
            let digit = decimal_value(letter).ok_or_else(invalid)?;
            plain.extend(char::from_digit(digit, 10));
        }
        previous = letter;
    }
    plain.parse().map_err(|_| invalid())
}

pub(crate) fn too_large() -> Error {
    Error::new(
        ErrorKind::Overflow,
        "an integer has more than 128 bits, the limit of a chat template",
    )
}

/// Rounds a float as Python's `round(number, digits)`.
pub(crate) fn round_float(number: f64, digits: i128) -> f64 {
    if !number.is_finite() || digits > 323 {
        return number;
    }
    if let Ok(places) = usize::try_from(digits) {
        // The decimal expansion of a float is exact, and ties go to the even digit.
        return format!("{number:.places$}").parse().unwrap_or(number);
    }
    if digits < -308 {
        return 0.0 * number;
    }
    let scale = 10f64.powi(i32::try_from(-digits).unwrap_or(i32::MAX));
    (number / scale).round_ties_even() * scale
}

/// Rounds an integer as Python's `round(number, digits)`: only negative digits change it.
pub(crate) fn round_int(number: i128, digits: i128) -> Result<i128> {
    if digits >= 0 {
        return Ok(number);
    }
    let scale = u32::try_from(digits.unsigned_abs())
        .ok()
        .and_then(|power| 10i128.checked_pow(power));
    let Some(scale) = scale else {
        return Ok(0);
    };
    let below = number.div_euclid(scale);
    let rest = number.rem_euclid(scale);
    let up = match rest.cmp(&(scale - rest)) {
        Ordering::Less => false,
        Ordering::Greater => true,
        Ordering::Equal => below % 2 != 0,
    };
    (below + i128::from(up))
        .checked_mul(scale)
        .ok_or_else(too_large)
}
