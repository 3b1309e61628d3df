//! The parser: a recursive descent with the precedences of jinja2's own.

mod expressions;
mod macros;
mod suffixes;
mod tags;
mod targets;

use std::collections::HashSet;

use crate::ast::{Name, Statement};
use crate::error::{Error, Result};
use crate::lexer::{Token, tokenize};
use crate::limits::{MAX_NESTING, MAX_SOURCE_BYTES};
use macros::Use;

/// A template that has been parsed.
#[derive(Debug)]
pub(crate) struct Parsed {
    pub(crate) body: Vec<Statement>,
    /// `true` if a `{% generation %}` tag is in it.
    pub(crate) has_generation: bool,
}

/// Parses a template.
pub(crate) fn parse(source: &str) -> Result<Parsed> {
    if source.len() > MAX_SOURCE_BYTES {
        return Err(Error::limit(format!(
            "it has {} bytes; a chat template must have at most {MAX_SOURCE_BYTES}",
            source.len()
        )));
    }
    let mut parser = Parser {
        tokens: tokenize(source)?,
        at: 0,
        nesting: 0,
        loops: 0,
        unknown: Vec::new(),
        macros: Vec::new(),
        blocks: HashSet::new(),
        has_generation: false,
    };
    let body = parser.body(&[])?;
    parser.refuse_unknown(0)?;
    Ok(Parsed {
        body,
        has_generation: parser.has_generation,
    })
}

struct Parser {
    tokens: Vec<(u32, Token)>,
    at: usize,
    nesting: usize,
    /// The number of loops that `break` could leave.
    loops: usize,
    /// The messages of unknown filters and tests. As in jinja2, one within a branch is an error only if the branch runs.
    unknown: Vec<(u32, String)>,
    /// The uses of the special names, for each macro around the current position.
    macros: Vec<[Use; 3]>,
    blocks: HashSet<String>,
    has_generation: bool,
}

impl Parser {
    fn peek(&self) -> &Token {
        &self.tokens[self.at].1
    }

    fn peek_second(&self) -> &Token {
        let last = self.tokens.len() - 1;
        &self.tokens[(self.at + 1).min(last)].1
    }

    fn line(&self) -> u32 {
        self.tokens[self.at].0
    }

    fn next(&mut self) -> Token {
        let token = self.peek().clone();
        if self.at + 1 < self.tokens.len() {
            self.at += 1;
        }
        token
    }

    fn fail<T>(&self, detail: impl Into<String>) -> Result<T> {
        Err(Error::syntax(self.line(), detail))
    }

    fn unexpected<T>(&self, expected: &str) -> Result<T> {
        let found = describe(self.peek());
        self.fail(format!("expected {expected}, got {found}"))
    }

    fn is_operator(&self, operator: &str) -> bool {
        matches!(self.peek(), Token::Operator(found) if *found == operator)
    }

    fn is_name(&self, name: &str) -> bool {
        matches!(self.peek(), Token::Name(found) if found == name)
    }

    fn skip_operator(&mut self, operator: &str) -> bool {
        let is_here = self.is_operator(operator);
        if is_here {
            self.next();
        }
        is_here
    }

    fn skip_name(&mut self, name: &str) -> bool {
        let is_here = self.is_name(name);
        if is_here {
            self.next();
        }
        is_here
    }

    fn expect_operator(&mut self, operator: &str) -> Result<()> {
        match self.skip_operator(operator) {
            true => Ok(()),
            false => self.unexpected(&format!("'{operator}'")),
        }
    }

    fn expect_word(&mut self, name: &str) -> Result<()> {
        match self.skip_name(name) {
            true => Ok(()),
            false => self.unexpected(&format!("'{name}'")),
        }
    }

    fn expect_name(&mut self) -> Result<Name> {
        match self.peek() {
            Token::Name(name) if !name.starts_with(|c: char| c.is_numeric()) => {
                let name = Name::from(name.as_str());
                self.next();
                Ok(name)
            }
            _ => self.unexpected("a name"),
        }
    }

    fn expect_block_end(&mut self) -> Result<()> {
        match self.peek() {
            Token::BlockEnd => {
                self.next();
                Ok(())
            }
            _ => self.unexpected("the end of the tag"),
        }
    }

    /// Runs `parse` one level deeper.
    fn nested<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        self.nesting += 1;
        if self.nesting > MAX_NESTING {
            return self.fail(format!(
                "it nests more than {MAX_NESTING} levels of tags and expressions"
            ));
        }
        let parsed = parse(self);
        self.nesting -= 1;
        parsed
    }

    /// Returns an error if there are more than `from` unknown filters and tests.
    fn refuse_unknown(&self, from: usize) -> Result<()> {
        match self.unknown.get(from) {
            None => Ok(()),
            Some((line, name)) => Err(Error::syntax(*line, name.clone())),
        }
    }

    /// Parses a statement with a scope of its own, within which an unknown filter or test is an error.
    fn frame<T>(&mut self, parse: impl FnOnce(&mut Self) -> Result<T>) -> Result<T> {
        let known = self.unknown.len();
        let parsed = parse(self)?;
        self.refuse_unknown(known)?;
        Ok(parsed)
    }
}

fn describe(token: &Token) -> String {
    match token {
        Token::Data(_) => "text".to_owned(),
        Token::BlockBegin => "'{%'".to_owned(),
        Token::BlockEnd => "'%}'".to_owned(),
        Token::PrintBegin => "'{{'".to_owned(),
        Token::PrintEnd => "'}}'".to_owned(),
        Token::Name(name) => format!("'{name}'"),
        Token::Str(text) => format!("the string {text:?}"),
        Token::Int(value) => value.to_string(),
        Token::Float(value) => value.to_string(),
        Token::Operator(operator) => format!("'{operator}'"),
        Token::End => "the end of the template".to_owned(),
    }
}
