//! Filters of numbers.

use crate::args::{Args, bool_or, int, int_or, text_or};
use crate::error::{Error, ErrorKind, Result};
use crate::number::{int_to_float, parse_float, parse_int, round_float, round_int};
use crate::operators;
use crate::value::Value;

/// Implements the filter `int(value, default=0, base=10)`, which falls back to `int(float(value))`.
pub(super) fn to_int(value: &Value, args: Args) -> Result<Value> {
    let [default, base] = args.bind("int", ["default", "base"], 0)?;
    let default = default.unwrap_or(Value::Int(0));
    let converted = match value {
        Value::Str(text) => parse_int(&text.text, int_or(base, 10)?),
        other => operators::truncated(other),
    };
    let failed = match converted {
        Ok(number) => return Ok(Value::Int(number)),
        Err(error) => error,
    };
    match (value, failed.kind) {
        (_, ErrorKind::Type | ErrorKind::Value) => {}
        _ => return Err(failed),
    }
    let float = match value {
        Value::Str(text) => parse_float(&text.text),
        Value::Float(float) => Ok(*float),
        _ => return Ok(default),
    };
    match float.and_then(crate::number::float_to_int) {
        Ok(number) => Ok(Value::Int(number)),
        // Python could hold this integer, so the default would be wrong.
        Err(error) if error.kind == ErrorKind::Overflow && !is_infinite(value) => Err(error),
        Err(_) => Ok(default),
    }
}

pub(super) fn is_infinite(value: &Value) -> bool {
    match value {
        Value::Str(text) => parse_float(&text.text).is_ok_and(f64::is_infinite),
        Value::Float(float) => float.is_infinite(),
        _ => false,
    }
}

pub(super) fn to_float(value: &Value, args: Args) -> Result<Value> {
    let [default] = args.bind("float", ["default"], 0)?;
    value.check_defined()?;
    let float = match value {
        Value::Str(text) => parse_float(&text.text).ok(),
        Value::Float(float) => Some(*float),
        other => other.as_int().map(int_to_float),
    };
    Ok(match float {
        Some(float) => Value::Float(float),
        None => default.unwrap_or(Value::Float(0.0)),
    })
}

pub(super) fn round(value: &Value, args: Args) -> Result<Value> {
    let [precision, method] = args.bind("round", ["precision", "method"], 0)?;
    let method = text_or(method, "common")?;
    let precision = precision.unwrap_or(Value::Int(0));
    let no_number = || {
        Error::type_error(format!(
            "type {} doesn't define __round__ method",
            value.type_name()
        ))
    };
    match &*method {
        "common" => {
            // Python's `round(number, None)` returns an integer.
            let digits = match &precision {
                Value::None => None,
                precision => Some(int(precision)?),
            };
            match (value, value.as_int()) {
                (_, Some(number)) => round_int(number, digits.unwrap_or(0)).map(Value::Int),
                (Value::Float(number), _) => match digits {
                    Some(digits) => Ok(Value::Float(round_float(*number, digits))),
                    None => crate::number::float_to_int(number.round_ties_even()).map(Value::Int),
                },
                _ => Err(no_number()),
            }
        }
        "ceil" | "floor" => {
            value.check_defined()?;
            let scale = power_of_ten(int(&precision)?)?;
            let scaled = match (value, value.as_int(), &scale) {
                (_, Some(number), Value::Int(scale)) => Value::Int(
                    number
                        .checked_mul(*scale)
                        .ok_or_else(crate::number::too_large)?,
                ),
                (_, Some(number), Value::Float(scale)) => {
                    Value::Float(int_to_float(number) * scale)
                }
                (Value::Float(number), _, Value::Int(scale)) => {
                    Value::Float(number * int_to_float(*scale))
                }
                (Value::Float(number), _, Value::Float(scale)) => Value::Float(number * scale),
                _ => return Err(no_number()),
            };
            let whole = match scaled {
                Value::Float(number) if &*method == "ceil" => {
                    crate::number::float_to_int(number.ceil())?
                }
                Value::Float(number) => crate::number::float_to_int(number.floor())?,
                other => int(&other)?,
            };
            let scale = match scale {
                Value::Int(scale) => int_to_float(scale),
                Value::Float(scale) => scale,
                _ => 1.0,
            };
            Ok(Value::Float(int_to_float(whole) / scale))
        }
        _ => Err(Error::runtime("method must be common, ceil or floor")),
    }
}

/// Returns Python's `10 ** precision`: an integer, or a float for negative ones.
pub(super) fn power_of_ten(precision: i128) -> Result<Value> {
    match u32::try_from(precision) {
        Ok(power) => 10i128
            .checked_pow(power)
            .map(Value::Int)
            .ok_or_else(crate::number::too_large),
        Err(_) => Ok(Value::Float(
            10f64.powi(i32::try_from(precision).unwrap_or(i32::MIN)),
        )),
    }
}

pub(super) fn file_size(value: &Value, args: Args) -> Result<Value> {
    let [binary] = args.bind("filesizeformat", ["binary"], 0)?;
    let binary = bool_or(binary, false);
    value.check_defined()?;
    let bytes = match value {
        Value::Str(text) => parse_float(&text.text)?,
        Value::Float(float) => *float,
        other => other
            .as_int()
            .map(int_to_float)
            .ok_or_else(|| Error::type_error("a size must be a number, or the string of one"))?,
    };
    let base: f64 = if binary { 1024.0 } else { 1000.0 };
    if bytes == 1.0 {
        return Ok(Value::from("1 Byte"));
    }
    if bytes < base {
        let whole = crate::number::float_to_int(bytes)?;
        return Ok(Value::from(format!("{whole} Bytes")));
    }
    let letters = if binary { "KMGTPEZY" } else { "kMGTPEZY" };
    let suffix = if binary { "iB" } else { "B" };
    let mut unit = base;
    for (number, letter) in letters.chars().enumerate() {
        unit *= base;
        if bytes < unit || number == 7 {
            return Ok(Value::from(format!(
                "{:.1} {letter}{suffix}",
                base * bytes / unit
            )));
        }
    }
    Ok(Value::None)
}
