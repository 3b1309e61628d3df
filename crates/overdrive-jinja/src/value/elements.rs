//! The elements of values, ranges, and lazy iterators.

use std::cell::RefCell;
use std::rc::Rc;

use super::{Dict, Items, Shape, Text, Value, View};
use crate::error::{Error, Result};
use crate::runtime::Runtime;

/// The numbers of `range`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) start: i128,
    pub(crate) stop: i128,
    pub(crate) step: i128,
    pub(crate) length: usize,
}

impl Range {
    pub(crate) fn get(&self, index: usize) -> i128 {
        // The result is between start and stop; only the product may have more than 128 bits.
        let index = i128::try_from(index).unwrap_or(i128::MAX);
        self.start.wrapping_add(self.step.wrapping_mul(index))
    }
}

/// A function that computes the next element of an iterator.
type Next = Box<dyn FnMut(&mut Runtime) -> Result<Option<Value>>>;

/// A value that can be iterated once: what filters such as `map` return.
pub(crate) struct LazyIterator {
    /// Python's name of its type.
    pub(crate) type_name: &'static str,
    next: RefCell<Option<Next>>,
    pub(super) shape: Shape,
}

impl std::fmt::Debug for LazyIterator {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("LazyIterator")
            .field("type_name", &self.type_name)
            .finish_non_exhaustive()
    }
}

impl LazyIterator {
    pub(crate) fn next(&self, runtime: &mut Runtime) -> Result<Option<Value>> {
        // The function is taken out while it runs, so an iterator that reads itself is at its end.
        let Some(mut next) = self.next.borrow_mut().take() else {
            return Ok(None);
        };
        let value = next(runtime)?;
        if value.is_some() {
            *self.next.borrow_mut() = Some(next);
        }
        Ok(value)
    }
}

/// Reads the elements of a value one after another.
pub(crate) enum Elements {
    Items(Rc<Items>, usize),
    Entries(View, Rc<Dict>, usize),
    Letters(Text, usize),
    Range(Rc<Range>, usize),
    Lazy(Rc<LazyIterator>),
    Empty,
}

impl Elements {
    /// Returns the elements, as Python's `iter(value)`.
    pub(crate) fn new(value: &Value) -> Result<Elements> {
        Ok(match value {
            Value::Undefined(_) => Elements::Empty,
            Value::Str(text) => Elements::Letters(text.clone(), 0),
            Value::List(items) | Value::Tuple(items) => Elements::Items(items.clone(), 0),
            Value::Dict(dict) => Elements::Entries(View::Keys, dict.clone(), 0),
            Value::View(view, dict) => Elements::Entries(*view, dict.clone(), 0),
            Value::Range(range) => Elements::Range(range.clone(), 0),
            Value::Iterator(iterator) => Elements::Lazy(iterator.clone()),
            other => {
                return Err(Error::type_error(format!(
                    "'{}' object is not iterable",
                    other.type_name()
                )));
            }
        })
    }

    pub(crate) fn next(&mut self, runtime: &mut Runtime) -> Result<Option<Value>> {
        runtime.step()?;
        Ok(match self {
            Elements::Items(items, at) => {
                *at += 1;
                items.items.get(*at - 1).cloned()
            }
            Elements::Entries(view, dict, at) => {
                *at += 1;
                match dict.entries.get(*at - 1) {
                    None => None,
                    Some((key, value)) => Some(match view {
                        View::Keys => key.clone(),
                        View::Values => value.clone(),
                        View::Items => Value::tuple(vec![key.clone(), value.clone()])?,
                    }),
                }
            }
            Elements::Letters(text, at) => match text.text[*at..].chars().next() {
                None => None,
                Some(letter) => {
                    *at += letter.len_utf8();
                    // As in Python, the characters of markup are plain strings.
                    Some(Value::from(&*letter.encode_utf8(&mut [0; 4])))
                }
            },
            Elements::Range(range, at) => {
                *at += 1;
                (*at <= range.length).then(|| Value::Int(range.get(*at - 1)))
            }
            Elements::Lazy(iterator) => iterator.next(runtime)?,
            Elements::Empty => None,
        })
    }
}

impl Value {
    /// Returns an iterator over the values that `next` returns; `of` are the values that `next` holds.
    pub(crate) fn lazy(
        type_name: &'static str,
        of: &[Value],
        next: impl FnMut(&mut Runtime) -> Result<Option<Value>> + 'static,
    ) -> Result<Value> {
        Ok(Value::Iterator(Rc::new(LazyIterator {
            type_name,
            next: RefCell::new(Some(Box::new(next))),
            shape: Shape::of(of)?,
        })))
    }
}
