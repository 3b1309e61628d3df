//! Attributes of values, and the methods of values other than strings.

use crate::args::{Args, position_or};
use crate::error::{Error, Result};
use crate::globals::Global;
use crate::objects::Object;
use crate::runtime::Runtime;
use crate::string_methods;
use crate::value::{Elements, Value, View};

/// Returns an attribute as Python's `getattr` does, or `None` if the value has none of the name. Special attributes and
/// methods that change the value are undefined, as in jinja2's sandbox.
pub(crate) fn attribute(runtime: &mut Runtime, value: &Value, name: &str) -> Result<Option<Value>> {
    let method = |names: &[&'static str]| {
        let known = names.iter().find(|known| **known == name);
        known
            .map(|known| Object::method(value.clone(), known))
            .transpose()
    };
    let unsafe_method = |names: &[&str]| {
        let hidden = names.contains(&name) || is_special(name);
        hidden.then(|| unsafe_undefined(value, name))
    };
    let int = |value: i128| Ok(Some(Value::Int(value)));
    match value {
        Value::Undefined(_) if is_special(name) => Ok(unsafe_method(&[])),
        Value::Undefined(_) => value.check_defined().map(|()| None),
        Value::Str(_) if is_special(name) => Ok(unsafe_method(&[])),
        Value::Str(_) if name == "encode" => Err(Error::runtime(
            "the bytes of `encode` are not supported in chat templates",
        )),
        Value::Str(_) => method(&string_methods::NAMES),
        Value::List(_) => {
            let hidden = unsafe_method(&[
                "append", "clear", "pop", "reverse", "insert", "sort", "extend", "remove",
            ]);
            match hidden {
                Some(hidden) => Ok(Some(hidden)),
                None => method(&["copy", "count", "index"]),
            }
        }
        Value::Tuple(items) => match (items.is_group, name) {
            (true, "grouper") => Ok(items.items.first().cloned()),
            (true, "list") => Ok(items.items.get(1).cloned()),
            _ if is_special(name) => Ok(unsafe_method(&[])),
            _ => method(&["count", "index"]),
        },
        Value::Dict(_) => {
            let hidden = unsafe_method(&["clear", "pop", "popitem", "setdefault", "update"]);
            match hidden {
                Some(hidden) => Ok(Some(hidden)),
                None => method(&["copy", "fromkeys", "get", "items", "keys", "values"]),
            }
        }
        Value::Range(range) => match name {
            "start" => int(range.start),
            "stop" => int(range.stop),
            "step" => int(range.step),
            _ => method(&["count", "index"]),
        },
        Value::Bool(_) | Value::Int(_) => {
            let number = value.as_int().unwrap_or(0);
            match name {
                "real" | "numerator" => int(number),
                "imag" => int(0),
                "denominator" => int(1),
                _ => method(&["as_integer_ratio", "bit_count", "bit_length", "conjugate"]),
            }
        }
        Value::Float(_) => match name {
            "real" => Ok(Some(value.clone())),
            "imag" => Ok(Some(Value::Float(0.0))),
            _ => method(&["conjugate", "is_integer"]),
        },
        Value::Object(object) => match &**object {
            Object::Namespace(attributes) => {
                let attributes = attributes.borrow();
                let found = attributes.iter().find(|(key, _)| **key == *name);
                Ok(found.map(|(_, value)| value.clone()))
            }
            Object::Loop(state) => match state.attribute(name, runtime)? {
                Some(value) => Ok(Some(value)),
                None => method(&["cycle", "changed"]),
            },
            Object::Cycler { items, at, .. } => match name {
                "current" => Ok(items.get(at.get()).cloned()),
                "items" => Value::tuple(items.clone()).map(Some),
                "pos" => Ok(Some(Value::from(at.get()))),
                _ => method(&["next", "reset"]),
            },
            Object::Joiner { separator, is_used } => Ok(match name {
                "sep" => Some(separator.clone()),
                "used" => Some(Value::Bool(is_used.get())),
                _ => None,
            }),
            Object::Macro { definition, .. } => Ok(match name {
                "name" => Some(match &definition.name {
                    Some(name) => Value::from(name.clone()),
                    None => Value::None,
                }),
                "arguments" => {
                    let names = definition.parameters.iter();
                    Some(Value::tuple(
                        names.map(|name| Value::from(name.clone())).collect(),
                    )?)
                }
                "caller" => Some(Value::Bool(definition.uses.caller)),
                "catch_kwargs" => Some(Value::Bool(definition.uses.kwargs)),
                "catch_varargs" => Some(Value::Bool(definition.uses.varargs)),
                _ => None,
            }),
            Object::Global(Global::Dict) if name == "fromkeys" => method(&["fromkeys"]),
            Object::Method { .. } | Object::Global(_) => Ok(None),
        },
        Value::None | Value::View(..) | Value::Iterator(_) => Ok(None),
    }
}

fn is_special(name: &str) -> bool {
    name.starts_with("__") && name.ends_with("__") && name.len() > 4
}

/// Returns the undefined value of an attribute that the sandbox forbids.
pub(crate) fn unsafe_undefined(value: &Value, name: &str) -> Value {
    Value::undefined(format!(
        "access to attribute '{name}' of '{}' object is unsafe.",
        value.type_name()
    ))
}

/// Calls a method of a value.
pub(crate) fn call(
    runtime: &mut Runtime,
    receiver: &Value,
    name: &'static str,
    args: Args,
) -> Result<Value> {
    match receiver {
        Value::Str(this) => {
            runtime.read_text(receiver);
            let result = string_methods::call(runtime, this, name, args)?;
            runtime.read_text(&result);
            Ok(result)
        }
        Value::List(items) if name == "copy" => {
            args.none(name)?;
            runtime.reserve(items.items.len())?;
            Value::list(items.items.clone())
        }
        Value::List(_) | Value::Tuple(_) | Value::Range(_) => search(runtime, receiver, name, args),
        Value::Dict(dict) => match name {
            "get" => {
                let [key, default] = args.unnamed(name, 1)?;
                let found = dict.get(&key.unwrap_or(Value::None))?;
                Ok(found.cloned().or(default).unwrap_or(Value::None))
            }
            "copy" => {
                args.none(name)?;
                runtime.reserve(dict.entries.len())?;
                Value::dict(dict.entries.iter().cloned())
            }
            "fromkeys" => from_keys(runtime, args),
            _ => {
                args.none(name)?;
                let view = match name {
                    "keys" => View::Keys,
                    "values" => View::Values,
                    _ => View::Items,
                };
                Ok(Value::View(view, dict.clone()))
            }
        },
        Value::Bool(_) | Value::Int(_) => {
            args.none(name)?;
            let number = receiver.as_int().unwrap_or(0);
            let magnitude = number.unsigned_abs();
            match name {
                "as_integer_ratio" => Value::tuple(vec![Value::Int(number), Value::Int(1)]),
                "bit_count" => Ok(Value::Int(i128::from(magnitude.count_ones()))),
                "bit_length" => Ok(Value::Int(i128::from(128 - magnitude.leading_zeros()))),
                _ => Ok(Value::Int(number)),
            }
        }
        Value::Float(number) => {
            args.none(name)?;
            match name {
                "is_integer" => Ok(Value::Bool(number.is_finite() && number.fract() == 0.0)),
                _ => Ok(receiver.clone()),
            }
        }
        Value::Object(object) => match &**object {
            Object::Loop(state) if name == "cycle" => state.cycle(args),
            Object::Loop(state) => state.changed(args),
            Object::Cycler { items, at, .. } => {
                args.none(name)?;
                if name == "reset" {
                    at.set(0);
                    return Ok(Value::None);
                }
                let current = items.get(at.get()).cloned();
                at.set((at.get() + 1) % items.len().max(1));
                Ok(current.unwrap_or(Value::None))
            }
            _ if name == "fromkeys" => from_keys(runtime, args),
            _ => Err(no_method(receiver, name)),
        },
        _ => Err(no_method(receiver, name)),
    }
}

fn no_method(receiver: &Value, name: &str) -> Error {
    Error::type_error(format!(
        "'{}' object has no method {name}",
        receiver.type_name()
    ))
}

/// Implements `dict.fromkeys(keys, value=None)`.
fn from_keys(runtime: &mut Runtime, args: Args) -> Result<Value> {
    let [keys, value] = args.unnamed("fromkeys", 1)?;
    let value = value.unwrap_or(Value::None);
    let keys = runtime.collect(&keys.unwrap_or(Value::None))?;
    Value::dict(keys.into_iter().map(|key| (key, value.clone())))
}

/// Implements `count(value)` and `index(value, start, stop)`.
fn search(
    runtime: &mut Runtime,
    receiver: &Value,
    name: &'static str,
    args: Args,
) -> Result<Value> {
    let most = match (name, receiver) {
        ("index", Value::List(_) | Value::Tuple(_)) => 3,
        _ => 1,
    };
    if args.positional.len() > most {
        return Err(Error::type_error(format!(
            "{name} takes at most {most} arguments"
        )));
    }
    let [wanted, start, stop] = args.unnamed(name, 1)?;
    let wanted = wanted.unwrap_or(Value::None);
    let length = i128::try_from(receiver.length().unwrap_or(0)).unwrap_or(i128::MAX);
    let (start, stop) = (
        position_or(start, 0, length)?,
        position_or(stop, length, length)?,
    );
    let mut elements = Elements::new(receiver)?;
    let (mut at, mut count) = (0, 0);
    while let Some(element) = elements.next(runtime)? {
        if element.equals(&wanted) {
            if name == "index" && (start..stop).contains(&at) {
                return Ok(Value::Int(at));
            }
            count += 1;
        }
        at += 1;
    }
    match name {
        "index" => Err(Error::value(format!(
            "{} is not in {}",
            wanted.named(),
            receiver.type_name()
        ))),
        _ => Ok(Value::Int(count)),
    }
}
