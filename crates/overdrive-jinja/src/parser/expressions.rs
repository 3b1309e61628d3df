//! Expressions, by their precedences.

use super::Parser;
use super::macros::Use;
use crate::ast::{CompareOperator, Expr, ExprKind, MathOperator};
use crate::error::Result;
use crate::lexer::Token;
use crate::limits::MAX_NESTING;

impl Parser {
    /// Parses an expression, or a tuple of expressions without parentheses.
    pub(super) fn tuple(&mut self, with_condition: bool, ends_at_recursive: bool) -> Result<Expr> {
        let line = self.line();
        let (mut items, mut is_tuple) = (Vec::new(), false);
        loop {
            let ends = matches!(self.peek(), Token::PrintEnd | Token::BlockEnd)
                || self.is_operator(")")
                || ends_at_recursive && self.is_name("recursive");
            if ends {
                break;
            }
            items.push(match with_condition {
                true => self.expression()?,
                false => self.nested(Self::or)?,
            });
            if !self.skip_operator(",") {
                break;
            }
            is_tuple = true;
        }
        match (is_tuple, items.pop()) {
            (false, Some(item)) => Ok(item),
            (false, None) => self.unexpected("an expression"),
            (true, last) => {
                items.extend(last);
                let kind = ExprKind::Tuple(items);
                Ok(Expr { line, kind })
            }
        }
    }

    pub(super) fn expression(&mut self) -> Result<Expr> {
        self.nested(Self::condition)
    }

    pub(super) fn condition(&mut self) -> Result<Expr> {
        let (line, known) = (self.line(), self.unknown.len());
        let mut value = self.or()?;
        let mut conditions = 0;
        while self.skip_name("if") {
            conditions += 1;
            if self.nesting + conditions > MAX_NESTING {
                return self.fail("it has too many conditions in one expression");
            }
            let test = Box::new(self.or()?);
            let otherwise = match self.skip_name("else") {
                true => Some(Box::new(self.expression()?)),
                false => None,
            };
            let kind = ExprKind::Condition {
                test,
                then: Box::new(value),
                otherwise,
            };
            value = Expr { line, kind };
            self.unknown.truncate(known);
        }
        Ok(value)
    }

    /// Parses operands that are joined by `and` or `or`.
    pub(super) fn words(
        &mut self,
        word: &str,
        operand: fn(&mut Self) -> Result<Expr>,
        kind: fn(Vec<Expr>) -> ExprKind,
    ) -> Result<Expr> {
        let line = self.line();
        let first = operand(self)?;
        if !self.is_name(word) {
            return Ok(first);
        }
        let mut operands = vec![first];
        while self.skip_name(word) {
            operands.push(operand(self)?);
        }
        let kind = kind(operands);
        Ok(Expr { line, kind })
    }

    pub(super) fn or(&mut self) -> Result<Expr> {
        self.words("or", Self::and, ExprKind::Or)
    }

    pub(super) fn and(&mut self) -> Result<Expr> {
        self.words("and", Self::not, ExprKind::And)
    }

    pub(super) fn not(&mut self) -> Result<Expr> {
        let line = self.line();
        if !self.skip_name("not") {
            return self.compare();
        }
        let kind = ExprKind::Not(Box::new(self.nested(Self::not)?));
        Ok(Expr { line, kind })
    }

    pub(super) fn compare(&mut self) -> Result<Expr> {
        let line = self.line();
        let first = self.sum()?;
        let mut rest = Vec::new();
        loop {
            let operator = match self.peek() {
                Token::Operator("==") => CompareOperator::Equal,
                Token::Operator("!=") => CompareOperator::NotEqual,
                Token::Operator("<") => CompareOperator::Less,
                Token::Operator("<=") => CompareOperator::LessOrEqual,
                Token::Operator(">") => CompareOperator::Greater,
                Token::Operator(">=") => CompareOperator::GreaterOrEqual,
                Token::Name(name) if name == "in" => CompareOperator::In,
                Token::Name(name)
                    if name == "not"
                        && matches!(self.peek_second(), Token::Name(word) if word == "in") =>
                {
                    self.next();
                    CompareOperator::NotIn
                }
                _ => break,
            };
            self.next();
            rest.push((operator, self.sum()?));
        }
        if rest.is_empty() {
            return Ok(first);
        }
        let kind = ExprKind::Compare(Box::new(first), rest);
        Ok(Expr { line, kind })
    }

    /// Parses operands that are joined by operators of one precedence.
    pub(super) fn math(
        &mut self,
        operators: &[(&str, MathOperator)],
        operand: fn(&mut Self) -> Result<Expr>,
    ) -> Result<Expr> {
        let line = self.line();
        let first = operand(self)?;
        let mut rest = Vec::new();
        while let Token::Operator(symbol) = self.peek()
            && let Some((_, operator)) = operators.iter().find(|(known, _)| known == symbol)
        {
            self.next();
            rest.push((*operator, operand(self)?));
        }
        if rest.is_empty() {
            return Ok(first);
        }
        let kind = ExprKind::Math(Box::new(first), rest);
        Ok(Expr { line, kind })
    }

    pub(super) fn sum(&mut self) -> Result<Expr> {
        let operators = [("+", MathOperator::Add), ("-", MathOperator::Subtract)];
        self.math(&operators, Self::concat)
    }

    pub(super) fn concat(&mut self) -> Result<Expr> {
        let line = self.line();
        let first = self.product()?;
        if !self.is_operator("~") {
            return Ok(first);
        }
        let mut parts = vec![first];
        while self.skip_operator("~") {
            parts.push(self.product()?);
        }
        let kind = ExprKind::Concat(parts);
        Ok(Expr { line, kind })
    }

    pub(super) fn product(&mut self) -> Result<Expr> {
        let operators = [
            ("*", MathOperator::Multiply),
            ("/", MathOperator::Divide),
            ("//", MathOperator::FloorDivide),
            ("%", MathOperator::Remainder),
        ];
        self.math(&operators, Self::power)
    }

    pub(super) fn power(&mut self) -> Result<Expr> {
        self.math(&[("**", MathOperator::Power)], |parser| parser.unary(true))
    }

    pub(super) fn unary(&mut self, with_filters: bool) -> Result<Expr> {
        let line = self.line();
        let negative = self.is_operator("-");
        let value = if negative || self.is_operator("+") {
            self.next();
            let inner = Box::new(self.nested(|parser| parser.unary(false))?);
            let kind = match negative {
                true => ExprKind::Negative(inner),
                false => ExprKind::Positive(inner),
            };
            Expr { line, kind }
        } else {
            self.primary()?
        };
        self.suffixes(value, with_filters)
    }

    pub(super) fn primary(&mut self) -> Result<Expr> {
        let line = self.line();
        let kind = match self.peek().clone() {
            Token::Name(name) => match name.as_str() {
                "true" | "True" => {
                    self.next();
                    ExprKind::Bool(true)
                }
                "false" | "False" => {
                    self.next();
                    ExprKind::Bool(false)
                }
                "none" | "None" => {
                    self.next();
                    ExprKind::None
                }
                _ => {
                    let name = self.expect_name()?;
                    self.note(&name, Use::Read);
                    ExprKind::Name(name)
                }
            },
            Token::Str(first) => {
                self.next();
                let mut text = first;
                while let Token::Str(more) = self.peek() {
                    text.push_str(more);
                    self.next();
                }
                ExprKind::Str(text.into())
            }
            Token::Int(value) => {
                self.next();
                ExprKind::Int(value)
            }
            Token::Float(value) => {
                self.next();
                ExprKind::Float(value)
            }
            Token::Operator("(") => {
                self.next();
                if self.skip_operator(")") {
                    ExprKind::Tuple(Vec::new())
                } else {
                    let inner = self.tuple(true, false)?;
                    self.expect_operator(")")?;
                    return Ok(inner);
                }
            }
            Token::Operator("[") => {
                self.next();
                ExprKind::List(self.items("]", Self::expression)?)
            }
            Token::Operator("{") => {
                self.next();
                ExprKind::Dict(self.items("}", |parser| {
                    let key = parser.expression()?;
                    parser.expect_operator(":")?;
                    Ok((key, parser.expression()?))
                })?)
            }
            _ => return self.unexpected("an expression"),
        };
        Ok(Expr { line, kind })
    }

    /// Parses items that are separated by commas, and the closing bracket.
    pub(super) fn items<T>(
        &mut self,
        close: &str,
        mut item: impl FnMut(&mut Self) -> Result<T>,
    ) -> Result<Vec<T>> {
        let mut items = Vec::new();
        while !self.is_operator(close) {
            if !items.is_empty() {
                self.expect_operator(",")?;
                if self.is_operator(close) {
                    break;
                }
            }
            items.push(item(self)?);
        }
        self.expect_operator(close)?;
        Ok(items)
    }
}
