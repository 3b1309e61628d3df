use std::cell::RefCell;
use std::collections::HashMap;
use std::rc::Rc;

use crate::ast::Name;
use crate::value::Value;

/// The variables of a block of statements, within the scope around it.
#[derive(Debug, Default)]
pub(crate) struct Scope {
    pub(super) variables: RefCell<HashMap<Name, Value>>,
    parent: Option<Rc<Scope>>,
}

impl Scope {
    pub(super) fn within(parent: &Rc<Scope>) -> Rc<Scope> {
        Rc::new(Scope {
            variables: RefCell::default(),
            parent: Some(parent.clone()),
        })
    }

    pub(super) fn set(&self, name: &Name, value: Value) {
        self.variables.borrow_mut().insert(name.clone(), value);
    }

    pub(super) fn get(&self, name: &str) -> Option<Value> {
        let mut scope = self;
        loop {
            if let Some(value) = scope.variables.borrow().get(name) {
                return Some(value.clone());
            }
            scope = scope.parent.as_deref()?;
        }
    }
}
