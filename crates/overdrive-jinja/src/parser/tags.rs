//! Tags: statements and their bodies.

use std::sync::Arc;

use super::Parser;
use crate::ast::{Expr, ExprKind, For, Statement, StatementKind, Target};
use crate::error::{Error, Result};
use crate::lexer::Token;

impl Parser {
    /// Parses statements up to a tag named in `ends`, whose name it leaves to the caller, or up to the end of the source.
    pub(super) fn body(&mut self, ends: &[&str]) -> Result<Vec<Statement>> {
        let mut statements = Vec::new();
        loop {
            let line = self.line();
            let kind = match self.peek() {
                Token::Data(_) => match self.next() {
                    Token::Data(data) => StatementKind::Data(data),
                    _ => return self.fail("text is expected"),
                },
                Token::PrintBegin => {
                    self.next();
                    let value = self.tuple(true, false)?;
                    match self.peek() {
                        Token::PrintEnd => self.next(),
                        _ => return self.unexpected("the end of the print statement"),
                    };
                    StatementKind::Print(value)
                }
                Token::BlockBegin => {
                    self.next();
                    if let Token::Name(name) = self.peek()
                        && ends.contains(&name.as_str())
                    {
                        return Ok(statements);
                    }
                    let kind = self.nested(Self::statement)?;
                    self.expect_block_end()?;
                    kind
                }
                Token::End if ends.is_empty() => return Ok(statements),
                Token::End => {
                    return self.fail(format!(
                        "unexpected end of the template; a tag is missing: {}",
                        ends.join(" or ")
                    ));
                }
                _ => return self.unexpected("text or a tag"),
            };
            statements.push(Statement { line, kind });
        }
    }

    /// Parses the rest of an opening tag and its body; returns the body and the name of the tag that ends it.
    pub(super) fn body_until(&mut self, ends: &[&str]) -> Result<(Vec<Statement>, String)> {
        // Jinja allows a colon, as in Python.
        self.skip_operator(":");
        self.expect_block_end()?;
        let body = self.body(ends)?;
        match self.next() {
            Token::Name(end) => Ok((body, end)),
            _ => self.unexpected("the name of a tag"),
        }
    }

    pub(super) fn body_to(&mut self, end: &str) -> Result<Vec<Statement>> {
        Ok(self.body_until(&[end])?.0)
    }

    pub(super) fn statement(&mut self) -> Result<StatementKind> {
        let Token::Name(name) = self.peek().clone() else {
            return self.unexpected("the name of a tag");
        };
        let line = self.line();
        self.next();
        match name.as_str() {
            "for" => self.for_(),
            "if" => self.if_(),
            "set" => self.set(),
            "with" => self.with(),
            "macro" => self.macro_(),
            "call" => self.call_block(),
            "filter" => {
                let filters = |parser: &mut Self| {
                    let mut filters = vec![(parser.line(), parser.filter()?)];
                    parser.more_filters(&mut filters)?;
                    let body = parser.body_to("endfilter")?;
                    Ok(StatementKind::Filter(filters, body))
                };
                self.frame(filters)
            }
            "print" => {
                let mut values = vec![self.expression()?];
                while self.skip_operator(",") {
                    values.push(self.expression()?);
                }
                let kind = ExprKind::Concat(values);
                Ok(StatementKind::Print(Expr { line, kind }))
            }
            "block" => self.block(),
            "generation" => {
                self.has_generation = true;
                // jinja2 compiles it to a function, so `break` within cannot leave a loop around it.
                let loops = std::mem::take(&mut self.loops);
                let body = self.frame(|parser| parser.body_to("endgeneration"))?;
                self.loops = loops;
                Ok(StatementKind::Generation(body))
            }
            "break" | "continue" if self.loops == 0 => {
                Err(Error::syntax(line, format!("'{name}' outside of a loop")))
            }
            "break" => Ok(StatementKind::Break),
            "continue" => Ok(StatementKind::Continue),
            "include" => {
                self.expression()?;
                if self.skip_name("ignore") {
                    self.expect_word("missing")?;
                }
                self.context()?;
                Ok(StatementKind::OtherTemplate)
            }
            "extends" => {
                self.expression()?;
                Ok(StatementKind::OtherTemplate)
            }
            "import" => {
                self.expression()?;
                self.expect_word("as")?;
                self.expect_name()?;
                self.context()?;
                Ok(StatementKind::OtherTemplate)
            }
            "from" => {
                self.expression()?;
                self.expect_word("import")?;
                loop {
                    self.expect_name()?;
                    if self.skip_name("as") {
                        self.expect_name()?;
                    }
                    self.context()?;
                    if !self.skip_operator(",") {
                        return Ok(StatementKind::OtherTemplate);
                    }
                }
            }
            "autoescape" => Err(Error::syntax(
                line,
                "the tag 'autoescape' is not supported: a prompt is not HTML",
            )),
            other => Err(Error::syntax(line, format!("unknown tag '{other}'"))),
        }
    }

    /// Skips `with context` and `without context`.
    pub(super) fn context(&mut self) -> Result<()> {
        if self.skip_name("with") || self.skip_name("without") {
            self.expect_word("context")?;
        }
        Ok(())
    }

    pub(super) fn for_(&mut self) -> Result<StatementKind> {
        let target = self.target(false)?;
        self.expect_word("in")?;
        let iterable = self.tuple(false, true)?;
        let parsed = self.frame(|parser| {
            let test = match parser.skip_name("if") {
                true => Some(parser.expression()?),
                false => None,
            };
            let recursive = parser.skip_name("recursive");
            parser.loops += 1;
            let (body, end) = parser.body_until(&["endfor", "else"])?;
            parser.loops -= 1;
            let otherwise = match end.as_str() {
                "else" => parser.body_to("endfor")?,
                _ => Vec::new(),
            };
            Ok(For {
                target,
                iterable,
                test,
                recursive,
                body,
                otherwise,
            })
        })?;
        if writes_loop(&parsed) {
            return self.fail("can't assign to the special variable 'loop' in a loop");
        }
        Ok(StatementKind::For(Arc::new(parsed)))
    }

    pub(super) fn if_(&mut self) -> Result<StatementKind> {
        let known = self.unknown.len();
        let mut branches = Vec::new();
        let otherwise = loop {
            let test = self.tuple(false, false)?;
            let (body, end) = self.body_until(&["elif", "else", "endif"])?;
            branches.push((test, body));
            match end.as_str() {
                "elif" => {}
                "else" => break self.body_to("endif")?,
                _ => break Vec::new(),
            }
        };
        self.unknown.truncate(known);
        Ok(StatementKind::If {
            branches,
            otherwise,
        })
    }

    pub(super) fn set(&mut self) -> Result<StatementKind> {
        let target = self.target(true)?;
        if self.skip_operator("=") {
            return Ok(StatementKind::Set(target, self.tuple(true, false)?));
        }
        self.frame(|parser| {
            let mut filters = Vec::new();
            parser.more_filters(&mut filters)?;
            let body = parser.body_to("endset")?;
            Ok(StatementKind::SetBlock {
                target,
                filters,
                body,
            })
        })
    }

    pub(super) fn with(&mut self) -> Result<StatementKind> {
        let mut pairs = Vec::new();
        while !matches!(self.peek(), Token::BlockEnd) {
            if !pairs.is_empty() {
                self.expect_operator(",")?;
            }
            let target = self.target(false)?;
            self.expect_operator("=")?;
            pairs.push((target, self.expression()?));
        }
        let body = self.frame(|parser| parser.body_to("endwith"))?;
        Ok(StatementKind::With(pairs, body))
    }

    pub(super) fn block(&mut self) -> Result<StatementKind> {
        let name = self.expect_name()?;
        if !self.blocks.insert(name.to_string()) {
            return self.fail(format!("block '{name}' defined twice"));
        }
        let scoped = self.skip_name("scoped");
        let required = self.skip_name("required");
        let loops = std::mem::take(&mut self.loops);
        let body = self.frame(|parser| parser.body_to("endblock"))?;
        self.loops = loops;
        if required {
            return self.fail(format!(
                "the block '{name}' is required, and nothing extends it"
            ));
        }
        self.skip_name(&name);
        Ok(StatementKind::Block { body, scoped })
    }
}

/// Returns `true` if something in a loop is assigned to `loop`.
fn writes_loop(parsed: &For) -> bool {
    let is_loop = |target: &Target| target_is(target, "loop");
    is_loop(&parsed.target)
        || statements_write_loop(&parsed.body)
        || statements_write_loop(&parsed.otherwise)
}

fn statements_write_loop(body: &[Statement]) -> bool {
    body.iter().any(|statement| match &statement.kind {
        StatementKind::Set(target, _) => target_is(target, "loop"),
        StatementKind::SetBlock { target, body, .. } => {
            target_is(target, "loop") || statements_write_loop(body)
        }
        StatementKind::If {
            branches,
            otherwise,
        } => {
            branches.iter().any(|(_, body)| statements_write_loop(body))
                || statements_write_loop(otherwise)
        }
        StatementKind::With(_, body)
        | StatementKind::Filter(_, body)
        | StatementKind::Block { body, .. }
        | StatementKind::Generation(body) => statements_write_loop(body),
        StatementKind::Macro(definition) | StatementKind::Call(definition, _) => {
            statements_write_loop(&definition.body)
        }
        // An inner loop was checked when it was parsed.
        _ => false,
    })
}

fn target_is(target: &Target, wanted: &str) -> bool {
    match target {
        Target::Name(name) => **name == *wanted,
        Target::Attribute(..) => false,
        Target::Tuple(targets) => targets.iter().any(|target| target_is(target, wanted)),
    }
}
