//! The nesting and the size of values, which are limited.

use super::Value;
use crate::error::{Error, Result};
use crate::limits::{MAX_DEPTH, MAX_ELEMENTS};

/// The nesting and the size of a value.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Shape {
    /// The levels of nesting below the value.
    pub(crate) depth: usize,
    /// The number of elements and of blocks of 64 bytes of text; shared ones count each time they occur.
    pub(crate) weight: usize,
    /// The type of an object in the value that can change, and could therefore be made to contain itself.
    pub(crate) mutable: Option<&'static str>,
}

impl Shape {
    /// Returns the shape of a container of values.
    pub(crate) fn of<'v>(values: impl IntoIterator<Item = &'v Value>) -> Result<Shape> {
        let mut shape = Shape {
            depth: 0,
            weight: 1,
            mutable: None,
        };
        for value in values {
            let inner = value.shape();
            shape.depth = shape.depth.max(inner.depth + 1);
            shape.weight = shape.weight.saturating_add(inner.weight);
            shape.mutable = shape.mutable.or(inner.mutable);
        }
        if shape.depth > MAX_DEPTH {
            return Err(too_deep());
        }
        if shape.weight > MAX_ELEMENTS {
            return Err(too_many_elements());
        }
        Ok(shape)
    }
}

pub(super) fn too_deep() -> Error {
    Error::limit(format!(
        "a value is nested more than {MAX_DEPTH} levels deep, the limit of a chat template"
    ))
}

pub(crate) fn too_many_elements() -> Error {
    Error::limit(format!(
        "its values have more than {MAX_ELEMENTS} elements together, the limit of one rendering; it probably \
         copies them in a loop"
    ))
}

impl Value {
    pub(crate) fn shape(&self) -> Shape {
        let plain = Shape {
            depth: 0,
            weight: 1,
            mutable: None,
        };
        match self {
            Value::Str(text) => Shape {
                weight: 1 + text.text.len() / 64,
                ..plain
            },
            Value::List(items) | Value::Tuple(items) => items.shape,
            Value::Dict(dict) => dict.shape,
            Value::View(_, dict) => Shape {
                depth: dict.shape.depth + 1,
                ..dict.shape
            },
            Value::Iterator(iterator) => iterator.shape,
            Value::Object(object) => object.shape(),
            _ => plain,
        }
    }
}
