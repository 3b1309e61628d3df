//! Escaping for HTML: Python's `markupsafe`.

use crate::error::Result;
use crate::value::{Text, Value};

/// Returns the text with the special characters of HTML escaped.
pub(crate) fn escape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for letter in text.chars() {
        match letter {
            '&' => out.push_str("&amp;"),
            '<' => out.push_str("&lt;"),
            '>' => out.push_str("&gt;"),
            '\'' => out.push_str("&#39;"),
            '"' => out.push_str("&#34;"),
            other => out.push(other),
        }
    }
    out
}

/// Returns `str(value)`, escaped unless it is markup.
pub(crate) fn escaped(value: &Value) -> Result<String> {
    Ok(match value {
        Value::Str(Text {
            text,
            is_markup: true,
        }) => text.to_string(),
        other => escape(&other.to_text()?),
    })
}

/// Removes tags and comments, replaces white space by single spaces, and decodes entities.
pub(crate) fn strip_tags(text: &str) -> String {
    let uncommented = without_comments(text);
    let plain = without_tags(&uncommented);
    let words: Vec<&str> = plain
        .split(crate::unicode::is_space)
        .filter(|word| !word.is_empty())
        .collect();
    unescape(&words.join(" "))
}

fn without_comments(text: &str) -> String {
    const OPEN: &str = "<!--";
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(letter) = rest.chars().next() {
        out.push(letter);
        rest = &rest[letter.len_utf8()..];
        // `out` is searched rather than `text`: a removed comment may have split an opening.
        if !out.ends_with(OPEN) {
            continue;
        }
        // As in Python, the end of a comment may share hyphens with its opening.
        let end = match [">", "->"].into_iter().find(|end| rest.starts_with(end)) {
            Some(end) => end.len(),
            None => match rest.find("-->") {
                Some(at) => at + 3,
                None => break,
            },
        };
        out.truncate(out.len() - OPEN.len());
        rest = &rest[end..];
    }
    out.push_str(rest);
    out
}

fn without_tags(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(start) = rest.find('<')
        && let Some(length) = rest[start..].find('>')
    {
        out.push_str(&rest[..start]);
        rest = &rest[start + length + 1..];
    }
    out.push_str(rest);
    out
}

/// The longest entity that is decoded, in bytes.
const MAX_ENTITY: usize = 32;

/// Decodes numeric entities and the common named ones.
fn unescape(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(at) = rest.find('&') {
        out.push_str(&rest[..at]);
        rest = &rest[at..];
        let end = rest.bytes().take(MAX_ENTITY).position(|byte| byte == b';');
        let entity = end.map(|end| &rest[1..end]);
        let letter = entity.and_then(|entity| match entity {
            "amp" => Some('&'),
            "lt" => Some('<'),
            "gt" => Some('>'),
            "quot" => Some('"'),
            "apos" => Some('\''),
            "nbsp" => Some('\u{a0}'),
            other => {
                let number = other.strip_prefix('#')?;
                let code = match number.strip_prefix(['x', 'X']) {
                    Some(hexadecimal) => u32::from_str_radix(hexadecimal, 16).ok()?,
                    None => number.parse().ok()?,
                };
                char::from_u32(code)
            }
        });
        match (letter, entity) {
            (Some(letter), Some(entity)) => {
                out.push(letter);
                rest = &rest[entity.len() + 2..];
            }
            _ => {
                out.push('&');
                rest = &rest[1..];
            }
        }
    }
    out.push_str(rest);
    out
}
