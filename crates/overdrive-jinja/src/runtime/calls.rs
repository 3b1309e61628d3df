//! Calls of functions, methods, macros and recursive loops.

use std::rc::Rc;
use std::sync::Arc;

use super::Runtime;
use super::scope::Scope;
use crate::args::Args;
use crate::ast::{Arguments, Expr, ExprKind, Macro, Suffix};
use crate::error::{Error, Result};
use crate::limits::check_names;
use crate::methods;
use crate::objects::Object;
use crate::value::Value;

impl Runtime {
    pub(super) fn new_macro(
        &mut self,
        definition: &Arc<Macro>,
        scope: &Rc<Scope>,
    ) -> Result<Value> {
        if !self.kept.last().is_some_and(|last| Rc::ptr_eq(last, scope)) {
            // A kept scope is freed only at the end of the rendering, so it counts.
            self.reserve(16)?;
            self.kept.push(scope.clone());
        }
        Ok(Value::Object(Rc::new(Object::Macro {
            definition: definition.clone(),
            scope: scope.clone(),
        })))
    }

    pub(super) fn arguments(&mut self, arguments: &Arguments, scope: &Rc<Scope>) -> Result<Args> {
        let mut positional = self.eval_all(&arguments.positional, scope)?;
        let mut named = Vec::with_capacity(arguments.named.len());
        for (name, value) in &arguments.named {
            named.push((name.clone(), self.eval(value, scope)?));
        }
        if let Some(more) = &arguments.more_positional {
            let more = self.eval(more, scope)?;
            positional.extend(self.collect(&more)?);
        }
        if let Some(more) = &arguments.more_named {
            let more = self.eval(more, scope)?;
            let Value::Dict(more) = &more else {
                return Err(Error::type_error("argument after ** must be a mapping"));
            };
            check_names(more.entries.len())?;
            for (key, value) in &more.entries {
                let Value::Str(key) = key else {
                    return Err(Error::type_error("keywords must be strings"));
                };
                if named.iter().any(|(known, _)| **known == *key.text) {
                    return Err(Error::type_error(format!(
                        "got multiple values for keyword argument '{}'",
                        key.text
                    )));
                }
                named.push((key.text.clone(), value.clone()));
            }
        }
        Ok(Args { positional, named })
    }

    /// Evaluates the expression of a `call` tag; its last suffix is the call, which gets the argument `caller`.
    pub(super) fn call_with_caller(
        &mut self,
        call: &Expr,
        caller: Value,
        scope: &Rc<Scope>,
    ) -> Result<Value> {
        let ExprKind::Suffixes(value, suffixes) = &call.kind else {
            return Err(Error::runtime("expected a call"));
        };
        let mut value = self.eval(value, scope)?;
        for (number, (line, suffix)) in suffixes.iter().enumerate() {
            let is_last = number + 1 == suffixes.len();
            value = match suffix {
                Suffix::Call(arguments) if is_last => {
                    let mut args = self.arguments(arguments, scope)?;
                    args.named.push(("caller".into(), caller.clone()));
                    self.call(&value, args)
                }
                suffix => self.suffix(value, suffix, scope),
            }
            .map_err(|error| error.at(*line))?;
        }
        Ok(value)
    }

    /// Calls a value.
    pub(crate) fn call(&mut self, value: &Value, args: Args) -> Result<Value> {
        value.check_defined()?;
        args.positional.iter().for_each(|arg| self.read_key(arg));
        let Value::Object(object) = value else {
            return Err(not_callable(value));
        };
        match &**object {
            Object::Method { receiver, name, .. } => methods::call(self, receiver, name, args),
            Object::Global(global) => global.call(self, args),
            Object::Joiner { separator, is_used } => {
                args.none("joiner")?;
                Ok(match is_used.replace(true) {
                    true => separator.clone(),
                    false => Value::from(""),
                })
            }
            Object::Loop(state) => {
                let Some((node, scope)) = state.recursion.clone() else {
                    return Err(Error::type_error(
                        "the loop must have the 'recursive' marker to be called recursively",
                    ));
                };
                let [iterable] = args.unnamed("loop", 1)?;
                let iterable = iterable.unwrap_or(Value::None);
                let depth = state.depth0 + 1;
                let (text, _) =
                    self.capture(|runtime| runtime.run_loop(&node, &iterable, &scope, depth))?;
                self.reserve_text(text.len())?;
                Ok(Value::from(text))
            }
            Object::Macro { definition, scope } => {
                let (definition, scope) = (definition.clone(), scope.clone());
                self.deeper(|runtime| runtime.call_macro(&definition, &scope, args))
            }
            Object::Namespace(_) | Object::Cycler { .. } => Err(not_callable(value)),
        }
    }

    pub(super) fn call_macro(
        &mut self,
        definition: &Macro,
        scope: &Rc<Scope>,
        args: Args,
    ) -> Result<Value> {
        let name = definition.name.as_deref().unwrap_or("caller");
        let Macro {
            parameters,
            defaults,
            uses,
            ..
        } = definition;
        let Args {
            mut positional,
            mut named,
        } = args;
        let more = positional.split_off(positional.len().min(parameters.len()));
        let inner = Scope::within(scope);
        let mut take = |name: &str| {
            let at = named.iter().position(|(known, _)| **known == *name)?;
            Some(named.remove(at).1)
        };
        let has_caller = parameters.iter().any(|parameter| &**parameter == "caller");
        let mut given: Vec<Option<Value>> = positional.into_iter().map(Some).collect();
        for parameter in &parameters[given.len()..] {
            given.push(take(parameter));
        }
        if uses.caller && !has_caller {
            let caller = take("caller").filter(|caller| !caller.is_none());
            let caller = caller.unwrap_or_else(|| Value::undefined("No caller defined"));
            inner.set(&"caller".into(), caller);
        }
        if uses.kwargs {
            let pairs = named.drain(..);
            let pairs = pairs.map(|(name, value)| (Value::from(name), value));
            inner.set(&"kwargs".into(), Value::dict(pairs.collect::<Vec<_>>())?);
        } else if let Some((unknown, _)) = named.first() {
            return Err(Error::type_error(format!(
                "macro '{name}' takes no keyword argument '{unknown}'"
            )));
        }
        if uses.varargs {
            inner.set(&"varargs".into(), Value::tuple(more)?);
        } else if !more.is_empty() {
            return Err(Error::type_error(format!(
                "macro '{name}' takes not more than {} argument(s)",
                parameters.len()
            )));
        }
        let without_default = parameters.len() - defaults.len();
        for (at, (parameter, value)) in parameters.iter().zip(given).enumerate() {
            let value = match (value, at.checked_sub(without_default)) {
                (Some(value), _) => value,
                (None, Some(default)) => self.eval(&defaults[default], &inner)?,
                (None, None) => {
                    Value::undefined(format!("parameter '{parameter}' was not provided"))
                }
            };
            inner.set(parameter, value);
        }
        let (text, _) = self.captured(&definition.body, &inner)?;
        self.reserve_text(text.len())?;
        Ok(Value::from(text))
    }
}

fn not_callable(value: &Value) -> Error {
    Error::type_error(format!("'{}' object is not callable", value.type_name()))
}
