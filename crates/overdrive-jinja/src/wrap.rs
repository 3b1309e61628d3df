//! Python's `textwrap.wrap`, and the part of `pprint` that needs no wrapping.

use crate::error::{Error, Result};
use crate::value::Value;

/// The options of `wordwrap`.
pub(crate) struct Options {
    pub(crate) width: usize,
    pub(crate) break_long_words: bool,
    pub(crate) break_on_hyphens: bool,
}

/// Returns the lines into which `textwrap.wrap` breaks a line, without expanding tabs or replacing spaces.
pub(crate) fn wrap(line: &str, options: &Options) -> Vec<String> {
    let mut chunks = chunks(line, options.break_on_hyphens);
    chunks.reverse();
    let count = |text: &str| text.chars().count();
    let mut lines = Vec::new();
    while !chunks.is_empty() {
        let (mut current, mut length) = (Vec::new(), 0);
        if !lines.is_empty() && chunks.last().is_some_and(|chunk| is_blank(chunk)) {
            chunks.pop();
        }
        while let Some(chunk) = chunks.last() {
            let own = count(chunk);
            if length + own > options.width {
                break;
            }
            length += own;
            current.extend(chunks.pop());
        }
        if chunks
            .last()
            .is_some_and(|chunk| count(chunk) > options.width)
        {
            long_word(&mut chunks, &mut current, options, length);
        }
        if current.last().is_some_and(|chunk| is_blank(chunk)) {
            current.pop();
        }
        if !current.is_empty() {
            lines.push(current.concat());
        }
    }
    lines
}

/// Breaks a word that is longer than a line, or puts it on a line of its own.
fn long_word(
    chunks: &mut Vec<String>,
    current: &mut Vec<String>,
    options: &Options,
    length: usize,
) {
    let room = options
        .width
        .saturating_sub(length)
        .max(usize::from(options.width < 1));
    if !options.break_long_words {
        if current.is_empty() {
            current.extend(chunks.pop());
        }
        return;
    }
    let Some(chunk) = chunks.last_mut() else {
        return;
    };
    let letters: Vec<char> = chunk.chars().collect();
    let mut end = room;
    if options.break_on_hyphens && letters.len() > room {
        let hyphen = letters[..room].iter().rposition(|letter| *letter == '-');
        if let Some(hyphen) = hyphen
            && hyphen > 0
            && letters[..hyphen].iter().any(|letter| *letter != '-')
        {
            end = hyphen + 1;
        }
    }
    current.push(letters[..end].iter().collect());
    *chunk = letters[end..].iter().collect();
}

/// Returns `true` for the spaces of `textwrap`, which are those of ASCII.
fn is_space(letter: char) -> bool {
    matches!(letter, ' ' | '\t' | '\n' | '\x0b' | '\x0c' | '\r')
}

fn is_blank(chunk: &str) -> bool {
    chunk.trim_matches(crate::unicode::is_space).is_empty()
}

/// Splits a line into words, spaces, and the parts of words with hyphens.
fn chunks(line: &str, break_on_hyphens: bool) -> Vec<String> {
    let letters: Vec<char> = line.chars().collect();
    let mut chunks = Vec::new();
    let mut start = 0;
    while start < letters.len() {
        let blank = is_space(letters[start]);
        let length = letters[start..]
            .iter()
            .take_while(|letter| is_space(**letter) == blank)
            .count();
        let word = &letters[start..start + length];
        start += length;
        if blank || !break_on_hyphens {
            chunks.push(word.iter().collect());
        } else {
            hyphenated(word, &mut chunks);
        }
    }
    chunks
}

/// Splits a word after each hyphen between letters, and before and after each dash between words.
fn hyphenated(word: &[char], chunks: &mut Vec<String>) {
    let is_letter = |at: usize| {
        word.get(at).is_some_and(|letter| {
            crate::unicode::is_word(*letter) && !crate::unicode::is_decimal(*letter)
        })
    };
    let is_word_or_mark =
        |letter: char| crate::unicode::is_word(letter) || "!\"'&.,?".contains(letter);
    let mut start = 0;
    let mut at = 0;
    while at < word.len() {
        if word[at] != '-' {
            at += 1;
            continue;
        }
        let dashes = word[at..]
            .iter()
            .take_while(|letter| **letter == '-')
            .count();
        let before = at > start && is_word_or_mark(word[at - 1]);
        let after = word
            .get(at + dashes)
            .is_some_and(|c| crate::unicode::is_word(*c));
        if dashes >= 2 && before && after {
            // A dash of two or more hyphens is a chunk of its own.
            chunks.push(word[start..at].iter().collect());
            chunks.push(word[at..at + dashes].iter().collect());
            start = at + dashes;
        } else if dashes == 1
            && at >= 2
            && is_letter(at - 1)
            && (is_letter(at - 2) || word[at - 2] == '-' && at >= 3)
            && is_letter(at + 1)
            && (is_letter(at + 2) || word.get(at + 2) == Some(&'-') && is_letter(at + 3))
        {
            chunks.push(word[start..=at].iter().collect());
            start = at + 1;
        }
        at += dashes;
    }
    if start < word.len() {
        chunks.push(word[start..].iter().collect());
    }
}

/// The length of a line of `pprint.pformat`.
const LINE: usize = 80;

/// Returns the text of `pprint.pformat`, if it fits one line.
pub(crate) fn pretty(value: &Value) -> Result<String> {
    // Each element has at least one character, so a larger value cannot fit.
    if value.shape().weight <= LINE {
        let text = sorted_keys(value)?.repr()?;
        if text.chars().count() <= LINE {
            return Ok(text);
        }
    }
    Err(Error::runtime(format!(
        "pprint of a value that does not fit a line of {LINE} characters is not supported; use tojson(indent=1)"
    )))
}

fn sorted_keys(value: &Value) -> Result<Value> {
    match value {
        Value::List(items) => {
            Value::list(items.items.iter().map(sorted_keys).collect::<Result<_>>()?)
        }
        Value::Tuple(items) => {
            Value::tuple(items.items.iter().map(sorted_keys).collect::<Result<_>>()?)
        }
        Value::Dict(dict) => {
            let mut pairs: Vec<(Value, Value)> = Vec::new();
            for (key, value) in &dict.entries {
                let pair = (key.clone(), sorted_keys(value)?);
                let at = pairs
                    .iter()
                    .position(|(known, _)| key.is_less(known).unwrap_or(false));
                pairs.insert(at.unwrap_or(pairs.len()), pair);
            }
            Value::dict(pairs)
        }
        other => Ok(other.clone()),
    }
}
