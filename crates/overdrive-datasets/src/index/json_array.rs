//! The elements of a JSON array, found without parsing them.

use std::path::Path;

use memchr::memchr2;

use super::scan::{Scan, is_space, text_start};
use crate::{Error, Result};

/// The elements of the array that a file is, or that is one of the values of the object that it is.
///
/// Only strings, brackets and commas are looked at; whether an element is sound JSON shows when it is
/// read. The file is walked once, by one thread: what a bracket means depends on all bytes before it.
#[derive(Debug, Clone)]
pub(crate) struct JsonArrayScan {
    /// The key of the array in the object at the top; `None`: the array is at the top.
    pub(crate) field: Option<String>,
}

impl Scan for JsonArrayScan {
    fn scan(
        &self,
        path: &Path,
        data: &[u8],
        _threads: usize,
        sink: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<u64> {
        let mut walk = Walk {
            path,
            data,
            at: text_start(data),
        };
        if let Some(field) = &self.field {
            walk.enter_field(field)?;
        }
        walk.expect(b'[', "an array ([)")?;
        walk.skip_space();
        if walk.peek() != Some(b']') {
            loop {
                walk.skip_space();
                sink(walk.at as u64)?;
                walk.skip_value()?;
                walk.skip_space();
                match walk.peek() {
                    Some(b',') => walk.at += 1,
                    Some(b']') => break,
                    _ => return Err(walk.unexpected("a comma or the end of the array (])")),
                }
            }
        }
        let end = walk.at as u64;
        walk.at += 1;
        walk.skip_space();
        if self.field.is_none() && walk.peek().is_some() {
            return Err(walk.unexpected("nothing behind the array"));
        }
        Ok(end)
    }

    fn key(&self) -> Vec<u8> {
        format!("json array 1, field {:?}", self.field).into_bytes()
    }
}

struct Walk<'a> {
    path: &'a Path,
    data: &'a [u8],
    at: usize,
}

impl Walk<'_> {
    fn peek(&self) -> Option<u8> {
        self.data.get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while self.peek().is_some_and(is_space) {
            self.at += 1;
        }
    }

    /// Steps over white space and `byte`.
    fn expect(&mut self, byte: u8, what: &'static str) -> Result<()> {
        self.skip_space();
        if self.peek() != Some(byte) {
            return Err(self.unexpected(what));
        }
        self.at += 1;
        Ok(())
    }

    /// Steps in front of the value of `field` in the object that begins here.
    fn enter_field(&mut self, field: &str) -> Result<()> {
        self.expect(b'{', "an object ({)")?;
        loop {
            self.skip_space();
            let start = self.at;
            if self.peek() != Some(b'"') {
                return Err(match self.peek() {
                    Some(b'}') => self.malformed(format!("the object has no field {field:?}")),
                    _ => self.unexpected("the name of a field (\")"),
                });
            }
            self.skip_value()?;
            let name = serde_json::from_slice::<String>(&self.data[start..self.at]);
            self.expect(b':', "a colon")?;
            if name.is_ok_and(|name| name == field) {
                return Ok(());
            }
            self.skip_space();
            self.skip_value()?;
            self.skip_space();
            match self.peek() {
                Some(b',') => self.at += 1,
                Some(b'}') => {}
                _ => return Err(self.unexpected("a comma or the end of the object (})")),
            }
        }
    }

    fn skip_value(&mut self) -> Result<()> {
        match self.peek() {
            Some(b'"') => self.skip_string(),
            Some(b'{' | b'[') => self.skip_nested(),
            None | Some(b',' | b']' | b'}' | b':') => Err(self.unexpected("a value")),
            Some(_) => {
                let rest = &self.data[self.at..];
                let ends = |&byte: &u8| is_space(byte) || matches!(byte, b',' | b']' | b'}');
                self.at += rest.iter().position(ends).unwrap_or(rest.len());
                Ok(())
            }
        }
    }

    fn skip_string(&mut self) -> Result<()> {
        let start = self.at;
        self.at += 1;
        loop {
            match memchr2(b'"', b'\\', &self.data[self.at..]) {
                Some(found) if self.data[self.at + found] == b'"' => {
                    self.at += found + 1;
                    return Ok(());
                }
                // The backslash and what it escapes, which may be missing at the end of the file.
                Some(found) => self.at = self.data.len().min(self.at + found + 2),
                None => {
                    self.at = start;
                    return Err(self.malformed("the string that begins here does not end"));
                }
            }
        }
    }

    /// Steps over an object or an array. Depth is a number, not a stack: memory stays flat, and
    /// brackets of different kinds that close one another are found when the element is parsed.
    fn skip_nested(&mut self) -> Result<()> {
        let start = self.at;
        let mut depth = 0_u64;
        loop {
            let rest = &self.data[self.at..];
            let Some(found) = rest
                .iter()
                .position(|&byte| IS_STRUCTURE[usize::from(byte)])
            else {
                self.at = start;
                return Err(self.malformed("the object or array that begins here does not end"));
            };
            self.at += found;
            match rest[found] {
                b'"' => {
                    self.skip_string()?;
                    continue;
                }
                b'{' | b'[' => depth += 1,
                _ => depth -= 1,
            }
            self.at += 1;
            if depth == 0 {
                return Ok(());
            }
        }
    }

    fn unexpected(&self, expected: &str) -> Error {
        let found = match self.peek() {
            None => "the end of the file".to_owned(),
            Some(byte) => format!("{:?}", char::from(byte)),
        };
        self.malformed(format!("found {found}, expected {expected}"))
    }

    fn malformed(&self, problem: impl Into<String>) -> Error {
        Error::MalformedFile {
            path: self.path.to_owned(),
            offset: self.at as u64,
            problem: problem.into(),
        }
    }
}

const IS_STRUCTURE: [bool; 256] = {
    let mut table = [false; 256];
    let bytes = b"\"{}[]";
    let mut i = 0;
    while i < bytes.len() {
        table[bytes[i] as usize] = true;
        i += 1;
    }
    table
};
