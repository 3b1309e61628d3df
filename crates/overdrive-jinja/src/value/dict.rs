//! Mappings and their keys.

use std::collections::HashMap;
use std::rc::Rc;
use std::sync::Arc;

use super::{Shape, Value};
use crate::error::{Error, Result};

/// A mapping in the order of insertion.
#[derive(Debug, Default)]
pub(crate) struct Dict {
    pub(crate) entries: Vec<(Value, Value)>,
    index: HashMap<Key, usize>,
    pub(super) shape: Shape,
}

impl Dict {
    pub(crate) fn get(&self, key: &Value) -> Result<Option<&Value>> {
        Ok(self
            .index
            .get(&Key::new(key)?)
            .map(|&at| &self.entries[at].1))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum View {
    Keys,
    Values,
    Items,
}

/// A value as a key of a mapping.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
pub(crate) enum Key {
    Undefined,
    None,
    Int(i128),
    Float(u64),
    Str(Arc<str>),
    Tuple(Vec<Key>),
    Identity(usize),
}

impl Key {
    /// Returns the key; values that are equal have equal keys.
    pub(crate) fn new(value: &Value) -> Result<Key> {
        Ok(match value {
            Value::Undefined(_) => Key::Undefined,
            Value::None => Key::None,
            Value::Bool(value) => Key::Int(i128::from(*value)),
            Value::Int(value) => Key::Int(*value),
            Value::Float(value) => match crate::number::float_to_int(*value) {
                Ok(int) if value.fract() == 0.0 => Key::Int(int),
                _ => Key::Float(value.to_bits()),
            },
            Value::Str(text) => Key::Str(text.text.clone()),
            Value::Tuple(items) => {
                Key::Tuple(items.items.iter().map(Key::new).collect::<Result<_>>()?)
            }
            Value::Range(range) => Key::Tuple(vec![
                Key::Int(i128::try_from(range.length).unwrap_or(i128::MAX)),
                Key::Int(range.start),
                Key::Int(range.step),
            ]),
            Value::List(_) | Value::Dict(_) | Value::View(..) => {
                return Err(Error::type_error(format!(
                    "unhashable type: '{}'",
                    value.type_name()
                )));
            }
            Value::Iterator(iterator) => Key::Identity(Rc::as_ptr(iterator) as usize),
            Value::Object(object) => Key::Identity(Rc::as_ptr(object) as usize),
        })
    }
}

impl Value {
    /// Returns a mapping. For equal keys it has the first key, at its position, with the last value.
    pub(crate) fn dict(pairs: impl IntoIterator<Item = (Value, Value)>) -> Result<Value> {
        let mut dict = Dict::default();
        for (key, value) in pairs {
            match dict.index.entry(Key::new(&key)?) {
                std::collections::hash_map::Entry::Occupied(entry) => {
                    dict.entries[*entry.get()].1 = value;
                }
                std::collections::hash_map::Entry::Vacant(entry) => {
                    entry.insert(dict.entries.len());
                    dict.entries.push((key, value));
                }
            }
        }
        dict.shape = Shape::of(dict.entries.iter().flat_map(|(key, value)| [key, value]))?;
        Ok(Value::Dict(Rc::new(dict)))
    }
}
