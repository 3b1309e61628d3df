//! The search for the elements of a JSON array, without parsing them.

use std::path::Path;

use memchr::memchr2;

use super::compressed::read_start;
use super::scan::{Part, Scan, is_space, text_start};
use crate::{Error, Result};

/// The scan for the elements of a file that is an array, or an object with the array in a field.
///
/// Only strings, brackets and commas are examined; invalid JSON in an element is an error when it is read. One
/// thread reads the file once, since the meaning of a bracket depends on all bytes before it.
#[derive(Debug, Clone)]
pub(crate) struct JsonArrayScan {
    /// The field of the top-level object that holds the array; `None` if the array is the top level.
    pub(crate) field: Option<String>,
}

impl Scan for JsonArrayScan {
    fn scan(
        &self,
        path: &Path,
        part: Part<'_>,
        _threads: usize,
        sink: &mut dyn FnMut(u64) -> Result<()>,
    ) -> Result<u64> {
        let Part { data, first, .. } = part;
        let mut cursor = Cursor {
            path,
            data,
            at: first,
        };
        if let Some(field) = &self.field {
            cursor.enter_field(field)?;
        }
        cursor.expect(b'[', "an array ([)")?;
        cursor.skip_space();
        if cursor.peek() != Some(b']') {
            loop {
                cursor.skip_space();
                sink(cursor.at as u64)?;
                cursor.skip_value()?;
                cursor.skip_space();
                match cursor.peek() {
                    Some(b',') => cursor.at += 1,
                    Some(b']') => break,
                    _ => return Err(cursor.unexpected("a comma or the end of the array (])")),
                }
            }
        }
        let end = cursor.at as u64;
        cursor.at += 1;
        cursor.skip_space();
        // A field after the array is not read, so an object is not checked to its end.
        if self.field.is_none() && cursor.peek().is_some() {
            return Err(cursor.unexpected("nothing after the array"));
        }
        Ok(end)
    }

    fn is_streamed(&self) -> bool {
        false
    }

    fn key(&self) -> Vec<u8> {
        format!("json array 1, field {:?}", self.field).into_bytes()
    }
}

/// Returns `true` if the first character of a JSON file begins an array; `None` if the file has no character.
pub(crate) fn begins_array(path: &Path) -> Result<Option<bool>> {
    // White space before the data is rarely more than a line end.
    const START_BYTES: u64 = 4096;
    let start = read_start(path, START_BYTES)?;
    let text = start[text_start(&start)..].trim_ascii_start();
    Ok(text.first().map(|&first| first == b'['))
}

/// A position in the bytes of a JSON file.
struct Cursor<'a> {
    path: &'a Path,
    data: &'a [u8],
    at: usize,
}

impl Cursor<'_> {
    fn peek(&self) -> Option<u8> {
        self.data.get(self.at).copied()
    }

    fn skip_space(&mut self) {
        while self.peek().is_some_and(is_space) {
            self.at += 1;
        }
    }

    /// Skips white space and `byte`.
    fn expect(&mut self, byte: u8, what: &'static str) -> Result<()> {
        self.skip_space();
        if self.peek() != Some(byte) {
            return Err(self.unexpected(what));
        }
        self.at += 1;
        Ok(())
    }

    /// Moves to the value of `field` in the object that begins here.
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
            // The name may contain escapes, so it is parsed and not compared as bytes.
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
                // The backslash and the escaped byte, which may be missing at the end of the file.
                Some(found) => self.at = self.data.len().min(self.at + found + 2),
                None => {
                    self.at = start;
                    return Err(self.malformed("the string that begins here does not end"));
                }
            }
        }
    }

    /// Skips an object or an array. The depth is a counter and not a stack, so memory is constant; brackets of
    /// different kinds that close one another are an error when the element is parsed.
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
        let problem = format!("at byte {}, {}", self.at, problem.into());
        Error::invalid_file(self.path, problem)
    }
}

/// A table of the bytes at which the nesting can change. It is needed because memchr cannot search for five bytes.
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
