//! The evaluation of statements.

use std::rc::Rc;
use std::sync::Arc;

use super::Runtime;
use super::scope::Scope;
use crate::ast::{For, Name, Statement, StatementKind, Suffix, Target};
use crate::error::{Error, Result};
use crate::limits::check_names;
use crate::objects::{Loop, Object, refuse_mutable};
use crate::value::{Elements, Value};

/// The way in which a statement ended.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Flow {
    Next,
    Break,
    Continue,
}

impl Runtime {
    pub(super) fn run(&mut self, body: &[Statement], scope: &Rc<Scope>) -> Result<Flow> {
        for statement in body {
            self.step().map_err(|error| error.at(statement.line))?;
            let flow = self
                .deeper(|runtime| runtime.statement(&statement.kind, scope))
                .map_err(|error| error.at(statement.line))?;
            if flow != Flow::Next {
                return Ok(flow);
            }
        }
        Ok(Flow::Next)
    }

    pub(super) fn statement(
        &mut self,
        statement: &StatementKind,
        scope: &Rc<Scope>,
    ) -> Result<Flow> {
        match statement {
            StatementKind::Data(text) => self.write(text)?,
            StatementKind::Print(value) => {
                let text = self.eval(value, scope)?.to_text()?;
                self.write(&text)?;
            }
            StatementKind::For(node) => {
                let iterable = self.eval(&node.iterable, scope)?;
                let flow = match node.recursive {
                    false => self.run_loop(node, &iterable, scope, 0)?,
                    true => {
                        let (text, flow) =
                            self.capture(|runtime| runtime.run_loop(node, &iterable, scope, 0))?;
                        self.write(&text)?;
                        flow
                    }
                };
                return Ok(flow);
            }
            StatementKind::If {
                branches,
                otherwise,
            } => {
                for (test, body) in branches {
                    if self.eval(test, scope)?.is_true() {
                        return self.run(body, scope);
                    }
                }
                return self.run(otherwise, scope);
            }
            StatementKind::Set(target, value) => {
                self.check_namespaces(target, scope)?;
                let value = self.eval(value, scope)?;
                self.assign(target, value, scope)?;
            }
            StatementKind::SetBlock {
                target,
                filters,
                body,
            } => {
                self.check_namespaces(target, scope)?;
                let inner = Scope::within(scope);
                let (text, flow) = self.captured(body, &inner)?;
                if flow != Flow::Next {
                    return Ok(flow);
                }
                let value = self.filtered(text, filters, &inner)?;
                self.assign(target, value, scope)?;
            }
            StatementKind::With(pairs, body) => {
                let inner = Scope::within(scope);
                for (target, value) in pairs {
                    let value = self.eval(value, scope)?;
                    self.assign(target, value, &inner)?;
                }
                return self.run(body, &inner);
            }
            StatementKind::Macro(definition) => {
                let value = self.new_macro(definition, scope)?;
                if let Some(name) = &definition.name {
                    scope.set(name, value);
                }
            }
            StatementKind::Call(definition, call) => {
                let caller = self.new_macro(definition, scope)?;
                let text = self.call_with_caller(call, caller, scope)?.to_text()?;
                self.write(&text)?;
            }
            StatementKind::Filter(filters, body) => {
                let inner = Scope::within(scope);
                let (text, flow) = self.captured(body, &inner)?;
                if flow != Flow::Next {
                    return Ok(flow);
                }
                let text = self.filtered(text, filters, &inner)?.to_text()?;
                self.write(&text)?;
            }
            StatementKind::Block { body, scoped } => {
                let parent = if *scoped { scope } else { &self.root };
                let inner = Scope::within(parent);
                self.run(body, &inner)?;
            }
            StatementKind::Generation(body) => {
                let inner = Scope::within(scope);
                let (text, _) = self.captured(body, &inner)?;
                let text = match self.marks {
                    Some((begin, end)) => format!("{begin}{text}{end}"),
                    None => text,
                };
                self.write(&text)?;
            }
            StatementKind::Break => return Ok(Flow::Break),
            StatementKind::Continue => return Ok(Flow::Continue),
            StatementKind::OtherTemplate => {
                return Err(Error::runtime(
                    "there are no other templates to include, import or extend",
                ));
            }
        }
        Ok(Flow::Next)
    }

    pub(super) fn run_loop(
        &mut self,
        node: &Arc<For>,
        iterable: &Value,
        scope: &Rc<Scope>,
        depth0: usize,
    ) -> Result<Flow> {
        let selected;
        let iterable = match &node.test {
            None => iterable,
            Some(test) => {
                let mut kept = Vec::new();
                let mut elements = Elements::new(iterable)?;
                while let Some(item) = elements.next(self)? {
                    let inner = Scope::within(scope);
                    self.assign(&node.target, item.clone(), &inner)?;
                    if self.eval(test, &inner)?.is_true() {
                        kept.push(item);
                    }
                }
                self.reserve(kept.len())?;
                selected = Value::list(kept)?;
                &selected
            }
        };
        let recursion = node.recursive.then(|| (node.clone(), scope.clone()));
        let state = Rc::new(Object::Loop(Box::new(Loop::new(
            iterable, recursion, depth0,
        )?)));
        let Object::Loop(state_of_loop) = &*state else {
            return Ok(Flow::Next);
        };
        let name = Name::from("loop");
        // jinja2 runs `else` unless one iteration has reached the end of the body, so `continue` in all of them runs it.
        let mut finished_one = false;
        while let Some(item) = state_of_loop.advance(self)? {
            let inner = Scope::within(scope);
            inner.set(&name, Value::Object(state.clone()));
            self.assign(&node.target, item, &inner)?;
            match self.run(&node.body, &inner)? {
                Flow::Next => finished_one = true,
                Flow::Continue => {}
                Flow::Break => break,
            }
        }
        if !finished_one {
            return self.run(&node.otherwise, &Scope::within(scope));
        }
        Ok(Flow::Next)
    }

    /// Passes a captured text through filters.
    pub(super) fn filtered(
        &mut self,
        text: String,
        filters: &[(u32, Suffix)],
        scope: &Rc<Scope>,
    ) -> Result<Value> {
        let mut value = Value::from(text);
        for (line, filter) in filters {
            value = self
                .suffix(value, filter, scope)
                .map_err(|error| error.at(*line))?;
        }
        Ok(value)
    }

    pub(super) fn check_namespaces(&mut self, target: &Target, scope: &Rc<Scope>) -> Result<()> {
        match target {
            Target::Name(_) => Ok(()),
            Target::Tuple(targets) => targets
                .iter()
                .try_for_each(|target| self.check_namespaces(target, scope)),
            Target::Attribute(name, _) => match self.variable(name, scope) {
                Value::Object(object) if matches!(&*object, Object::Namespace(_)) => Ok(()),
                _ => Err(Error::runtime(
                    "cannot assign attribute on non-namespace object",
                )),
            },
        }
    }

    pub(super) fn assign(
        &mut self,
        target: &Target,
        value: Value,
        scope: &Rc<Scope>,
    ) -> Result<()> {
        match target {
            Target::Name(name) => scope.set(name, value),
            Target::Attribute(name, attribute) => {
                let Value::Object(object) = self.variable(name, scope) else {
                    return Ok(());
                };
                if let Object::Namespace(attributes) = &*object {
                    refuse_mutable(
                        std::slice::from_ref(&value),
                        "assigned to an attribute of a namespace",
                    )?;
                    let mut attributes = attributes.borrow_mut();
                    match attributes.iter_mut().find(|(known, _)| known == attribute) {
                        Some((_, place)) => *place = value,
                        None => {
                            check_names(attributes.len() + 1)?;
                            attributes.push((attribute.clone(), value));
                        }
                    }
                }
            }
            Target::Tuple(targets) => {
                value.check_defined_for_unpacking()?;
                let mut elements = Elements::new(&value)?;
                let mut items = Vec::with_capacity(targets.len());
                while let Some(item) = elements.next(self)? {
                    if items.len() == targets.len() {
                        return Err(Error::value(format!(
                            "too many values to unpack (expected {})",
                            targets.len()
                        )));
                    }
                    items.push(item);
                }
                if items.len() < targets.len() {
                    return Err(Error::value(format!(
                        "not enough values to unpack (expected {}, got {})",
                        targets.len(),
                        items.len()
                    )));
                }
                for (target, item) in targets.iter().zip(items) {
                    self.assign(target, item, scope)?;
                }
            }
        }
        Ok(())
    }
}

impl Value {
    /// Returns an error unless the value can be unpacked; an undefined value unpacks as an empty sequence.
    fn check_defined_for_unpacking(&self) -> Result<()> {
        Elements::new(self).map(drop).map_err(|_| {
            Error::type_error(format!(
                "cannot unpack non-iterable {} object",
                self.type_name()
            ))
        })
    }
}
