//! The operators of Python's values.

use crate::args::int;
use crate::ast::{CompareOperator, MathOperator};
use crate::error::{Error, ErrorKind, Result};
use crate::markup::escape;
use crate::number::{float_to_int, int_to_float, too_large};
use crate::percent::format_percent;
use crate::runtime::Runtime;
use crate::value::{Elements, Range, Text, Value, View};

/// Returns `left OP right`.
pub(crate) fn binary(
    runtime: &mut Runtime,
    operator: MathOperator,
    left: &Value,
    right: &Value,
) -> Result<Value> {
    runtime.read_text(left);
    runtime.read_text(right);
    // Formatting comes first: an undefined value on the right is formatted as an empty string.
    if operator == MathOperator::Remainder
        && let Value::Str(text) = left
    {
        return format_percent(runtime, text, right);
    }
    left.check_defined()?;
    right.check_defined()?;
    if let (Some(a), Some(b)) = (left.as_int(), right.as_int()) {
        return of_ints(operator, a, b);
    }
    if let (Some(a), Some(b)) = (as_float(left), as_float(right)) {
        return of_floats(operator, a, b).map(Value::Float);
    }
    match (operator, left, right) {
        (MathOperator::Add, Value::Str(a), Value::Str(b)) => {
            runtime.reserve_text(a.text.len() + b.text.len())?;
            let joined = |a: &str, b: &str| [a, b].concat();
            Ok(match (a.is_markup, b.is_markup) {
                (false, false) => Value::from(joined(&a.text, &b.text)),
                (true, true) => Value::markup(joined(&a.text, &b.text)),
                (true, false) => Value::markup(joined(&a.text, &escape(&b.text))),
                (false, true) => Value::markup(joined(&escape(&a.text), &b.text)),
            })
        }
        (MathOperator::Add, Value::List(a), Value::List(b)) => {
            runtime.reserve(a.items.len() + b.items.len())?;
            Value::list(a.items.iter().chain(&b.items).cloned().collect())
        }
        (MathOperator::Add, Value::Tuple(a), Value::Tuple(b)) => {
            runtime.reserve(a.items.len() + b.items.len())?;
            Value::tuple(a.items.iter().chain(&b.items).cloned().collect())
        }
        (MathOperator::Multiply, a, b) => match (repetitions(a), repetitions(b)) {
            (_, Some(times)) if repeats(a) => repeat(runtime, a, times),
            (Some(times), _) if repeats(b) => repeat(runtime, b, times),
            _ => Err(unsupported(operator, left, right)),
        },
        _ => Err(unsupported(operator, left, right)),
    }
}

fn repeats(value: &Value) -> bool {
    matches!(value, Value::Str(_) | Value::List(_) | Value::Tuple(_))
}

fn repetitions(value: &Value) -> Option<usize> {
    Some(usize::try_from(value.as_int()?.max(0)).unwrap_or(usize::MAX))
}

fn repeat(runtime: &mut Runtime, value: &Value, times: usize) -> Result<Value> {
    match value {
        Value::Str(text) => {
            runtime.reserve_text(text.text.len().saturating_mul(times))?;
            // No memory is needed, however large `times` is.
            let times = if text.text.is_empty() { 0 } else { times };
            Ok(text.like(text.text.repeat(times)))
        }
        Value::List(items) | Value::Tuple(items) => {
            runtime.reserve(items.items.len().saturating_mul(times))?;
            let times = if items.items.is_empty() { 0 } else { times };
            let repeated = std::iter::repeat_n(&items.items, times);
            let repeated = repeated.flatten().cloned().collect();
            match value {
                Value::List(_) => Value::list(repeated),
                _ => Value::tuple(repeated),
            }
        }
        _ => Err(Error::type_error("a value cannot be repeated")),
    }
}

fn symbol(operator: MathOperator) -> &'static str {
    match operator {
        MathOperator::Add => "+",
        MathOperator::Subtract => "-",
        MathOperator::Multiply => "*",
        MathOperator::Divide => "/",
        MathOperator::FloorDivide => "//",
        MathOperator::Remainder => "%",
        MathOperator::Power => "**",
    }
}

fn unsupported(operator: MathOperator, left: &Value, right: &Value) -> Error {
    Error::type_error(format!(
        "unsupported operand types for {}: '{}' and '{}'",
        symbol(operator),
        left.type_name(),
        right.type_name()
    ))
}

fn zero_division() -> Error {
    Error::new(ErrorKind::ZeroDivision, "division by zero")
}

fn as_float(value: &Value) -> Option<f64> {
    match value {
        Value::Float(value) => Some(*value),
        other => other.as_int().map(int_to_float),
    }
}

fn of_ints(operator: MathOperator, a: i128, b: i128) -> Result<Value> {
    let int = |value: Option<i128>| value.map(Value::Int).ok_or_else(too_large);
    match operator {
        MathOperator::Add => int(a.checked_add(b)),
        MathOperator::Subtract => int(a.checked_sub(b)),
        MathOperator::Multiply => int(a.checked_mul(b)),
        MathOperator::Divide if b == 0 => Err(zero_division()),
        MathOperator::Divide => Ok(Value::Float(int_to_float(a) / int_to_float(b))),
        MathOperator::FloorDivide | MathOperator::Remainder if b == 0 => Err(zero_division()),
        MathOperator::FloorDivide => {
            let quotient = a.checked_div(b).ok_or_else(too_large)?;
            let is_above = a % b != 0 && (a < 0) != (b < 0);
            int(quotient.checked_sub(i128::from(is_above)))
        }
        MathOperator::Remainder => {
            let rest = a.checked_rem(b).unwrap_or(0);
            int(Some(match rest != 0 && (rest < 0) != (b < 0) {
                true => rest + b,
                false => rest,
            }))
        }
        MathOperator::Power if b < 0 => {
            of_floats(operator, int_to_float(a), int_to_float(b)).map(Value::Float)
        }
        MathOperator::Power => match (a, u32::try_from(b)) {
            (0 | 1, _) if b > 0 => Ok(Value::Int(a)),
            (-1, _) => Ok(Value::Int(if b % 2 == 0 { 1 } else { -1 })),
            (_, Ok(power)) => int(a.checked_pow(power)),
            (_, Err(_)) => Err(too_large()),
        },
    }
}

fn of_floats(operator: MathOperator, a: f64, b: f64) -> Result<f64> {
    Ok(match operator {
        MathOperator::Add => a + b,
        MathOperator::Subtract => a - b,
        MathOperator::Multiply => a * b,
        MathOperator::Divide | MathOperator::FloorDivide | MathOperator::Remainder if b == 0.0 => {
            return Err(zero_division());
        }
        MathOperator::Divide => a / b,
        MathOperator::Remainder => floor_divide(a, b).1,
        MathOperator::FloorDivide => floor_divide(a, b).0,
        MathOperator::Power => {
            if a == 0.0 && b < 0.0 {
                return Err(zero_division());
            }
            if a < 0.0 && a.is_finite() && b.is_finite() && b.fract() != 0.0 {
                return Err(Error::value("the power is a complex number"));
            }
            let power = a.powf(b);
            if power.is_infinite() && a.is_finite() && b.is_finite() {
                return Err(Error::new(
                    ErrorKind::Overflow,
                    "the power is too large for a float",
                ));
            }
            power
        }
    })
}

/// Returns the floored quotient, and the remainder with the sign of the divisor, as CPython computes them.
fn floor_divide(a: f64, b: f64) -> (f64, f64) {
    let mut rest = a % b;
    let mut quotient = (a - rest) / b;
    if rest == 0.0 {
        rest = 0f64.copysign(b);
    } else if (b < 0.0) != (rest < 0.0) {
        rest += b;
        quotient -= 1.0;
    }
    let floor = match quotient == 0.0 {
        true => 0f64.copysign(a / b),
        false => {
            let floor = quotient.floor();
            floor + f64::from(u8::from(quotient - floor > 0.5))
        }
    };
    (floor, rest)
}

/// Returns `-value`, or `+value`.
pub(crate) fn signed(value: &Value, is_negative: bool) -> Result<Value> {
    value.check_defined()?;
    match (value, value.as_int()) {
        (_, Some(int)) if is_negative => int.checked_neg().map(Value::Int).ok_or_else(too_large),
        (_, Some(int)) => Ok(Value::Int(int)),
        (Value::Float(float), _) => Ok(Value::Float(if is_negative { -float } else { *float })),
        _ => Err(Error::type_error(format!(
            "bad operand type for unary {}: '{}'",
            if is_negative { "-" } else { "+" },
            value.type_name()
        ))),
    }
}

/// Returns `left OP right` for a comparison.
pub(crate) fn compare(
    runtime: &mut Runtime,
    operator: CompareOperator,
    left: &Value,
    right: &Value,
) -> Result<bool> {
    match operator {
        CompareOperator::In | CompareOperator::NotIn => {
            runtime.read_text(right);
            runtime.read_key(left);
        }
        // A comparison reads at most as much as the smaller value has.
        _ if left.shape().weight < right.shape().weight => runtime.read(left),
        _ => runtime.read(right),
    }
    let order = |symbol| left.compare(right, symbol);
    Ok(match operator {
        CompareOperator::Equal => left.equals(right),
        CompareOperator::NotEqual => !left.equals(right),
        CompareOperator::Less => order("<")?.is_some_and(|order| order.is_lt()),
        CompareOperator::LessOrEqual => order("<=")?.is_some_and(|order| order.is_le()),
        CompareOperator::Greater => order(">")?.is_some_and(|order| order.is_gt()),
        CompareOperator::GreaterOrEqual => order(">=")?.is_some_and(|order| order.is_ge()),
        CompareOperator::In => contains(runtime, right, left)?,
        CompareOperator::NotIn => !contains(runtime, right, left)?,
    })
}

/// Returns `item in container`.
pub(crate) fn contains(runtime: &mut Runtime, container: &Value, item: &Value) -> Result<bool> {
    match container {
        Value::Str(text) => match item {
            Value::Str(part) => Ok(text.text.contains(&*part.text)),
            other => Err(Error::type_error(format!(
                "'in <string>' requires string as left operand, not {}",
                other.type_name()
            ))),
        },
        Value::Dict(dict) | Value::View(View::Keys, dict) => Ok(dict.get(item)?.is_some()),
        Value::View(View::Items, dict) => Ok(match item {
            Value::Tuple(pair) if pair.items.len() == 2 => dict
                .get(&pair.items[0])?
                .is_some_and(|value| value.equals(&pair.items[1])),
            _ => false,
        }),
        Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
            Err(Error::type_error(format!(
                "argument of type '{}' is not iterable",
                container.type_name()
            )))
        }
        other => {
            let mut elements = Elements::new(other)?;
            while let Some(element) = elements.next(runtime)? {
                runtime.read_text(&element);
                if element.equals(item) {
                    return Ok(true);
                }
            }
            Ok(false)
        }
    }
}

/// Returns Python's `value[key]`; a missing key or a wrong type is an error.
pub(crate) fn item(value: &Value, key: &Value) -> Result<Value> {
    value.check_defined()?;
    let at = |length: usize| -> Result<usize> {
        let index = int(key).map_err(|_| wrong_index(value, key))?;
        position(index, length)
            .ok_or_else(|| Error::lookup(format!("{} index out of range", value.type_name())))
    };
    match value {
        Value::Dict(dict) => match dict.get(key)? {
            Some(value) => Ok(value.clone()),
            None => Err(Error::lookup(key.named())),
        },
        Value::List(items) | Value::Tuple(items) => Ok(items.items[at(items.items.len())?].clone()),
        Value::Str(text) => {
            let index = at(text.count())?;
            let letter = text.text.chars().nth(index);
            Ok(text.like(letter.map(String::from).unwrap_or_default()))
        }
        Value::Range(range) => Ok(Value::Int(range.get(at(range.length)?))),
        other => Err(Error::type_error(format!(
            "'{}' object is not subscriptable",
            other.type_name()
        ))),
    }
}

fn wrong_index(value: &Value, key: &Value) -> Error {
    Error::type_error(format!(
        "{} indices must be integers or slices, not {}",
        value.type_name(),
        key.type_name()
    ))
}

/// Returns the position of an index, `None` if it is out of range; a negative index counts from the end.
fn position(index: i128, length: usize) -> Option<usize> {
    let length = i128::try_from(length).ok()?;
    let index = if index < 0 {
        index.checked_add(length)?
    } else {
        index
    };
    usize::try_from(index).ok().filter(|_| index < length)
}

/// Returns `value[start:stop:step]`.
pub(crate) fn slice(runtime: &mut Runtime, value: &Value, bounds: [Value; 3]) -> Result<Value> {
    value.check_defined()?;
    runtime.read_text(value);
    let length = match value {
        Value::Str(_) | Value::List(_) | Value::Tuple(_) | Value::Range(_) => {
            value.length().unwrap_or(0)
        }
        Value::Dict(_) => return Err(Error::type_error("unhashable type: 'slice'")),
        other => {
            return Err(Error::type_error(format!(
                "'{}' object is not subscriptable",
                other.type_name()
            )));
        }
    };
    let [start, stop, step] = bounds.map(|bound| match bound {
        Value::None => Ok(None),
        Value::Undefined(_) => bound.check_defined().map(|()| None),
        bound => bound.as_int().map(Some).ok_or_else(|| {
            Error::type_error("slice indices must be integers or None or have an __index__ method")
        }),
    });
    let positions = positions(length, start?, stop?, step?)?;
    match value {
        Value::Range(range) => {
            let Range { start, step, .. } = **range;
            let of = |index: i128| step.checked_mul(index).and_then(|by| start.checked_add(by));
            Ok(Value::Range(std::rc::Rc::new(Range {
                start: of(positions.start).ok_or_else(too_large)?,
                stop: of(positions.stop).ok_or_else(too_large)?,
                step: step.checked_mul(positions.step).ok_or_else(too_large)?,
                length: positions.length,
            })))
        }
        Value::Str(text) => {
            runtime.reserve_text(positions.length)?;
            Ok(slice_text(text, &positions))
        }
        Value::List(items) | Value::Tuple(items) => {
            runtime.reserve(positions.length)?;
            let part = (0..positions.length).map(|number| {
                let at = usize::try_from(positions.get(number)).unwrap_or(0);
                items.items[at].clone()
            });
            match value {
                Value::List(_) => Value::list(part.collect()),
                _ => Value::tuple(part.collect()),
            }
        }
        _ => Err(Error::type_error("the value has no slices")),
    }
}

fn slice_text(text: &Text, positions: &Range) -> Value {
    if positions.step == 1 {
        let start = usize::try_from(positions.start).unwrap_or(0);
        let part: String = text
            .text
            .chars()
            .skip(start)
            .take(positions.length)
            .collect();
        return text.like(part);
    }
    let letters: Vec<char> = text.text.chars().collect();
    let part: String = (0..positions.length)
        .filter_map(|number| letters.get(usize::try_from(positions.get(number)).ok()?))
        .collect();
    text.like(part)
}

/// Returns the positions of a slice, as Python's `slice.indices`.
fn positions(
    length: usize,
    start: Option<i128>,
    stop: Option<i128>,
    step: Option<i128>,
) -> Result<Range> {
    let step = step.unwrap_or(1);
    if step == 0 {
        return Err(Error::value("slice step cannot be zero"));
    }
    let length = i128::try_from(length).unwrap_or(i128::MAX);
    let (lower, upper) = if step < 0 {
        (-1, length - 1)
    } else {
        (0, length)
    };
    let bound = |given: Option<i128>, default: i128| match given {
        None => default,
        Some(at) if at < 0 => at.saturating_add(length).max(lower),
        Some(at) => at.min(upper),
    };
    let (start, stop) = match step < 0 {
        true => (bound(start, upper), bound(stop, lower)),
        false => (bound(start, lower), bound(stop, upper)),
    };
    Ok(range(start, stop, step))
}

/// Returns a range, whose length it computes.
pub(crate) fn range(start: i128, stop: i128, step: i128) -> Range {
    let distance = if step > 0 {
        stop.saturating_sub(start)
    } else {
        start.saturating_sub(stop)
    };
    let length = match distance > 0 {
        true => (distance - 1) / step.saturating_abs() + 1,
        false => 0,
    };
    Range {
        start,
        stop,
        step,
        length: usize::try_from(length).unwrap_or(usize::MAX),
    }
}

/// Returns Python's `abs(value)`.
pub(crate) fn absolute(value: &Value) -> Result<Value> {
    value.check_defined()?;
    match (value, value.as_int()) {
        (_, Some(int)) => int.checked_abs().map(Value::Int).ok_or_else(too_large),
        (Value::Float(float), _) => Ok(Value::Float(float.abs())),
        _ => Err(Error::type_error(format!(
            "bad operand type for abs(): '{}'",
            value.type_name()
        ))),
    }
}

/// Returns Python's `int(value)` of a number.
pub(crate) fn truncated(value: &Value) -> Result<i128> {
    match value {
        Value::Float(float) => float_to_int(*float),
        other => int(other),
    }
}
