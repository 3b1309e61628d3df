//! Jinja's builtin tests, which follow `is`.

use crate::args::Args;
use crate::ast::{CompareOperator, MathOperator};
use crate::error::{Error, ErrorKind, Result};
use crate::objects::{Object, is_same};
use crate::runtime::Runtime;
use crate::string_methods::{is_lower, is_upper};
use crate::value::Value;
use crate::{filters, operators};

/// The names of the tests, sorted.
const NAMES: [&str; 39] = [
    "!=",
    "<",
    "<=",
    "==",
    ">",
    ">=",
    "boolean",
    "callable",
    "defined",
    "divisibleby",
    "eq",
    "equalto",
    "escaped",
    "even",
    "false",
    "filter",
    "float",
    "ge",
    "greaterthan",
    "gt",
    "in",
    "integer",
    "iterable",
    "le",
    "lessthan",
    "lower",
    "lt",
    "mapping",
    "ne",
    "none",
    "number",
    "odd",
    "sameas",
    "sequence",
    "string",
    "test",
    "true",
    "undefined",
    "upper",
];

pub(crate) fn exists(name: &str) -> bool {
    NAMES.binary_search(&name).is_ok()
}

/// Tests a value.
pub(crate) fn call(runtime: &mut Runtime, name: &str, value: Value, args: Args) -> Result<bool> {
    match name {
        // These read `str(value)`, whatever the value is.
        "lower" | "upper" => runtime.read(&value),
        _ => runtime.read_text(&value),
    }
    let operator = match name {
        "==" | "eq" | "equalto" => Some(CompareOperator::Equal),
        "!=" | "ne" => Some(CompareOperator::NotEqual),
        "<" | "lt" | "lessthan" => Some(CompareOperator::Less),
        "<=" | "le" => Some(CompareOperator::LessOrEqual),
        ">" | "gt" | "greaterthan" => Some(CompareOperator::Greater),
        ">=" | "ge" => Some(CompareOperator::GreaterOrEqual),
        "in" => Some(CompareOperator::In),
        _ => None,
    };
    if let Some(operator) = operator {
        let other = one(name, args)?;
        return operators::compare(runtime, operator, &value, &other);
    }
    let rest = |runtime: &mut Runtime, by: &Value| {
        operators::binary(runtime, MathOperator::Remainder, &value, by)
    };
    Ok(match name {
        "divisibleby" => rest(runtime, &one(name, args)?)?.equals(&Value::Int(0)),
        "sameas" => is_same(&value, &one(name, args)?),
        "odd" | "even" => {
            args.none(name)?;
            let wanted = i128::from(name == "odd");
            rest(runtime, &Value::Int(2))?.equals(&Value::Int(wanted))
        }
        _ => {
            args.none(name)?;
            plain(name, &value)?
        }
    })
}

fn one(name: &str, args: Args) -> Result<Value> {
    let [other] = args.unnamed(name, 1)?;
    Ok(other.unwrap_or(Value::None))
}

/// Returns the result of a test without an argument.
fn plain(name: &str, value: &Value) -> Result<bool> {
    Ok(match name {
        "boolean" => matches!(value, Value::Bool(_)),
        "callable" => match value {
            Value::Undefined(_) => true,
            Value::Object(object) => object.is_callable(),
            _ => false,
        },
        "defined" => !value.is_undefined(),
        "undefined" => value.is_undefined(),
        "escaped" => value.is_markup(),
        "false" => matches!(value, Value::Bool(false)),
        "true" => matches!(value, Value::Bool(true)),
        "filter" => is_name(value, filters::exists)?,
        "test" => is_name(value, exists)?,
        "float" => matches!(value, Value::Float(_)),
        "integer" => matches!(value, Value::Int(_)),
        "number" => matches!(value, Value::Bool(_) | Value::Int(_) | Value::Float(_)),
        "iterable" => match value {
            Value::Object(object) => matches!(**object, Object::Loop(_)),
            Value::None | Value::Bool(_) | Value::Int(_) | Value::Float(_) => false,
            _ => true,
        },
        "lower" => is_lower(&value.to_text()?),
        "upper" => is_upper(&value.to_text()?),
        "mapping" => matches!(value, Value::Dict(_)),
        "none" => value.is_none(),
        // As in jinja2: values with `len()` and `[]`.
        "sequence" => matches!(
            value,
            Value::Undefined(_)
                | Value::Str(_)
                | Value::List(_)
                | Value::Tuple(_)
                | Value::Dict(_)
                | Value::Range(_)
        ),
        "string" => matches!(value, Value::Str(_)),
        other => {
            return Err(Error::new(
                ErrorKind::Runtime,
                format!("No test named '{other}' found."),
            ));
        }
    })
}

/// Returns `true` if the value is a name that exists; a value that is not hashable is an error, as in Python.
fn is_name(value: &Value, exists: fn(&str) -> bool) -> Result<bool> {
    crate::value::Key::new(value)?;
    Ok(value.as_str().is_some_and(exists))
}
