//! Stripping, splitting and joining.

use crate::error::{Error, Result};
use crate::markup::{escape, escaped};
use crate::runtime::Runtime;
use crate::unicode::is_space;
use crate::value::{Elements, Text, Value};

/// Removes characters at both ends (`strip`), at the start (`lstrip`) or at the end (`rstrip`).
pub(crate) fn strip<'t>(word: &'t str, letters: Option<&str>, name: &str) -> &'t str {
    let stripped = |letter: char| match letters {
        Some(letters) => letters.contains(letter),
        None => is_space(letter),
    };
    let word = match name {
        "rstrip" => word,
        _ => word.trim_start_matches(stripped),
    };
    match name {
        "lstrip" => word,
        _ => word.trim_end_matches(stripped),
    }
}

/// Splits a string at a separator, or at white space, at most `most` times; a negative number sets no limit.
pub(super) fn split<'t>(
    word: &'t str,
    by: Option<&str>,
    most: i128,
    from_right: bool,
) -> Vec<&'t str> {
    let most = usize::try_from(most).unwrap_or(usize::MAX - 1);
    let mut parts: Vec<&str> = match (by, from_right) {
        (Some(by), false) => return word.splitn(most.saturating_add(1), by).collect(),
        (Some(by), true) => word.rsplitn(most.saturating_add(1), by).collect(),
        (None, false) => {
            let (mut rest, mut parts) = (word.trim_start_matches(is_space), Vec::new());
            while parts.len() < most
                && let Some(at) = rest.find(is_space)
            {
                parts.push(&rest[..at]);
                rest = rest[at..].trim_start_matches(is_space);
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
            return parts;
        }
        (None, true) => {
            let (mut rest, mut parts) = (word.trim_end_matches(is_space), Vec::new());
            while parts.len() < most
                && let Some((at, space)) = rest.char_indices().rfind(|(_, c)| is_space(*c))
            {
                parts.push(&rest[at + space.len_utf8()..]);
                rest = rest[..at].trim_end_matches(is_space);
            }
            if !rest.is_empty() {
                parts.push(rest);
            }
            parts
        }
    };
    parts.reverse();
    parts
}

/// Returns the lines of a string, each with its line end and the length of that end.
pub(crate) fn lines<'t>(runtime: &mut Runtime, word: &'t str) -> Result<Vec<(&'t str, usize)>> {
    const ENDS: [char; 10] = [
        '\n', '\r', '\x0b', '\x0c', '\x1c', '\x1d', '\x1e', '\u{85}', '\u{2028}', '\u{2029}',
    ];
    runtime.reserve(word.matches(ENDS).count() + 1)?;
    let mut rest = word;
    let mut lines = Vec::new();
    while let Some((at, letter)) = rest.char_indices().find(|(_, c)| ENDS.contains(c)) {
        let length = match rest[at..].starts_with("\r\n") {
            true => 2,
            false => letter.len_utf8(),
        };
        lines.push((&rest[..at + length], length));
        rest = &rest[at + length..];
    }
    if !rest.is_empty() {
        lines.push((rest, 0));
    }
    Ok(lines)
}

/// Implements `str.join`: an element that is not a string is an error.
pub(crate) fn join(runtime: &mut Runtime, this: &Text, items: &Value) -> Result<Value> {
    let mut elements = Elements::new(items)?;
    let mut out = String::new();
    let mut number = 0;
    while let Some(item) = elements.next(runtime)? {
        if number > 0 {
            out.push_str(&this.text);
        }
        match &item {
            Value::Str(_) if this.is_markup => out.push_str(&escaped(&item)?),
            Value::Str(item) => out.push_str(&item.text),
            _ if this.is_markup => out.push_str(&escape(&item.to_text()?)),
            other => {
                return Err(Error::type_error(format!(
                    "sequence item {number}: expected str instance, {} found",
                    other.type_name()
                )));
            }
        }
        number += 1;
        runtime.check_text(out.len())?;
    }
    runtime.reserve_text(out.len())?;
    Ok(this.like(out))
}
