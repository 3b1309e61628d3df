//! Targets of assignments.

use super::Parser;
use super::macros::Use;
use crate::ast::{Name, Target};
use crate::error::Result;
use crate::lexer::Token;

impl Parser {
    pub(super) fn assignable(&mut self) -> Result<Name> {
        let name = self.expect_name()?;
        if matches!(
            &*name,
            "true" | "false" | "none" | "True" | "False" | "None"
        ) {
            return self.fail(format!("can't assign to '{name}'"));
        }
        self.written(&name);
        Ok(name)
    }

    pub(super) fn target(&mut self, with_attributes: bool) -> Result<Target> {
        let mut targets = Vec::new();
        let mut is_tuple = false;
        loop {
            let ends = matches!(self.peek(), Token::BlockEnd) || self.is_operator(")");
            if !targets.is_empty() && (ends || self.is_name("in")) {
                break;
            }
            targets.push(self.nested(|parser| parser.single_target(with_attributes))?);
            if !self.skip_operator(",") {
                break;
            }
            is_tuple = true;
        }
        match (is_tuple, targets.pop()) {
            (false, Some(target)) => Ok(target),
            (_, last) => {
                targets.extend(last);
                Ok(Target::Tuple(targets))
            }
        }
    }

    pub(super) fn single_target(&mut self, with_attributes: bool) -> Result<Target> {
        if self.skip_operator("(") {
            let target = self.target(false)?;
            self.expect_operator(")")?;
            return Ok(target);
        }
        if with_attributes
            && let (Token::Name(name), Token::Operator(".")) = (self.peek(), self.peek_second())
        {
            let name = Name::from(name.as_str());
            self.next();
            self.next();
            self.note(&name, Use::Read);
            return Ok(Target::Attribute(name, self.expect_name()?));
        }
        Ok(Target::Name(self.assignable()?))
    }
}
