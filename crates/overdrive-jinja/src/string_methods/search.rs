//! Searching and replacing.

use std::rc::Rc;

use crate::args::{Args, given, position_or, text};
use crate::error::Result;
use crate::runtime::Runtime;
use crate::value::{Text, Value};

/// A string to search for, and the byte range of the searched string, `None` if its start is behind its end.
pub(super) struct Searched {
    pub(super) part: Rc<str>,
    pub(super) range: Option<(usize, usize)>,
}

impl Searched {
    /// Reads the arguments `part, start, end` of a search in `word`.
    pub(super) fn new(name: &'static str, args: Args, word: &str) -> Result<Searched> {
        let [part, start, end] = args.unnamed(name, 1)?;
        Ok(Searched {
            part: Rc::from(text(&part.unwrap_or(Value::None))?),
            range: byte_range(word, start, end)?,
        })
    }
}

fn byte_range(
    word: &str,
    start: Option<Value>,
    end: Option<Value>,
) -> Result<Option<(usize, usize)>> {
    let length = i128::try_from(word.chars().count()).unwrap_or(i128::MAX);
    let start = position_or(given(start), 0, length)?;
    let end = position_or(given(end), length, length)?.min(length);
    if start > end {
        return Ok(None);
    }
    let byte = |at: i128| {
        let at = usize::try_from(at).unwrap_or(usize::MAX);
        word.char_indices().nth(at).map_or(word.len(), |(at, _)| at)
    };
    Ok(Some((byte(start), byte(end))))
}

pub(super) fn affix(name: &'static str, args: Args, word: &str) -> Result<Value> {
    let [affix, start, end] = args.unnamed(name, 1)?;
    let affix = affix.unwrap_or(Value::None);
    let range = byte_range(word, start, end)?;
    let has = |affix: &Value| -> Result<bool> {
        let affix = text(affix)?;
        Ok(range.is_some_and(|(from, to)| match name {
            "startswith" => word[from..to].starts_with(affix),
            _ => word[from..to].ends_with(affix),
        }))
    };
    let found = match &affix {
        Value::Tuple(affixes) => {
            let mut found = false;
            for affix in &affixes.items {
                found = found || has(affix)?;
            }
            found
        }
        affix => has(affix)?,
    };
    Ok(Value::Bool(found))
}

/// Replaces the first `count` occurrences of `old`, or all if `count` is negative.
pub(crate) fn replace(
    runtime: &mut Runtime,
    this: &Text,
    old: &str,
    new: &str,
    count: i128,
) -> Result<Value> {
    let most = usize::try_from(count).unwrap_or(usize::MAX);
    let occurrences = match old.is_empty() {
        true => this.count() + 1,
        false => this.text.matches(old).count(),
    };
    let added = occurrences.min(most).saturating_mul(new.len());
    runtime.reserve_text(this.text.len().saturating_add(added))?;
    Ok(this.like(this.text.replacen(old, new, most)))
}
