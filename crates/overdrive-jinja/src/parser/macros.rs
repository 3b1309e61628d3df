//! Macros, and the special names that their bodies read.

use std::sync::Arc;

use super::Parser;
use crate::ast::{Expr, ExprKind, Macro, Name, SpecialNames, StatementKind, Suffix};
use crate::error::Result;
use crate::limits::check_names;

/// The first use of a name in the body of a macro.
#[derive(Clone, Copy, PartialEq)]
pub(super) enum Use {
    None,
    Read,
    Written,
}

pub(super) const SPECIAL: [&str; 3] = ["caller", "kwargs", "varargs"];

impl Parser {
    pub(super) fn macro_(&mut self) -> Result<StatementKind> {
        let name = self.expect_name()?;
        self.written(&name);
        self.frame(|parser| {
            let (parameters, defaults) = parser.parameters()?;
            let definition = parser.macro_body(Some(name), parameters, defaults, "endmacro")?;
            Ok(StatementKind::Macro(Arc::new(definition)))
        })
    }

    pub(super) fn call_block(&mut self) -> Result<StatementKind> {
        let (parameters, defaults) = match self.is_operator("(") {
            true => self.parameters()?,
            false => Default::default(),
        };
        let call = self.expression()?;
        let is_call = match &call.kind {
            ExprKind::Suffixes(_, suffixes) => {
                matches!(suffixes.last(), Some((_, Suffix::Call(_))))
            }
            _ => false,
        };
        if !is_call {
            return self.fail("expected a call");
        }
        self.frame(|parser| {
            let definition = parser.macro_body(None, parameters, defaults, "endcall")?;
            Ok(StatementKind::Call(Arc::new(definition), call))
        })
    }

    pub(super) fn parameters(&mut self) -> Result<(Vec<Name>, Vec<Expr>)> {
        let (mut names, mut defaults) = (Vec::new(), Vec::new());
        self.expect_operator("(")?;
        while !self.is_operator(")") {
            if !names.is_empty() {
                self.expect_operator(",")?;
            }
            let name = self.assignable()?;
            if names.contains(&name) {
                return self.fail(format!("duplicate argument '{name}'"));
            }
            names.push(name);
            check_names(names.len())?;
            if self.skip_operator("=") {
                defaults.push(self.expression()?);
            } else if !defaults.is_empty() {
                return self.fail("non-default argument follows default argument");
            }
        }
        self.expect_operator(")")?;
        Ok((names, defaults))
    }

    pub(super) fn macro_body(
        &mut self,
        name: Option<Name>,
        parameters: Vec<Name>,
        defaults: Vec<Expr>,
        end: &str,
    ) -> Result<Macro> {
        self.macros.push([Use::None; 3]);
        let loops = std::mem::take(&mut self.loops);
        let body = self.body_to(end)?;
        self.loops = loops;
        let used = self.macros.pop().unwrap_or([Use::None; 3]);
        let [caller, kwargs, varargs] = [0, 1, 2].map(|at| used[at] == Use::Read);
        let is_parameter = |name: &str| parameters.iter().position(|known| **known == *name);
        if let (true, Some(at)) = (caller, is_parameter("caller"))
            && at < parameters.len() - defaults.len()
        {
            return self.fail("the special argument \"caller\" must be omitted or have a default");
        }
        Ok(Macro {
            uses: SpecialNames {
                caller,
                kwargs: kwargs && is_parameter("kwargs").is_none(),
                varargs: varargs && is_parameter("varargs").is_none(),
            },
            name,
            parameters,
            defaults,
            body,
        })
    }

    pub(super) fn note(&mut self, name: &str, what: Use) {
        if let Some(at) = SPECIAL.iter().position(|special| *special == name) {
            for uses in &mut self.macros {
                if uses[at] == Use::None {
                    uses[at] = what;
                }
            }
        }
    }

    pub(super) fn written(&mut self, name: &str) {
        self.note(name, Use::Written);
    }
}
