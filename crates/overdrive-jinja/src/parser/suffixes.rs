//! Suffixes of a value: attributes, items, calls, filters and tests.

use super::Parser;
use crate::ast::{Arguments, Expr, ExprKind, Name, Suffix};
use crate::error::Result;
use crate::lexer::Token;
use crate::limits::check_names;
use crate::{filters, predicates};

impl Parser {
    /// Parses attributes, items and calls after a value, and filters and tests if they are allowed.
    pub(super) fn suffixes(&mut self, value: Expr, with_filters: bool) -> Result<Expr> {
        let mut suffixes = Vec::new();
        let mut after_filter = false;
        loop {
            let line = self.line();
            let suffix = match self.peek() {
                Token::Operator(".") if !after_filter => self.attribute()?,
                Token::Operator("[") if !after_filter => self.item()?,
                Token::Operator("(") => Suffix::Call(self.arguments()?),
                Token::Operator("|") if with_filters => {
                    self.next();
                    after_filter = true;
                    self.filter()?
                }
                Token::Name(name) if with_filters && name == "is" => {
                    after_filter = true;
                    self.test()?
                }
                _ => break,
            };
            suffixes.push((line, suffix));
        }
        if suffixes.is_empty() {
            return Ok(value);
        }
        Ok(Expr {
            line: value.line,
            kind: ExprKind::Suffixes(Box::new(value), suffixes),
        })
    }

    pub(super) fn attribute(&mut self) -> Result<Suffix> {
        self.next();
        let line = self.line();
        match self.peek() {
            Token::Name(_) => match self.next() {
                Token::Name(name) => Ok(Suffix::Attribute(name.as_str().into())),
                _ => self.unexpected("a name"),
            },
            Token::Int(index) => {
                let kind = ExprKind::Int(*index);
                self.next();
                Ok(Suffix::Item(Expr { line, kind }))
            }
            _ => self.unexpected("a name or a number"),
        }
    }

    pub(super) fn item(&mut self) -> Result<Suffix> {
        self.next();
        let line = self.line();
        if self.skip_operator("]") {
            let kind = ExprKind::Tuple(Vec::new());
            return Ok(Suffix::Item(Expr { line, kind }));
        }
        let first = self.subscript()?;
        if !self.is_operator(",") {
            self.expect_operator("]")?;
            return Ok(first);
        }
        let mut items = Vec::new();
        let mut next = Some(first);
        loop {
            match next.take() {
                Some(Suffix::Item(item)) => items.push(item),
                _ => return self.fail("a slice cannot be one of several indices"),
            }
            if !self.skip_operator(",") {
                break;
            }
            next = Some(self.subscript()?);
        }
        self.expect_operator("]")?;
        let kind = ExprKind::Tuple(items);
        Ok(Suffix::Item(Expr { line, kind }))
    }

    pub(super) fn subscript(&mut self) -> Result<Suffix> {
        let ends = |parser: &Self| parser.is_operator("]") || parser.is_operator(",");
        let start = match self.is_operator(":") {
            true => None,
            false => Some(self.expression()?),
        };
        if !self.skip_operator(":") {
            return match start {
                Some(item) => Ok(Suffix::Item(item)),
                None => self.unexpected("an index"),
            };
        }
        let bound = |parser: &mut Self| {
            let is_empty = ends(parser) || parser.is_operator(":");
            (!is_empty).then(|| parser.expression()).transpose()
        };
        let stop = bound(self)?;
        let step = match self.skip_operator(":") {
            true => bound(self)?,
            false => None,
        };
        Ok(Suffix::Slice([start, stop, step]))
    }

    /// Parses filters that follow, each after a `|`.
    pub(super) fn more_filters(&mut self, filters: &mut Vec<(u32, Suffix)>) -> Result<()> {
        while self.is_operator("|") {
            self.next();
            filters.push((self.line(), self.filter()?));
        }
        Ok(())
    }

    pub(super) fn dotted_name(&mut self) -> Result<String> {
        let mut name = self.expect_name()?.to_string();
        while self.skip_operator(".") {
            name = format!("{name}.{}", self.expect_name()?);
        }
        Ok(name)
    }

    pub(super) fn filter(&mut self) -> Result<Suffix> {
        let line = self.line();
        let name = self.dotted_name()?;
        if !filters::exists(&name) {
            let detail = format!("No filter named '{name}'.");
            self.unknown.push((line, detail));
        }
        let arguments = match self.is_operator("(") {
            true => self.arguments()?,
            false => Arguments::default(),
        };
        Ok(Suffix::Filter(name.into(), arguments))
    }

    pub(super) fn test(&mut self) -> Result<Suffix> {
        self.next();
        let negated = self.skip_name("not");
        let line = self.line();
        let name = self.dotted_name()?;
        if !predicates::exists(&name) {
            let detail = format!("No test named '{name}'.");
            self.unknown.push((line, detail));
        }
        let mut arguments = Arguments::default();
        match self.peek() {
            Token::Operator("(") => arguments = self.arguments()?,
            Token::Name(word) if word == "is" => {
                return self.fail("You cannot chain multiple tests with is");
            }
            Token::Name(word) if matches!(word.as_str(), "else" | "or" | "and") => {}
            Token::Name(_) | Token::Str(_) | Token::Int(_) | Token::Float(_) => {
                arguments.positional.push(self.test_argument()?);
            }
            Token::Operator("[" | "{") => arguments.positional.push(self.test_argument()?),
            _ => {}
        }
        Ok(Suffix::Test {
            name: name.into(),
            arguments,
            negated,
        })
    }

    /// Parses the argument of a test without parentheses.
    pub(super) fn test_argument(&mut self) -> Result<Expr> {
        self.nested(|parser| {
            let value = parser.primary()?;
            parser.suffixes(value, false)
        })
    }

    pub(super) fn arguments(&mut self) -> Result<Arguments> {
        self.expect_operator("(")?;
        let mut arguments = Arguments::default();
        let invalid = "invalid syntax for function call expression";
        let mut is_first = true;
        while !self.is_operator(")") {
            if !std::mem::take(&mut is_first) {
                self.expect_operator(",")?;
                if self.is_operator(")") {
                    break;
                }
            }
            let Arguments {
                named,
                more_positional,
                more_named,
                ..
            } = &arguments;
            let (has_named, has_more) = (!named.is_empty(), more_positional.is_some());
            let has_more_named = more_named.is_some();
            if self.is_operator("*") {
                if has_more || has_more_named {
                    return self.fail(invalid);
                }
                self.next();
                arguments.more_positional = Some(self.expression()?);
            } else if self.is_operator("**") {
                if has_more_named {
                    return self.fail(invalid);
                }
                self.next();
                arguments.more_named = Some(self.expression()?);
            } else if let (Token::Name(name), Token::Operator("=")) =
                (self.peek(), self.peek_second())
            {
                if has_more_named {
                    return self.fail(invalid);
                }
                let name = Name::from(name.as_str());
                if arguments.named.iter().any(|(known, _)| *known == name) {
                    return self.fail(format!("keyword argument repeated: {name}"));
                }
                self.next();
                self.next();
                let value = self.expression()?;
                arguments.named.push((name, value));
                check_names(arguments.named.len())?;
            } else {
                if has_more || has_more_named || has_named {
                    return self.fail(invalid);
                }
                arguments.positional.push(self.expression()?);
            }
        }
        self.expect_operator(")")?;
        Ok(arguments)
    }
}
