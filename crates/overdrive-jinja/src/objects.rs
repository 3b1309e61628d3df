//! The values that have an identity: namespaces, loops, macros, functions and methods.

use std::cell::{Cell, RefCell};
use std::rc::Rc;
use std::sync::Arc;

use crate::args::Args;
use crate::ast::{For, Macro};
use crate::error::{Error, Result};
use crate::globals::Global;
use crate::runtime::{Runtime, Scope};
use crate::value::{Elements, Shape, Value};

#[derive(Debug)]
pub(crate) enum Object {
    Namespace(RefCell<Vec<(Arc<str>, Value)>>),
    Cycler {
        items: Vec<Value>,
        at: Cell<usize>,
        shape: Shape,
    },
    Joiner {
        separator: Value,
        is_used: Cell<bool>,
    },
    Loop(Box<Loop>),
    Macro {
        definition: Arc<Macro>,
        scope: Rc<Scope>,
    },
    Method {
        receiver: Value,
        name: &'static str,
        shape: Shape,
    },
    Global(Global),
}

/// The `loop` variable.
pub(crate) struct Loop {
    /// The statement and its scope, if it is recursive.
    pub(crate) recursion: Option<(Arc<For>, Rc<Scope>)>,
    pub(crate) depth0: usize,
    pub(crate) state: RefCell<LoopState>,
    shape: Shape,
}

impl std::fmt::Debug for Loop {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Loop")
            .field("depth0", &self.depth0)
            .finish_non_exhaustive()
    }
}

pub(crate) struct LoopState {
    elements: Elements,
    length: Option<usize>,
    /// The number of iterations that have begun.
    index: usize,
    /// The next element if it has been read ahead, which is `None` at the end.
    after: Option<Option<Value>>,
    current: Option<Value>,
    before: Option<Value>,
    changed: Option<Vec<Value>>,
}

impl Loop {
    pub(crate) fn new(
        iterable: &Value,
        recursion: Option<(Arc<For>, Rc<Scope>)>,
        depth0: usize,
    ) -> Result<Loop> {
        let elements = Elements::new(iterable)?;
        let inner = Shape::of([iterable])?;
        Ok(Loop {
            recursion,
            depth0,
            state: RefCell::new(LoopState {
                elements,
                length: iterable.length(),
                index: 0,
                after: None,
                current: None,
                before: None,
                changed: None,
            }),
            shape: Shape {
                mutable: Some("loop"),
                ..inner
            },
        })
    }

    /// Moves to the next element and returns it.
    pub(crate) fn advance(&self, runtime: &mut Runtime) -> Result<Option<Value>> {
        let mut state = self.state.borrow_mut();
        let next = match state.after.take() {
            Some(next) => next,
            None => state.elements.next(runtime)?,
        };
        if let Some(value) = &next {
            state.index += 1;
            state.before = state.current.replace(value.clone());
        }
        Ok(next)
    }

    fn next_item(&self, runtime: &mut Runtime) -> Result<Option<Value>> {
        let mut state = self.state.borrow_mut();
        if state.after.is_none() {
            let next = state.elements.next(runtime)?;
            state.after = Some(next);
        }
        Ok(state.after.clone().flatten())
    }

    fn length(&self, runtime: &mut Runtime) -> Result<usize> {
        let mut state = self.state.borrow_mut();
        if let Some(length) = state.length {
            return Ok(length);
        }
        let mut rest = Vec::new();
        while let Some(value) = state.elements.next(runtime)? {
            runtime.reserve(1)?;
            rest.push(value);
        }
        let peeked = matches!(state.after, Some(Some(_)));
        let length = rest.len() + state.index + usize::from(peeked);
        state.elements = Elements::new(&Value::list(rest)?)?;
        state.length = Some(length);
        Ok(length)
    }

    /// Returns an attribute, or `None` if there is none of the name or it is a method.
    pub(crate) fn attribute(&self, name: &str, runtime: &mut Runtime) -> Result<Option<Value>> {
        let index = self.state.borrow().index;
        let int = |value: usize| Ok(Some(Value::from(value)));
        match name {
            "index" => int(index),
            "index0" => Ok(Some(Value::Int(i128::try_from(index).unwrap_or(0) - 1))),
            "length" => int(self.length(runtime)?),
            "revindex" => int(self.length(runtime)? + 1 - index),
            "revindex0" => int(self.length(runtime)? - index),
            "depth" => int(self.depth0 + 1),
            "depth0" => int(self.depth0),
            "first" => Ok(Some(Value::Bool(index == 1))),
            "last" => Ok(Some(Value::Bool(self.next_item(runtime)?.is_none()))),
            "previtem" => Ok(Some(match self.state.borrow().before.clone() {
                Some(value) if index != 1 => value,
                _ => Value::undefined("there is no previous item"),
            })),
            "nextitem" => {
                Ok(Some(self.next_item(runtime)?.unwrap_or_else(|| {
                    Value::undefined("there is no next item")
                })))
            }
            _ => Ok(None),
        }
    }

    pub(crate) fn cycle(&self, args: Args) -> Result<Value> {
        if !args.named.is_empty() {
            return Err(Error::type_error("cycle has no named parameters"));
        }
        let items = args.positional;
        let index = self.state.borrow().index.saturating_sub(1);
        match items.get(index % items.len().max(1)) {
            Some(item) => Ok(item.clone()),
            None => Err(Error::type_error("no items for cycling given")),
        }
    }

    pub(crate) fn changed(&self, args: Args) -> Result<Value> {
        if !args.named.is_empty() {
            return Err(Error::type_error("changed has no named parameters"));
        }
        let values = args.positional;
        refuse_mutable(&values, "given to loop.changed")?;
        let mut state = self.state.borrow_mut();
        let same = state.changed.as_ref().is_some_and(|last| {
            last.len() == values.len() && last.iter().zip(&values).all(|(a, b)| a.equals(b))
        });
        state.changed = Some(values);
        Ok(Value::Bool(!same))
    }
}

/// Returns an error if one of the values could be made to contain itself, where an object would store it.
pub(crate) fn refuse_mutable(values: &[Value], use_: &str) -> Result<()> {
    match Shape::of(values)?.mutable {
        None => Ok(()),
        Some(kind) => Err(Error::limit(format!("a {kind} is {use_}; use a variable"))),
    }
}

impl Object {
    pub(crate) fn method(receiver: Value, name: &'static str) -> Result<Value> {
        let shape = Shape::of([&receiver])?;
        Ok(Value::Object(Rc::new(Object::Method {
            receiver,
            name,
            shape,
        })))
    }

    pub(crate) fn shape(&self) -> Shape {
        let plain = Shape {
            depth: 0,
            weight: 1,
            mutable: None,
        };
        let mutable = |kind| Shape {
            mutable: Some(kind),
            ..plain
        };
        match self {
            Object::Namespace(_) => mutable("namespace"),
            Object::Macro { .. } => mutable("macro"),
            Object::Loop(state) => state.shape,
            Object::Cycler { shape, .. } | Object::Method { shape, .. } => *shape,
            Object::Joiner { .. } | Object::Global(_) => plain,
        }
    }

    pub(crate) fn type_name(&self) -> &'static str {
        match self {
            Object::Namespace(_) => "Namespace",
            Object::Cycler { .. } => "Cycler",
            Object::Joiner { .. } => "Joiner",
            Object::Loop(_) => "LoopContext",
            Object::Macro { .. } => "Macro",
            Object::Method { .. } => "builtin_function_or_method",
            Object::Global(global) => global.type_name(),
        }
    }

    /// Returns the length, if the object has one.
    pub(crate) fn length(&self) -> Option<usize> {
        match self {
            Object::Loop(state) => state.state.try_borrow().ok().and_then(|state| state.length),
            _ => None,
        }
    }

    pub(crate) fn is_callable(&self) -> bool {
        match self {
            Object::Loop(_) | Object::Macro { .. } | Object::Method { .. } => true,
            Object::Joiner { .. } | Object::Global(_) => true,
            Object::Namespace(_) | Object::Cycler { .. } => false,
        }
    }

    pub(crate) fn equals(&self, other: &Object) -> bool {
        match (self, other) {
            (
                Object::Method {
                    receiver: a,
                    name: x,
                    ..
                },
                Object::Method {
                    receiver: b,
                    name: y,
                    ..
                },
            ) => x == y && is_same(a, b),
            (Object::Global(a), Object::Global(b)) => a == b,
            _ => false,
        }
    }

    pub(crate) fn write_repr(&self, out: &mut String) -> Result<()> {
        match self {
            Object::Namespace(attributes) => {
                out.push_str("<Namespace {");
                for (number, (name, value)) in attributes.borrow().iter().enumerate() {
                    out.push_str(if number > 0 { ", " } else { "" });
                    Value::from(name.clone()).write_repr(out)?;
                    out.push_str(": ");
                    value.write_repr(out)?;
                }
                out.push_str("}>");
            }
            Object::Loop(state) => {
                let state = state.state.borrow();
                let length = state.length.unwrap_or(state.index);
                out.push_str(&format!("<LoopContext {}/{length}>", state.index));
            }
            Object::Macro { definition, .. } => match &definition.name {
                Some(name) => {
                    let name = Value::from(name.clone()).repr()?;
                    out.push_str(&format!("<Macro {name}>"));
                }
                None => out.push_str("<Macro anonymous>"),
            },
            // Python prints an address as well, which is different in every process.
            Object::Method { receiver, name, .. } => {
                let of = receiver.type_name();
                out.push_str(&format!("<built-in method {name} of {of} object>"));
            }
            Object::Cycler { .. } | Object::Joiner { .. } => {
                out.push_str(&format!("<jinja2.utils.{} object>", self.type_name()));
            }
            Object::Global(global) => out.push_str(global.repr()),
        }
        Ok(())
    }
}

/// Returns Python's `a is b`. CPython shares small integers and strings of one character; so does this.
pub(crate) fn is_same(a: &Value, b: &Value) -> bool {
    match (a, b) {
        (Value::None, Value::None) => true,
        (Value::Bool(a), Value::Bool(b)) => a == b,
        (Value::Int(a), Value::Int(b)) => a == b && (-5..=256).contains(a),
        (Value::Str(a), Value::Str(b)) => {
            Arc::ptr_eq(&a.text, &b.text) || a.text.len() < 2 && a.text == b.text
        }
        (Value::List(a), Value::List(b)) => Rc::ptr_eq(a, b),
        (Value::Tuple(a), Value::Tuple(b)) => {
            Rc::ptr_eq(a, b) || a.items.is_empty() && b.items.is_empty()
        }
        (Value::Dict(a), Value::Dict(b)) => Rc::ptr_eq(a, b),
        (Value::Range(a), Value::Range(b)) => Rc::ptr_eq(a, b),
        (Value::Iterator(a), Value::Iterator(b)) => Rc::ptr_eq(a, b),
        (Value::Object(a), Value::Object(b)) => Rc::ptr_eq(a, b),
        (Value::Undefined(a), Value::Undefined(b)) => Rc::ptr_eq(a, b),
        _ => false,
    }
}
