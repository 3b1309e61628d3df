//! `str.format` and its format specifications.

use crate::args::Args;
use crate::error::{Error, Result};
use crate::markup::escaped;
use crate::number::{float_repr, int_to_float, python_exponent};
use crate::percent::{MAX_WIDTH, ascii};
use crate::runtime::Runtime;
use crate::value::{Text, Value};

/// The notation of a float.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum FloatStyle {
    Exponent,
    Fixed,
    General,
    /// Like `General`, but with at least one digit after the point, as in `str`.
    Plain,
}

/// Returns a float in a notation with `precision` digits; `alternate` keeps the point and trailing zeros.
pub(crate) fn float_text(
    number: f64,
    style: FloatStyle,
    precision: usize,
    alternate: bool,
) -> String {
    if !number.is_finite() {
        return float_repr(number);
    }
    match style {
        FloatStyle::Fixed => {
            let point = if alternate && precision == 0 { "." } else { "" };
            format!("{number:.precision$}{point}")
        }
        FloatStyle::Exponent => {
            let text = format!("{number:.precision$e}");
            let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
            let point = if alternate && precision == 0 { "." } else { "" };
            format!("{digits}{point}e{}", python_exponent(exponent))
        }
        FloatStyle::General | FloatStyle::Plain => {
            let precision = precision.max(1);
            let text = format!("{number:.*e}", precision - 1);
            let (digits, exponent) = text.split_once('e').unwrap_or((&text, "0"));
            let power: i64 = exponent.parse().unwrap_or(0);
            let limit = i64::try_from(precision).unwrap_or(i64::MAX);
            // One digit less has room, since `str` keeps one after the point.
            let limit = limit - i64::from(style == FloatStyle::Plain);
            let trim = |text: &str| match alternate || !text.contains('.') {
                true => text.to_owned(),
                false => text.trim_end_matches('0').trim_end_matches('.').to_owned(),
            };
            if (-4..limit.max(i64::from(style != FloatStyle::Plain))).contains(&power) {
                let places = usize::try_from(i64::try_from(precision).unwrap_or(0) - 1 - power);
                let text = trim(&format!("{number:.*}", places.unwrap_or(0)));
                match style == FloatStyle::Plain && !text.contains('.') {
                    true => text + ".0",
                    false => text,
                }
            } else {
                format!("{}e{}", trim(digits), python_exponent(exponent))
            }
        }
    }
}

/// Returns `format.format(*args, **kwargs)`.
pub(crate) fn format_braces(runtime: &mut Runtime, format: &Text, args: &Args) -> Result<Value> {
    let mut counter = Counter::default();
    let out = braces(runtime, format, &format.text, args, &mut counter, 2)?;
    runtime.reserve_text(out.len())?;
    Ok(format.like(out))
}

/// The numbering of replacement fields: automatic (`{}`) or manual (`{0}`).
#[derive(Default)]
struct Counter {
    next: usize,
    is_manual: bool,
}

fn braces(
    runtime: &mut Runtime,
    kind: &Text,
    format: &str,
    args: &Args,
    counter: &mut Counter,
    depth: usize,
) -> Result<String> {
    if depth == 0 {
        return Err(Error::value("Max string recursion exceeded"));
    }
    let mut out = String::new();
    let mut rest = format;
    while let Some(at) = rest.find(['{', '}']) {
        out.push_str(&rest[..at]);
        let is_open = rest[at..].starts_with('{');
        rest = &rest[at + 1..];
        if rest.starts_with(if is_open { '{' } else { '}' }) {
            out.push(if is_open { '{' } else { '}' });
            rest = &rest[1..];
            continue;
        }
        if !is_open {
            let detail = "Single '}' encountered in format string";
            return Err(Error::value(detail));
        }
        let mut level = 1;
        let end = rest.char_indices().find(|(_, letter)| {
            match letter {
                '{' => level += 1,
                '}' => level -= 1,
                _ => {}
            }
            level == 0
        });
        let (end, _) = end.ok_or_else(|| Error::value("expected '}' before end of string"))?;
        let (field, after) = (&rest[..end], &rest[end + 1..]);
        rest = after;
        let name_end = field.find(['!', ':']).unwrap_or(field.len());
        let (name, tail) = field.split_at(name_end);
        let (conversion, spec) = match tail.strip_prefix('!') {
            Some(tail) => {
                let letter = tail.chars().next();
                let letter = letter.ok_or_else(|| Error::value("no conversion"))?;
                let tail = &tail[letter.len_utf8()..];
                match tail.strip_prefix(':') {
                    Some(spec) => (Some(letter), spec),
                    None if tail.is_empty() => (Some(letter), ""),
                    None => {
                        let detail = "expected ':' after conversion specifier";
                        return Err(Error::value(detail));
                    }
                }
            }
            None => (None, tail.strip_prefix(':').unwrap_or("")),
        };
        let value = lookup(runtime, name, args, counter)?;
        let value = match conversion {
            None => value,
            Some('s') => Value::from(value.to_text()?),
            Some('r') => Value::from(value.repr()?),
            Some('a') => Value::from(ascii(&value.repr()?)),
            Some(other) => {
                return Err(Error::value(format!(
                    "Unknown conversion specifier {other:?}"
                )));
            }
        };
        let spec = braces(runtime, kind, spec, args, counter, depth - 1)?;
        let text = match kind.is_markup {
            true if value.is_markup() && spec.is_empty() => value.to_text()?.to_string(),
            true => escaped(&Value::from(format_value(&value, &spec)?))?,
            false => format_value(&value, &spec)?,
        };
        runtime.check_text(out.len() + text.len())?;
        out.push_str(&text);
    }
    out.push_str(rest);
    Ok(out)
}

/// Returns the value that a field names, such as `0.name[key]`.
fn lookup(runtime: &mut Runtime, field: &str, args: &Args, counter: &mut Counter) -> Result<Value> {
    let end = field.find(['.', '[']).unwrap_or(field.len());
    let (first, mut rest) = field.split_at(end);
    let is_number = !first.is_empty() && first.bytes().all(|byte| byte.is_ascii_digit());
    let mut value = if first.is_empty() || is_number {
        if is_number && counter.next > 0 || !is_number && counter.is_manual {
            let detail = "cannot switch between manual and automatic field numbering";
            return Err(Error::value(detail));
        }
        let index = match is_number {
            true => {
                counter.is_manual = true;
                first.parse().unwrap_or(usize::MAX)
            }
            false => {
                counter.next += 1;
                counter.next - 1
            }
        };
        args.positional
            .get(index)
            .cloned()
            .ok_or_else(|| Error::lookup(format!("Replacement index {index} out of range")))?
    } else {
        let named = args.named.iter().find(|(name, _)| **name == *first);
        named
            .map(|(_, value)| value.clone())
            .ok_or_else(|| Error::lookup(format!("{first:?}")))?
    };
    while !rest.is_empty() {
        if let Some(attribute) = rest.strip_prefix('.') {
            let end = attribute.find(['.', '[']).unwrap_or(attribute.len());
            let (name, after) = attribute.split_at(end);
            if name.is_empty() {
                return Err(Error::value("Empty attribute in format string"));
            }
            value = runtime.attribute(&value, name)?;
            rest = after;
        } else {
            let inner = rest.strip_prefix('[').and_then(|rest| rest.split_once(']'));
            let (key, after) = inner.ok_or_else(|| Error::value("Missing ']' in format string"))?;
            if key.is_empty() {
                return Err(Error::value("Empty attribute in format string"));
            }
            let key = match key.parse::<i128>() {
                Ok(index) if key.bytes().all(|byte| byte.is_ascii_digit()) => Value::Int(index),
                _ => Value::from(key),
            };
            value = runtime.item(&value, &key)?;
            rest = after;
        }
    }
    Ok(value)
}

struct Spec {
    fill: char,
    align: Option<char>,
    sign: Option<char>,
    alternate: bool,
    width: usize,
    grouping: Option<char>,
    precision: Option<usize>,
    kind: Option<char>,
}

fn parse_spec(spec: &str) -> Result<Spec> {
    let invalid = || Error::value(format!("Invalid format specifier '{spec}'"));
    let letters: Vec<char> = spec.chars().collect();
    let mut at = 0;
    let is_align = |letter: Option<&char>| letter.is_some_and(|c| ['<', '>', '=', '^'].contains(c));
    let (mut fill, mut align) = (None, None);
    if is_align(letters.get(1)) {
        (fill, align) = (Some(letters[0]), Some(letters[1]));
        at = 2;
    } else if is_align(letters.first()) {
        align = Some(letters[0]);
        at = 1;
    }
    let take = |at: &mut usize, allowed: &[char]| {
        let letter = letters.get(*at).copied().filter(|c| allowed.contains(c));
        *at += usize::from(letter.is_some());
        letter
    };
    let sign = take(&mut at, &['+', '-', ' ']);
    let alternate = take(&mut at, &['#']).is_some();
    if take(&mut at, &['0']).is_some() && fill.is_none() {
        fill = Some('0');
        align = align.or(Some('='));
    }
    let number = |at: &mut usize| -> Result<Option<usize>> {
        let start = *at;
        while letters.get(*at).is_some_and(char::is_ascii_digit) {
            *at += 1;
        }
        if start == *at {
            return Ok(None);
        }
        let text: String = letters[start..*at].iter().collect();
        let number = text.parse().unwrap_or(usize::MAX);
        match number > MAX_WIDTH {
            false => Ok(Some(number)),
            true => Err(Error::limit(format!(
                "a width or precision of {text} is larger than {MAX_WIDTH}"
            ))),
        }
    };
    let width = number(&mut at)?.unwrap_or(0);
    let grouping = letters.get(at).copied().filter(|c| [',', '_'].contains(c));
    at += usize::from(grouping.is_some());
    let mut precision = None;
    if letters.get(at) == Some(&'.') {
        at += 1;
        precision = Some(
            number(&mut at)?.ok_or_else(|| Error::value("Format specifier missing precision"))?,
        );
    }
    let kind = letters.get(at).copied();
    match at + usize::from(kind.is_some()) == letters.len() {
        true => Ok(Spec {
            fill: fill.unwrap_or(' '),
            align,
            sign,
            alternate,
            width,
            grouping,
            precision,
            kind,
        }),
        false => Err(invalid()),
    }
}

/// Returns Python's `format(value, spec)`.
fn format_value(value: &Value, spec: &str) -> Result<String> {
    if spec.is_empty() {
        return Ok(value.to_text()?.to_string());
    }
    let parsed = parse_spec(spec)?;
    let unknown = |kind: char| {
        Error::value(format!(
            "Unknown format code '{kind}' for object of type '{}'",
            value.type_name()
        ))
    };
    match value {
        Value::Str(text) => {
            let invalid = parsed.kind.filter(|kind| *kind != 's');
            if let Some(kind) = invalid {
                return Err(unknown(kind));
            }
            let forbidden = parsed.sign.is_some()
                || parsed.alternate
                || parsed.grouping.is_some()
                || parsed.align == Some('=');
            if forbidden && !(parsed.align == Some('=') && spec.starts_with('0')) {
                let detail = "the format specifier is not allowed for strings";
                return Err(Error::value(detail));
            }
            let text: String = match parsed.precision {
                Some(precision) => text.text.chars().take(precision).collect(),
                None => text.text.to_string(),
            };
            let align = parsed.align.filter(|align| *align != '=').unwrap_or('<');
            Ok(padded("", &text, align, &parsed))
        }
        Value::Bool(_) | Value::Int(_) | Value::Float(_) => {
            let is_float = matches!(value, Value::Float(_));
            match parsed.kind {
                None if matches!(value, Value::Bool(_)) && parsed.precision.is_none() => {
                    format_int(value.as_int().unwrap_or(0), &parsed)
                }
                None | Some('n') if is_float => format_float(value, &parsed),
                None if parsed.precision.is_some() => Err(Error::value(
                    "Precision not allowed in integer format specifier",
                )),
                None | Some('b' | 'c' | 'd' | 'n' | 'o' | 'x' | 'X') if !is_float => {
                    format_int(value.as_int().unwrap_or(0), &parsed)
                }
                Some('e' | 'E' | 'f' | 'F' | 'g' | 'G' | '%') => format_float(value, &parsed),
                Some(kind) => Err(unknown(kind)),
                None => format_float(value, &parsed),
            }
        }
        other => Err(Error::type_error(format!(
            "unsupported format string passed to {}.__format__",
            other.type_name()
        ))),
    }
}

fn format_int(number: i128, spec: &Spec) -> Result<String> {
    if spec.precision.is_some() {
        let detail = "Precision not allowed in integer format specifier";
        return Err(Error::value(detail));
    }
    let magnitude = number.unsigned_abs();
    let (prefix, digits, group) = match spec.kind {
        Some('b') => ("0b", format!("{magnitude:b}"), 4),
        Some('o') => ("0o", format!("{magnitude:o}"), 4),
        Some('x') => ("0x", format!("{magnitude:x}"), 4),
        Some('X') => ("0X", format!("{magnitude:X}"), 4),
        Some('c') => {
            let letter = u32::try_from(number).ok().and_then(char::from_u32);
            let letter = letter.ok_or_else(|| Error::value("%c arg not in range"))?;
            if spec.sign.is_some() {
                let detail = "Sign not allowed with integer format specifier 'c'";
                return Err(Error::value(detail));
            }
            let align = spec.align.unwrap_or('<');
            return Ok(padded("", &letter.to_string(), align, spec));
        }
        _ => ("", magnitude.to_string(), 3),
    };
    if group == 4 && spec.grouping == Some(',') {
        return Err(Error::value("Cannot specify ',' with this format code"));
    }
    let prefix = if spec.alternate { prefix } else { "" };
    let sign = format!("{}{prefix}", sign_of(number < 0, spec));
    Ok(padded_number(&sign, &digits, "", group, spec))
}

fn format_float(value: &Value, spec: &Spec) -> Result<String> {
    let mut number = match value {
        Value::Float(number) => *number,
        other => int_to_float(other.as_int().unwrap_or(0)),
    };
    let kind = spec.kind.unwrap_or(' ');
    let (style, suffix) = match kind.to_ascii_lowercase() {
        'e' => (FloatStyle::Exponent, ""),
        'f' => (FloatStyle::Fixed, ""),
        '%' => {
            number *= 100.0;
            (FloatStyle::Fixed, "%")
        }
        'g' | 'n' => (FloatStyle::General, ""),
        _ => (FloatStyle::Plain, ""),
    };
    let text = match (style, spec.precision) {
        (FloatStyle::Plain, None) => float_repr(number),
        (style, precision) => float_text(number, style, precision.unwrap_or(6), spec.alternate),
    };
    let text = match kind.is_ascii_uppercase() {
        true => text.to_ascii_uppercase(),
        false => text,
    };
    let (is_negative, text) = match text.strip_prefix('-') {
        Some(rest) => (true, rest.to_owned()),
        None => (false, text),
    };
    let end = text
        .find(|c: char| !c.is_ascii_digit())
        .unwrap_or(text.len());
    let (digits, rest) = text.split_at(end);
    let rest = format!("{rest}{suffix}");
    let sign = sign_of(is_negative, spec);
    Ok(padded_number(sign, digits, &rest, 3, spec))
}

fn sign_of(is_negative: bool, spec: &Spec) -> &'static str {
    match (is_negative, spec.sign) {
        (true, _) => "-",
        (false, Some('+')) => "+",
        (false, Some(' ')) => " ",
        _ => "",
    }
}

fn padded_number(sign: &str, digits: &str, rest: &str, group: usize, spec: &Spec) -> String {
    let align = spec.align.unwrap_or('>');
    let mut digits = digits.to_owned();
    if let Some(separator) = spec.grouping {
        // Zeros that fill the width are grouped with the digits.
        if spec.fill == '0' && align == '=' {
            let room = spec.width.saturating_sub(sign.len() + rest.chars().count());
            while grouped_length(digits.len() + 1, group) <= room {
                digits.insert(0, '0');
            }
            if grouped_length(digits.len(), group) < room {
                digits.insert(0, '0');
            }
        }
        digits = grouped(&digits, group, separator);
    }
    padded(sign, &format!("{digits}{rest}"), align, spec)
}

fn grouped_length(digits: usize, group: usize) -> usize {
    digits + digits.saturating_sub(1) / group
}

fn grouped(digits: &str, group: usize, separator: char) -> String {
    let mut out = String::new();
    for (number, digit) in digits.chars().enumerate() {
        if number > 0 && (digits.len() - number).is_multiple_of(group) {
            out.push(separator);
        }
        out.push(digit);
    }
    out
}

fn padded(sign: &str, body: &str, align: char, spec: &Spec) -> String {
    let length = sign.chars().count() + body.chars().count();
    let missing = spec.width.saturating_sub(length);
    let fill = |count: usize| spec.fill.to_string().repeat(count);
    match align {
        '<' => format!("{sign}{body}{}", fill(missing)),
        '^' => format!(
            "{}{sign}{body}{}",
            fill(missing / 2),
            fill(missing - missing / 2)
        ),
        '=' => format!("{sign}{}{body}", fill(missing)),
        _ => format!("{}{sign}{body}", fill(missing)),
    }
}
