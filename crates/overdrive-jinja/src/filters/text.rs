//! Filters of strings.

use super::soft;
use crate::args::{Args, bool_or, given, int_or, text, text_or};
use crate::error::{Error, Result};
use crate::markup::escape;
use crate::percent::format_percent;
use crate::runtime::Runtime;
use crate::string_methods::lines;
use crate::unicode::is_space;
use crate::value::Value;
use crate::wrap;

/// Implements the filter `title`: a word begins after a space, a hyphen or an opening bracket.
pub(super) fn title(text: &str) -> String {
    let begins = |letter: char| is_space(letter) || "-({[<".contains(letter);
    let mut out = String::with_capacity(text.len());
    let mut rest = text;
    while let Some(first) = rest.chars().next() {
        if begins(first) {
            out.push(first);
            rest = &rest[first.len_utf8()..];
            continue;
        }
        let end = rest.find(begins).unwrap_or(rest.len());
        out.extend(first.to_uppercase());
        out.push_str(&rest[first.len_utf8()..end].to_lowercase());
        rest = &rest[end..];
    }
    out
}

pub(super) fn format(runtime: &mut Runtime, value: &Value, args: Args) -> Result<Value> {
    let values = match (args.positional.is_empty(), args.named.is_empty()) {
        (false, false) => {
            return Err(Error::runtime(
                "can't handle positional and keyword arguments at the same time",
            ));
        }
        (_, true) => Value::tuple(args.positional)?,
        (true, false) => {
            let named = args.named.into_iter();
            Value::dict(named.map(|(name, value)| (Value::from(name), value)))?
        }
    };
    format_percent(runtime, &soft(value)?, &values)
}

pub(super) fn indent(runtime: &mut Runtime, value: &Value, args: Args) -> Result<Value> {
    let [width, first, blank] = args.bind("indent", ["width", "first", "blank"], 0)?;
    let this = match value {
        Value::Str(this) => this,
        other => {
            text(other)?;
            return Ok(Value::None);
        }
    };
    let indention = match width {
        Some(Value::Str(text)) => text.text.to_string(),
        width => {
            let width = usize::try_from(int_or(width, 4)?.max(0)).unwrap_or(usize::MAX);
            runtime.check_text(width)?;
            " ".repeat(width)
        }
    };
    let (first, blank) = (bool_or(first, false), bool_or(blank, false));
    // jinja2 appends a line feed, so a string that ends with one has an empty last line.
    let text = format!("{}\n", this.text);
    let lines: Vec<&str> = lines(runtime, &text)?
        .into_iter()
        .map(|(line, end)| &line[..line.len() - end])
        .collect();
    runtime.reserve_text(text.len() + lines.len().saturating_mul(indention.len()))?;
    let mut out = String::new();
    for (number, line) in lines.iter().enumerate() {
        if number > 0 {
            out.push('\n');
        }
        if number == 0 && first || number > 0 && (blank || !line.is_empty()) {
            out.push_str(&indention);
        }
        out.push_str(line);
    }
    Ok(this.like(out))
}

pub(super) fn truncate(value: &Value, args: Args) -> Result<Value> {
    let names = ["length", "killwords", "end", "leeway"];
    let [length, killwords, end, leeway] = args.bind("truncate", names, 0)?;
    let (length, end) = (int_or(length, 255)?, text_or(end, "...")?);
    let leeway = int_or(given(leeway), 5)?;
    let end_length = i128::try_from(end.chars().count()).unwrap_or(0);
    if length < end_length || leeway < 0 {
        return Err(Error::value(format!(
            "truncate: the length must be at least {end_length}, and the leeway at least 0"
        )));
    }
    let count = value.length().ok_or_else(|| {
        Error::type_error(format!(
            "object of type '{}' has no len()",
            value.type_name()
        ))
    })?;
    if i128::try_from(count).unwrap_or(i128::MAX) <= length.saturating_add(leeway) {
        return Ok(value.clone());
    }
    let this = value
        .as_text()
        .ok_or_else(|| Error::type_error(format!("'{}' cannot be truncated", value.type_name())))?;
    let kept = usize::try_from(length - end_length).unwrap_or(0);
    let kept: String = this.text.chars().take(kept).collect();
    let kept = match bool_or(killwords, false) {
        true => kept.as_str(),
        false => kept
            .rsplit_once(' ')
            .map_or(kept.as_str(), |(kept, _)| kept),
    };
    let end = if this.is_markup {
        escape(&end)
    } else {
        end.to_string()
    };
    Ok(this.like(format!("{kept}{end}")))
}

pub(super) fn wordwrap(runtime: &mut Runtime, value: &Value, args: Args) -> Result<Value> {
    let names = [
        "width",
        "break_long_words",
        "wrapstring",
        "break_on_hyphens",
    ];
    let [width, long, by, hyphens] = args.bind("wordwrap", names, 0)?;
    let this = text(value)?;
    let width = int_or(width, 79)?;
    let options = wrap::Options {
        width: match usize::try_from(width) {
            Ok(width) if width > 0 => width,
            _ if this.is_empty() => 1,
            _ => {
                return Err(Error::value(format!("invalid width {width} (must be > 0)")));
            }
        },
        break_long_words: bool_or(long, true),
        break_on_hyphens: bool_or(hyphens, true),
    };
    let by = text_or(given(by), "\n")?;
    // Each character may become a chunk.
    runtime.reserve(this.len())?;
    let wrapped: Vec<String> = lines(runtime, this)?
        .into_iter()
        .map(|(line, end)| wrap::wrap(&line[..line.len() - end], &options).join(&*by))
        .collect();
    let bytes: usize = wrapped.iter().map(String::len).sum();
    runtime.reserve_text(bytes + wrapped.len() * by.len())?;
    Ok(Value::from(wrapped.join(&by)))
}
