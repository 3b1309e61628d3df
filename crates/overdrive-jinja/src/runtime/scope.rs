use std::cell::RefCell;
use std::rc::Rc;

use crate::ast::Name;
use crate::value::Value;

/// The variables of a block of statements, within the scope around it.
#[derive(Debug, Default)]
pub(crate) struct Scope {
    pub(super) variables: RefCell<Vec<(Name, Value)>>,
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
        let mut variables = self.variables.borrow_mut();
        match variables.iter_mut().find(|(known, _)| known == name) {
            Some((_, place)) => *place = value,
            None => variables.push((name.clone(), value)),
        }
    }

    pub(super) fn get(&self, name: &str) -> Option<Value> {
        let mut scope = self;
        loop {
            let variables = scope.variables.borrow();
            if let Some((_, value)) = variables.iter().find(|(known, _)| **known == *name) {
                return Some(value.clone());
            }
            scope = scope.parent.as_deref()?;
        }
    }
}
