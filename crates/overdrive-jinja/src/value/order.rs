//! Equality and order.

use std::cmp::Ordering;
use std::rc::Rc;

use super::{Value, View};
use crate::error::{Error, Result};
use crate::number::compare_int_float;

impl Value {
    /// Returns Python's `self == other`.
    pub(crate) fn equals(&self, other: &Value) -> bool {
        match (self, other) {
            (Value::Undefined(_), Value::Undefined(_)) | (Value::None, Value::None) => true,
            (Value::Str(a), Value::Str(b)) => a.text == b.text,
            (Value::Float(a), Value::Float(b)) => a == b,
            (Value::Float(float), int) | (int, Value::Float(float)) => int
                .as_int()
                .is_some_and(|int| compare_int_float(int, *float) == Some(Ordering::Equal)),
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                Rc::ptr_eq(a, b)
                    || a.items.len() == b.items.len()
                        && a.items.iter().zip(&b.items).all(|(a, b)| a.equals(b))
            }
            (Value::Dict(a), Value::Dict(b)) => {
                let same = |(key, value): &(Value, Value)| matches!(b.get(key), Ok(Some(other)) if value.equals(other));
                Rc::ptr_eq(a, b) || a.entries.len() == b.entries.len() && a.entries.iter().all(same)
            }
            (Value::View(View::Keys, a), Value::View(View::Keys, b)) => {
                let has = |(key, _): &(Value, Value)| matches!(b.get(key), Ok(Some(_)));
                a.entries.len() == b.entries.len() && a.entries.iter().all(has)
            }
            (Value::View(View::Items, a), Value::View(View::Items, b)) => {
                Value::Dict(a.clone()).equals(&Value::Dict(b.clone()))
            }
            (Value::Range(a), Value::Range(b)) => {
                a.length == b.length
                    && (a.length == 0 || a.start == b.start)
                    && (a.length < 2 || a.step == b.step)
            }
            (Value::Iterator(a), Value::Iterator(b)) => Rc::ptr_eq(a, b),
            (Value::Object(a), Value::Object(b)) => Rc::ptr_eq(a, b) || a.equals(b),
            _ => match (self.as_int(), other.as_int()) {
                (Some(a), Some(b)) => a == b,
                _ => false,
            },
        }
    }

    /// Returns the order of two values, `None` if there is none (a NaN).
    ///
    /// # Errors
    /// An error for types that Python does not compare.
    pub(crate) fn compare(&self, other: &Value, operator: &str) -> Result<Option<Ordering>> {
        self.check_defined()?;
        other.check_defined()?;
        match (self, other) {
            (Value::Str(a), Value::Str(b)) => return Ok(Some(a.text.cmp(&b.text))),
            (Value::Float(a), Value::Float(b)) => return Ok(a.partial_cmp(b)),
            (Value::Float(a), b) => {
                if let Some(b) = b.as_int() {
                    return Ok(compare_int_float(b, *a).map(Ordering::reverse));
                }
            }
            (a, Value::Float(b)) => {
                if let Some(a) = a.as_int() {
                    return Ok(compare_int_float(a, *b));
                }
            }
            (Value::List(a), Value::List(b)) | (Value::Tuple(a), Value::Tuple(b)) => {
                // The first elements that differ decide.
                for (a, b) in a.items.iter().zip(&b.items) {
                    if !a.equals(b) {
                        return a.compare(b, operator);
                    }
                }
                return Ok(Some(a.items.len().cmp(&b.items.len())));
            }
            _ => {
                if let (Some(a), Some(b)) = (self.as_int(), other.as_int()) {
                    return Ok(Some(a.cmp(&b)));
                }
            }
        }
        Err(Error::type_error(format!(
            "'{operator}' not supported between instances of '{}' and '{}'",
            self.type_name(),
            other.type_name()
        )))
    }

    pub(crate) fn is_less(&self, other: &Value) -> Result<bool> {
        Ok(self.compare(other, "<")? == Some(Ordering::Less))
    }
}
