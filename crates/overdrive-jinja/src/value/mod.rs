//! The values of a template: those of Python, with its printing, equality, order and truth.

mod dict;
mod elements;
mod order;
mod repr;
mod shape;

pub(crate) use dict::{Dict, Key, View};
pub(crate) use elements::{Elements, LazyIterator, Range};
pub(crate) use shape::{Shape, too_many_elements};

use shape::too_deep;

use std::rc::Rc;
use std::sync::Arc;

use crate::error::{Error, ErrorKind, Result};
use crate::limits::MAX_DEPTH;
use crate::objects::Object;

/// A value. Strings, lists and mappings are immutable; clones share them.
#[derive(Debug, Clone)]
pub(crate) enum Value {
    /// An undefined value, with the message of the error that its use raises.
    Undefined(Rc<str>),
    None,
    Bool(bool),
    /// Python's integers have no bound; those of a template have 128 bits.
    Int(i128),
    Float(f64),
    Str(Text),
    List(Rc<Items>),
    Tuple(Rc<Items>),
    Dict(Rc<Dict>),
    /// `dict.keys()`, `dict.values()` and `dict.items()`.
    View(View, Rc<Dict>),
    Range(Rc<Range>),
    Iterator(Rc<LazyIterator>),
    Object(Rc<Object>),
}

/// A string; `is_markup` if it counts as escaped for HTML (`markupsafe.Markup`).
#[derive(Debug, Clone)]
pub(crate) struct Text {
    pub(crate) text: Arc<str>,
    pub(crate) is_markup: bool,
}

impl Text {
    /// Returns another string, which is markup if this one is.
    pub(crate) fn like(&self, text: impl Into<Arc<str>>) -> Value {
        Value::Str(Text {
            text: text.into(),
            is_markup: self.is_markup,
        })
    }

    /// Returns the number of characters.
    pub(crate) fn count(&self) -> usize {
        self.text.chars().count()
    }
}

/// The elements of a list or a tuple.
#[derive(Debug)]
pub(crate) struct Items {
    pub(crate) items: Vec<Value>,
    shape: Shape,
    /// `true` for the pairs of `groupby`, which also have the attributes `grouper` and `list`.
    pub(crate) is_group: bool,
}

impl From<&str> for Value {
    fn from(text: &str) -> Value {
        Value::from(Arc::<str>::from(text))
    }
}

impl From<String> for Value {
    fn from(text: String) -> Value {
        Value::from(Arc::<str>::from(text))
    }
}

impl From<Arc<str>> for Value {
    fn from(text: Arc<str>) -> Value {
        Value::Str(Text {
            text,
            is_markup: false,
        })
    }
}

impl From<bool> for Value {
    fn from(value: bool) -> Value {
        Value::Bool(value)
    }
}

impl From<i128> for Value {
    fn from(value: i128) -> Value {
        Value::Int(value)
    }
}

impl From<usize> for Value {
    fn from(value: usize) -> Value {
        Value::Int(i128::try_from(value).unwrap_or(i128::MAX))
    }
}

impl From<f64> for Value {
    fn from(value: f64) -> Value {
        Value::Float(value)
    }
}

impl Value {
    pub(crate) fn markup(text: impl Into<Arc<str>>) -> Value {
        Value::Str(Text {
            text: text.into(),
            is_markup: true,
        })
    }

    pub(crate) fn undefined(reason: impl AsRef<str>) -> Value {
        Value::Undefined(Rc::from(reason.as_ref()))
    }

    pub(crate) fn list(items: Vec<Value>) -> Result<Value> {
        Ok(Value::List(Rc::new(Items {
            shape: Shape::of(&items)?,
            items,
            is_group: false,
        })))
    }

    pub(crate) fn tuple(items: Vec<Value>) -> Result<Value> {
        Ok(Value::Tuple(Rc::new(Items {
            shape: Shape::of(&items)?,
            items,
            is_group: false,
        })))
    }

    /// Returns a pair of `groupby`.
    pub(crate) fn group(grouper: Value, list: Value) -> Result<Value> {
        let items = vec![grouper, list];
        Ok(Value::Tuple(Rc::new(Items {
            shape: Shape::of(&items)?,
            items,
            is_group: true,
        })))
    }

    /// Converts a value of JSON that is nested in `depth` others.
    pub(crate) fn from_json(json: &serde_json::Value, depth: usize) -> Result<Value> {
        if depth > MAX_DEPTH {
            return Err(too_deep());
        }
        let inner = |json| Value::from_json(json, depth + 1);
        Ok(match json {
            serde_json::Value::Null => Value::None,
            serde_json::Value::Bool(value) => Value::Bool(*value),
            serde_json::Value::Number(number) => match number.as_i128() {
                Some(int) => Value::Int(int),
                None => Value::Float(number.as_f64().unwrap_or(f64::NAN)),
            },
            serde_json::Value::String(text) => Value::from(text.as_str()),
            serde_json::Value::Array(items) => {
                Value::list(items.iter().map(inner).collect::<Result<_>>()?)?
            }
            serde_json::Value::Object(fields) => {
                let pairs = fields
                    .iter()
                    .map(|(key, value)| Ok((Value::from(key.as_str()), inner(value)?)));
                Value::dict(pairs.collect::<Result<Vec<_>>>()?)?
            }
        })
    }

    pub(crate) fn as_text(&self) -> Option<&Text> {
        match self {
            Value::Str(text) => Some(text),
            _ => None,
        }
    }

    pub(crate) fn as_str(&self) -> Option<&str> {
        self.as_text().map(|text| &*text.text)
    }

    /// Returns the value of an integer or a boolean.
    pub(crate) fn as_int(&self) -> Option<i128> {
        match self {
            Value::Bool(value) => Some(i128::from(*value)),
            Value::Int(value) => Some(*value),
            _ => None,
        }
    }

    pub(crate) fn is_undefined(&self) -> bool {
        matches!(self, Value::Undefined(_))
    }

    pub(crate) fn is_none(&self) -> bool {
        matches!(self, Value::None)
    }

    pub(crate) fn is_markup(&self) -> bool {
        self.as_text().is_some_and(|text| text.is_markup)
    }

    /// Returns Python's name of the type.
    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Value::Undefined(_) => "Undefined",
            Value::None => "NoneType",
            Value::Bool(_) => "bool",
            Value::Int(_) => "int",
            Value::Float(_) => "float",
            Value::Str(text) => match text.is_markup {
                true => "Markup",
                false => "str",
            },
            Value::List(_) => "list",
            Value::Tuple(_) => "tuple",
            Value::Dict(_) => "dict",
            Value::View(View::Keys, _) => "dict_keys",
            Value::View(View::Values, _) => "dict_values",
            Value::View(View::Items, _) => "dict_items",
            Value::Range(_) => "range",
            Value::Iterator(iterator) => iterator.type_name,
            Value::Object(object) => object.type_name(),
        }
    }

    /// Returns Python's `bool(value)`.
    pub(crate) fn is_true(&self) -> bool {
        match self {
            Value::Undefined(_) | Value::None => false,
            Value::Bool(value) => *value,
            Value::Int(value) => *value != 0,
            Value::Float(value) => *value != 0.0,
            Value::Str(text) => !text.text.is_empty(),
            Value::Iterator(_) => true,
            Value::Object(object) => object.length().is_none_or(|length| length > 0),
            _ => self.length().is_some_and(|length| length > 0),
        }
    }

    /// Returns Python's `len(value)`; `None` if it has none.
    pub(crate) fn length(&self) -> Option<usize> {
        match self {
            Value::Undefined(_) => Some(0),
            Value::Str(text) => Some(text.count()),
            Value::List(items) | Value::Tuple(items) => Some(items.items.len()),
            Value::Dict(dict) | Value::View(_, dict) => Some(dict.entries.len()),
            Value::Range(range) => Some(range.length),
            Value::Object(object) => object.length(),
            _ => None,
        }
    }

    /// Returns an error if the value is undefined.
    pub(crate) fn check_defined(&self) -> Result<()> {
        match self {
            Value::Undefined(reason) => Err(Error::new(ErrorKind::Undefined, &**reason)),
            _ => Ok(()),
        }
    }
}
