//! The lexer: it splits a source as jinja2 does with `trim_blocks` and `lstrip_blocks`.

use crate::error::{Error, Result};
use crate::unicode::{is_space, is_word};

#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Token {
    Data(String),
    BlockBegin,
    BlockEnd,
    PrintBegin,
    PrintEnd,
    Name(String),
    Str(String),
    Int(i128),
    Float(f64),
    Operator(&'static str),
    End,
}

/// The operators, longer ones first.
const OPERATORS: [&str; 26] = [
    "//", "**", "==", "!=", ">=", "<=", "+", "-", "/", "*", "%", "~", "[", "]", "(", ")", "{", "}",
    ">", "<", "=", ".", ":", "|", ",", ";",
];

/// Returns the tokens of a template with their lines.
pub(crate) fn tokenize(source: &str) -> Result<Vec<(u32, Token)>> {
    let mut source = source.replace("\r\n", "\n").replace('\r', "\n");
    // jinja2 drops one line feed at the end of the source (`keep_trailing_newline` is off).
    if source.ends_with('\n') {
        source.pop();
    }
    let mut lexer = Lexer {
        source: &source,
        at: 0,
        line: 1,
        starts_line: true,
        tokens: Vec::new(),
    };
    lexer.text()?;
    let line = lexer.line;
    lexer.tokens.push((line, Token::End));
    Ok(lexer.tokens)
}

struct Lexer<'s> {
    source: &'s str,
    at: usize,
    line: u32,
    /// `true` if the last token ended with a line feed.
    starts_line: bool,
    tokens: Vec<(u32, Token)>,
}

impl<'s> Lexer<'s> {
    fn rest(&self) -> &'s str {
        &self.source[self.at..]
    }

    fn fail<T>(&self, detail: impl Into<String>) -> Result<T> {
        Err(Error::syntax(self.line, detail))
    }

    fn push(&mut self, token: Token) {
        self.tokens.push((self.line, token));
    }

    /// Moves over `count` bytes.
    fn skip(&mut self, count: usize) {
        let skipped = &self.source[self.at..self.at + count];
        self.line += u32::try_from(skipped.matches('\n').count()).unwrap_or(u32::MAX);
        self.starts_line = skipped.ends_with('\n');
        self.at += count;
    }

    fn skip_spaces(&mut self) {
        let rest = self.rest();
        self.skip(rest.len() - rest.trim_start_matches(is_space).len());
    }

    /// Reads the text outside of tags, and the tags in it.
    fn text(&mut self) -> Result<()> {
        loop {
            let rest = self.rest();
            let opening = rest
                .match_indices('{')
                .map(|(at, _)| at)
                .find(|&at| rest[at + 1..].starts_with(['%', '{', '#']));
            let Some(opening) = opening else {
                if !rest.is_empty() {
                    self.push(Token::Data(rest.to_owned()));
                    self.skip(rest.len());
                }
                return Ok(());
            };
            let kind = rest.as_bytes()[opening + 1];
            let sign = rest[opening + 2..]
                .chars()
                .next()
                .filter(|sign| ['-', '+'].contains(sign));
            self.data(opening, sign, kind != b'{');
            let raw = if kind == b'%' {
                raw_begin(self.rest())
            } else {
                None
            };
            if let Some(length) = raw {
                self.skip(length);
                self.raw()?;
                continue;
            }
            self.skip(2 + sign.map_or(0, char::len_utf8));
            match kind {
                b'#' => self.comment()?,
                b'%' => {
                    self.push(Token::BlockBegin);
                    self.tag('%')?;
                }
                _ => {
                    self.push(Token::PrintBegin);
                    self.tag('}')?;
                }
            }
        }
    }

    /// Reads the `length` bytes of text before a tag, without the spaces that the tag removes.
    fn data(&mut self, length: usize, sign: Option<char>, strips: bool) {
        let text = &self.rest()[..length];
        let starts_line = self.starts_line;
        let kept = match sign {
            Some('-') => text.trim_end_matches(is_space),
            Some(_) => text,
            None => {
                let line = text.rfind('\n').map_or(0, |at| at + 1);
                let blank = text[line..].chars().all(is_space);
                match strips && blank && (line > 0 || starts_line) {
                    true => &text[..line],
                    false => text,
                }
            }
        };
        if !kept.is_empty() {
            let kept = kept.to_owned();
            self.push(Token::Data(kept));
        }
        self.skip(length);
    }

    fn comment(&mut self) -> Result<()> {
        let rest = self.rest();
        if rest.is_empty() {
            // jinja2 misses the end only where something else is.
            return Ok(());
        }
        let Some(end) = rest.find("#}") else {
            return self.fail("Missing end of comment tag");
        };
        let before = rest[..end].chars().next_back();
        self.skip(end + 2);
        self.after_block(before);
        Ok(())
    }

    /// Removes the spaces after a tag that ended with `sign`, or the line feed.
    fn after_block(&mut self, sign: Option<char>) {
        match sign {
            Some('-') => self.skip_spaces_of_tag(),
            Some('+') => {}
            _ if self.rest().starts_with('\n') => self.skip(1),
            _ => {}
        }
    }

    /// Skips the spaces after `-%}`; without any, the position still counts as after the tag, not as the start of a line.
    fn skip_spaces_of_tag(&mut self) {
        if self.rest().starts_with(is_space) {
            self.skip_spaces();
        }
    }

    fn raw(&mut self) -> Result<()> {
        let rest = self.rest();
        for (at, _) in rest.match_indices("{%") {
            let after = &rest[at + 2..];
            let sign = after
                .chars()
                .next()
                .filter(|sign| ['-', '+'].contains(sign));
            let inner = after[sign.map_or(0, char::len_utf8)..].trim_start_matches(is_space);
            let Some(inner) = inner.strip_prefix("endraw") else {
                continue;
            };
            let inner = inner.trim_start_matches(is_space);
            let end_sign = inner
                .chars()
                .next()
                .filter(|sign| ['-', '+'].contains(sign));
            let end = &inner[end_sign.map_or(0, char::len_utf8)..];
            let Some(end) = end.strip_prefix("%}") else {
                continue;
            };
            let length = rest.len() - end.len();
            self.data(at, sign, true);
            self.skip(length - at);
            self.after_block(end_sign);
            return Ok(());
        }
        match rest.is_empty() {
            true => Ok(()),
            false => self.fail("Missing end of raw directive"),
        }
    }

    /// Reads the tokens of a tag up to its end, `%}` or `}}`.
    fn tag(&mut self, end: char) -> Result<()> {
        let mut open = Vec::new();
        loop {
            let rest = self.rest();
            let Some(first) = rest.chars().next() else {
                return Ok(());
            };
            if open.is_empty() && self.tag_end(end) {
                return Ok(());
            }
            if is_space(first) {
                self.skip_spaces();
            } else if first.is_ascii_digit() {
                self.number()?;
            } else if is_word(first) {
                let length = rest.find(|c| !is_word(c)).unwrap_or(rest.len());
                self.push(Token::Name(rest[..length].to_owned()));
                self.skip(length);
            } else if first == '\'' || first == '"' {
                self.string(first)?;
            } else {
                let Some(operator) = OPERATORS.into_iter().find(|o| rest.starts_with(*o)) else {
                    return self.fail(format!("unexpected char {first:?}"));
                };
                match operator {
                    "{" => open.push("}"),
                    "(" => open.push(")"),
                    "[" => open.push("]"),
                    "}" | ")" | "]" => match open.pop() {
                        Some(expected) if expected == operator => {}
                        Some(expected) => {
                            return self
                                .fail(format!("unexpected '{operator}', expected '{expected}'"));
                        }
                        None => return self.fail(format!("unexpected '{operator}'")),
                    },
                    _ => {}
                }
                self.push(Token::Operator(operator));
                self.skip(operator.len());
            }
        }
    }

    /// Reads the end of a tag, if it is here.
    fn tag_end(&mut self, end: char) -> bool {
        let rest = self.rest();
        let sign = rest.chars().next().filter(|sign| ['-', '+'].contains(sign));
        let after = &rest[sign.map_or(0, char::len_utf8)..];
        if !after.starts_with(end) || !after[1..].starts_with('}') {
            return false;
        }
        let length = rest.len() - after.len() + 2;
        match (end, sign) {
            ('%', sign) => {
                self.push(Token::BlockEnd);
                self.skip(length);
                self.after_block(sign);
            }
            // A plus sign before `}}` is an operator.
            (_, Some('+')) => return false,
            (_, sign) => {
                self.push(Token::PrintEnd);
                self.skip(length);
                if sign.is_some() {
                    self.skip_spaces_of_tag();
                }
            }
        }
        true
    }

    fn number(&mut self) -> Result<()> {
        let rest = self.rest();
        let after_dot = self.source[..self.at].ends_with('.');
        if !after_dot && let Some(length) = float_length(rest) {
            let text = rest[..length].replace('_', "");
            match text.parse() {
                Ok(number) => self.push(Token::Float(number)),
                Err(_) => return self.fail(format!("invalid number {text}")),
            }
            self.skip(length);
            return Ok(());
        }
        let prefix = rest.get(..2).unwrap_or_default().to_ascii_lowercase();
        let (radix, start) = match prefix.as_str() {
            "0b" => (2, 2),
            "0o" => (8, 2),
            "0x" => (16, 2),
            _ => (10, 0),
        };
        let mut length = digits(&rest[start..], radix, start > 0);
        let (mut radix, mut start) = (radix, start);
        if length == 0 {
            // `0b` without digits is the number 0 and the name `b`.
            (radix, start, length) = (10, 0, 1);
        }
        if radix == 10 && rest.starts_with('0') {
            // After a zero only zeros belong to the number; another digit begins the next token.
            length = rest.find(|c| c != '0' && c != '_').unwrap_or(rest.len());
            length = rest[..length].trim_end_matches('_').len();
        }
        let text = rest[start..start + length].replace('_', "");
        match i128::from_str_radix(&text, radix) {
            Ok(number) => self.push(Token::Int(number)),
            Err(_) => return self.fail(format!("the integer {text} has more than 128 bits")),
        }
        self.skip(start + length);
        Ok(())
    }

    fn string(&mut self, quote: char) -> Result<()> {
        let rest = self.rest();
        let mut letters = rest.char_indices().skip(1);
        let end = loop {
            match letters.next() {
                Some((_, '\\')) => {
                    letters.next();
                }
                Some((at, letter)) if letter == quote => break at,
                Some(_) => {}
                None => return self.fail(format!("unexpected char {quote:?}")),
            }
        };
        let text = match unescape(&rest[1..end]) {
            Ok(text) => text,
            Err(detail) => return self.fail(detail),
        };
        self.push(Token::Str(text));
        self.skip(end + 1);
        Ok(())
    }
}

/// Returns the length of `{% raw %}` at the beginning of `rest`.
fn raw_begin(rest: &str) -> Option<usize> {
    let inner = rest.strip_prefix("{%")?;
    let inner = inner.strip_prefix(['-', '+']).unwrap_or(inner);
    let inner = inner.trim_start_matches(is_space).strip_prefix("raw")?;
    let inner = inner.trim_start_matches(is_space);
    let end = match inner.strip_prefix("-%}") {
        Some(end) => end.trim_start_matches(is_space),
        None => inner.strip_prefix("%}")?,
    };
    Some(rest.len() - end.len())
}

/// Returns the length of the digits at the beginning of `text`, with single underscores between them, and before the
/// first one if `leading`.
fn digits(text: &str, radix: u32, leading: bool) -> usize {
    let mut length = 0;
    let mut previous = !leading;
    for (at, letter) in text.char_indices() {
        if letter.is_digit(radix) {
            length = at + 1;
            previous = false;
        } else if letter == '_' && !previous {
            previous = true;
        } else {
            break;
        }
    }
    length
}

/// Returns the length of a number with a fraction or an exponent.
fn float_length(text: &str) -> Option<usize> {
    let mut length = digits(text, 10, false);
    let mut is_float = false;
    if let Some(fraction) = text[length..].strip_prefix('.')
        && fraction.starts_with(|c: char| c.is_ascii_digit())
    {
        length += 1 + digits(fraction, 10, false);
        is_float = true;
    }
    if let Some(exponent) = text[length..].strip_prefix(['e', 'E']) {
        let signed = exponent.strip_prefix(['+', '-']).unwrap_or(exponent);
        if signed.starts_with(|c: char| c.is_ascii_digit()) {
            length = text.len() - signed.len() + digits(signed, 10, false);
            is_float = true;
        }
    }
    is_float.then_some(length)
}

/// Decodes the escapes of a string as Python's `unicode-escape`.
fn unescape(text: &str) -> Result<String, String> {
    let mut out = String::with_capacity(text.len());
    let mut letters = text.chars();
    while let Some(letter) = letters.next() {
        if letter != '\\' {
            out.push(letter);
            continue;
        }
        let Some(escape) = letters.next() else {
            return Err("\\ at end of string".to_owned());
        };
        match escape {
            '\n' => {}
            '\\' | '\'' | '"' => out.push(escape),
            'a' => out.push('\x07'),
            'b' => out.push('\x08'),
            'f' => out.push('\x0c'),
            'n' => out.push('\n'),
            'r' => out.push('\r'),
            't' => out.push('\t'),
            'v' => out.push('\x0b'),
            '0'..='7' => {
                let mut code = escape.to_digit(8).unwrap_or(0);
                for _ in 0..2 {
                    match letters.clone().next().and_then(|c| c.to_digit(8)) {
                        Some(digit) => {
                            code = code * 8 + digit;
                            letters.next();
                        }
                        None => break,
                    }
                }
                out.extend(char::from_u32(code));
            }
            'x' | 'u' | 'U' => {
                let count = match escape {
                    'x' => 2,
                    'u' => 4,
                    _ => 8,
                };
                let mut code = 0u32;
                for _ in 0..count {
                    let digit = letters.next().and_then(|c| c.to_digit(16));
                    let digit = digit.ok_or_else(|| {
                        format!("the escape \\{escape} needs {count} hexadecimal digits")
                    })?;
                    code = (code << 4) | digit;
                }
                let letter = char::from_u32(code)
                    .ok_or_else(|| format!("\\{escape}{code:x} is not a character"))?;
                out.push(letter);
            }
            'N' => return Err("escapes by name (\\N) are not supported".to_owned()),
            other if other.is_ascii() => out.extend(['\\', other]),
            // jinja2 replaces a non-ASCII character by its escape before it decodes escapes, so `\é` becomes
            // a backslash and `xe9`.
            other => match u32::from(other) {
                code @ ..=0xff => out.push_str(&format!("\\x{code:02x}")),
                code @ ..=0xffff => out.push_str(&format!("\\u{code:04x}")),
                code => out.push_str(&format!("\\U{code:08x}")),
            },
        }
    }
    Ok(out)
}
