//! The evaluation of expressions.

use std::rc::Rc;

use super::Runtime;
use super::scope::Scope;
use crate::ast::{CompareOperator, Expr, ExprKind, Suffix};
use crate::error::{Error, ErrorKind, Result};
use crate::globals::Global;
use crate::objects::Object;
use crate::value::{Elements, Value};
use crate::{filters, methods, operators, predicates};

impl Runtime {
    pub(super) fn variable(&self, name: &str, scope: &Rc<Scope>) -> Value {
        if let Some(value) = scope.get(name) {
            return value;
        }
        match Global::named(name) {
            Some(global) => Value::Object(Rc::new(Object::Global(global))),
            None => Value::undefined(format!("'{name}' is undefined")),
        }
    }

    pub(super) fn eval(&mut self, expr: &Expr, scope: &Rc<Scope>) -> Result<Value> {
        self.deeper(|runtime| {
            runtime.step()?;
            runtime.expression(&expr.kind, scope)
        })
        .map_err(|error| error.at(expr.line))
    }

    pub(super) fn eval_all(&mut self, exprs: &[Expr], scope: &Rc<Scope>) -> Result<Vec<Value>> {
        exprs.iter().map(|expr| self.eval(expr, scope)).collect()
    }

    pub(super) fn expression(&mut self, expr: &ExprKind, scope: &Rc<Scope>) -> Result<Value> {
        Ok(match expr {
            ExprKind::None => Value::None,
            ExprKind::Bool(value) => Value::Bool(*value),
            ExprKind::Int(value) => Value::Int(*value),
            ExprKind::Float(value) => Value::Float(*value),
            ExprKind::Str(text) => Value::from(text.clone()),
            ExprKind::Name(name) => self.variable(name, scope),
            ExprKind::List(items) => {
                self.reserve(items.len())?;
                Value::list(self.eval_all(items, scope)?)?
            }
            ExprKind::Tuple(items) => {
                self.reserve(items.len())?;
                Value::tuple(self.eval_all(items, scope)?)?
            }
            ExprKind::Dict(items) => {
                self.reserve(items.len())?;
                let mut pairs = Vec::with_capacity(items.len());
                for (key, value) in items {
                    let key = self.eval(key, scope)?;
                    self.read_key(&key);
                    pairs.push((key, self.eval(value, scope)?));
                }
                Value::dict(pairs)?
            }
            ExprKind::Negative(inner) => operators::signed(&self.eval(inner, scope)?, true)?,
            ExprKind::Positive(inner) => operators::signed(&self.eval(inner, scope)?, false)?,
            ExprKind::Not(inner) => Value::Bool(!self.eval(inner, scope)?.is_true()),
            ExprKind::Math(first, rest) => {
                let mut value = self.eval(first, scope)?;
                for (operator, operand) in rest {
                    let operand = self.eval(operand, scope)?;
                    value = operators::binary(self, *operator, &value, &operand)?;
                }
                value
            }
            ExprKind::Concat(parts) => {
                let mut text = String::new();
                for part in self.eval_all(parts, scope)? {
                    text.push_str(&part.to_text()?);
                    self.check_text(text.len())?;
                }
                self.reserve_text(text.len())?;
                Value::from(text)
            }
            ExprKind::And(operands) => self.first_that(operands, scope, false)?,
            ExprKind::Or(operands) => self.first_that(operands, scope, true)?,
            ExprKind::Compare(first, rest) => self.compare(first, rest, scope)?,
            ExprKind::Condition {
                test,
                then,
                otherwise,
            } => match (self.eval(test, scope)?.is_true(), otherwise) {
                (true, _) => self.eval(then, scope)?,
                (false, Some(otherwise)) => self.eval(otherwise, scope)?,
                (false, None) => Value::undefined(
                    "the inline if-expression evaluated to false and no else section was defined",
                ),
            },
            ExprKind::Suffixes(value, suffixes) => {
                let mut value = self.eval(value, scope)?;
                for (line, suffix) in suffixes {
                    value = self
                        .suffix(value, suffix, scope)
                        .map_err(|error| error.at(*line))?;
                }
                value
            }
        })
    }

    /// Returns the first operand whose truth value is `wanted`, or else the last operand.
    pub(super) fn first_that(
        &mut self,
        operands: &[Expr],
        scope: &Rc<Scope>,
        wanted: bool,
    ) -> Result<Value> {
        let mut value = Value::None;
        for operand in operands {
            value = self.eval(operand, scope)?;
            if value.is_true() == wanted {
                break;
            }
        }
        Ok(value)
    }

    pub(super) fn compare(
        &mut self,
        first: &Expr,
        rest: &[(CompareOperator, Expr)],
        scope: &Rc<Scope>,
    ) -> Result<Value> {
        let mut left = self.eval(first, scope)?;
        for (operator, right) in rest {
            let right = self.eval(right, scope)?;
            if !operators::compare(self, *operator, &left, &right)? {
                return Ok(Value::Bool(false));
            }
            left = right;
        }
        Ok(Value::Bool(true))
    }

    pub(super) fn suffix(
        &mut self,
        value: Value,
        suffix: &Suffix,
        scope: &Rc<Scope>,
    ) -> Result<Value> {
        self.step()?;
        match suffix {
            Suffix::Attribute(name) => self.attribute(&value, name),
            Suffix::Item(key) => {
                let key = self.eval(key, scope)?;
                self.item(&value, &key)
            }
            Suffix::Slice(bounds) => {
                let mut values = [Value::None, Value::None, Value::None];
                for (place, bound) in values.iter_mut().zip(bounds) {
                    if let Some(bound) = bound {
                        *place = self.eval(bound, scope)?;
                    }
                }
                operators::slice(self, &value, values)
            }
            Suffix::Call(arguments) => {
                let args = self.arguments(arguments, scope)?;
                self.call(&value, args)
            }
            Suffix::Filter(name, arguments) => {
                let args = self.arguments(arguments, scope)?;
                filters::call(self, name, value, args)
            }
            Suffix::Test {
                name,
                arguments,
                negated,
            } => {
                let args = self.arguments(arguments, scope)?;
                let is = predicates::call(self, name, value, args)?;
                Ok(Value::Bool(is != *negated))
            }
        }
    }

    /// Returns `value.name`: an attribute, or else an item.
    pub(crate) fn attribute(&mut self, value: &Value, name: &str) -> Result<Value> {
        if let Some(found) = methods::attribute(self, value, name)? {
            return Ok(match name.starts_with('_') {
                true => methods::unsafe_undefined(value, name),
                false => found,
            });
        }
        let key = Value::from(name);
        match operators::item(value, &key) {
            Err(error) if is_missing(&error) => Ok(missing(value, &key)),
            other => other,
        }
    }

    /// Returns `value[key]`: an item, or else an attribute.
    pub(crate) fn item(&mut self, value: &Value, key: &Value) -> Result<Value> {
        self.read_text(value);
        self.read_key(key);
        match operators::item(value, key) {
            Err(error) if is_missing(&error) => {}
            other => return other,
        }
        if let Some(name) = key.as_str()
            && let Some(found) = methods::attribute(self, value, name)?
        {
            return Ok(match name.starts_with('_') {
                true => methods::unsafe_undefined(value, name),
                false => found,
            });
        }
        Ok(missing(value, key))
    }

    /// Returns the elements of a value.
    pub(crate) fn collect(&mut self, value: &Value) -> Result<Vec<Value>> {
        let mut elements = Elements::new(value)?;
        let mut items = Vec::new();
        while let Some(item) = elements.next(self)? {
            items.push(item);
        }
        self.reserve(items.len())?;
        Ok(items)
    }
}

/// Returns `true` for the exceptions of Python that jinja2 catches to return an undefined value.
fn is_missing(error: &Error) -> bool {
    matches!(error.kind, ErrorKind::Type | ErrorKind::Lookup)
}

fn missing(value: &Value, key: &Value) -> Value {
    let of = match value {
        Value::None => "None".to_owned(),
        value => format!("{} object", value.type_name()),
    };
    match key {
        Value::Str(key) => Value::undefined(format!("'{of}' has no attribute '{}'", key.text)),
        key => Value::undefined(format!("{of} has no element {}", key.named())),
    }
}
