//! `format % values`, the older formatting of Python's strings.

use crate::error::{Error, Result};
use crate::format_spec::{FloatStyle, float_text};
use crate::markup::escaped;
use crate::number::int_to_float;
use crate::operators::truncated;
use crate::runtime::Runtime;
use crate::value::{Text, Value};

/// The widest field and the largest precision: no prompt needs more.
pub(crate) const MAX_WIDTH: usize = 1 << 16;

#[derive(Default)]
struct Field {
    left: bool,
    plus: bool,
    space: bool,
    zero: bool,
    alternate: bool,
    width: usize,
    precision: Option<usize>,
}

/// The values of a format, and the position of the next one.
struct Values<'v> {
    values: &'v [Value],
    mapping: Option<&'v Value>,
    at: usize,
}

impl<'v> Values<'v> {
    fn next(&mut self) -> Result<&'v Value> {
        self.at += 1;
        self.values
            .get(self.at - 1)
            .ok_or_else(|| Error::type_error("not enough arguments for format string"))
    }

    fn number(&mut self) -> Result<i128> {
        let value = self.next()?;
        value
            .as_int()
            .ok_or_else(|| Error::type_error("* wants int"))
    }
}

/// Returns `format % values`.
pub(crate) fn format_percent(
    runtime: &mut Runtime,
    format: &Text,
    values: &Value,
) -> Result<Value> {
    // A value that is not a tuple counts as the only value.
    let items = match values {
        Value::Tuple(items) => items.items.as_slice(),
        other => std::slice::from_ref(other),
    };
    // Values of these types can be looked up by `%(name)s`, and then need not all be used.
    let mapping = match values {
        Value::Tuple(_) | Value::Str(_) => None,
        Value::Dict(_) | Value::List(_) | Value::Range(_) | Value::Undefined(_) => Some(values),
        _ => None,
    };
    let mut values = Values {
        values: items,
        mapping,
        at: 0,
    };
    let mut out = String::new();
    let mut rest = &*format.text;
    while let Some(at) = rest.find('%') {
        out.push_str(&rest[..at]);
        rest = conversion(
            runtime,
            &rest[at + 1..],
            &mut values,
            format.is_markup,
            &mut out,
        )?;
        runtime.check_text(out.len())?;
    }
    out.push_str(rest);
    if values.at < values.values.len() && values.mapping.is_none() {
        let detail = "not all arguments converted during string formatting";
        return Err(Error::type_error(detail));
    }
    runtime.reserve_text(out.len())?;
    Ok(format.like(out))
}

/// Writes one conversion; returns the rest of the format.
fn conversion<'f>(
    runtime: &mut Runtime,
    mut rest: &'f str,
    values: &mut Values<'_>,
    escapes: bool,
    out: &mut String,
) -> Result<&'f str> {
    let incomplete = || Error::value("incomplete format");
    let mut named = None;
    if let Some(inner) = rest.strip_prefix('(') {
        let mapping = values
            .mapping
            .ok_or_else(|| Error::type_error("format requires a mapping"))?;
        let mut depth = 1;
        let end = inner.char_indices().find(|(_, letter)| {
            match letter {
                '(' => depth += 1,
                ')' => depth -= 1,
                _ => {}
            }
            depth == 0
        });
        let (end, _) = end.ok_or_else(|| Error::value("incomplete format key"))?;
        named = Some(crate::operators::item(
            mapping,
            &Value::from(&inner[..end]),
        )?);
        rest = &inner[end + 1..];
    }
    let mut field = Field::default();
    loop {
        match rest.chars().next().ok_or_else(incomplete)? {
            '-' => field.left = true,
            '+' => field.plus = true,
            ' ' => field.space = true,
            '0' => field.zero = true,
            '#' => field.alternate = true,
            _ => break,
        }
        rest = &rest[1..];
    }
    let mut number = |rest: &mut &'f str| -> Result<Option<i128>> {
        if let Some(after) = rest.strip_prefix('*') {
            *rest = after;
            return values.number().map(Some);
        }
        let length = rest
            .find(|c: char| !c.is_ascii_digit())
            .unwrap_or(rest.len());
        let (digits, after) = rest.split_at(length);
        *rest = after;
        match digits.is_empty() {
            true => Ok(None),
            false => digits
                .parse()
                .map(Some)
                .map_err(|_| Error::value("width too big")),
        }
    };
    if let Some(width) = number(&mut rest)? {
        field.left |= width < 0;
        field.width = bounded(width.saturating_abs())?;
    }
    if let Some(after) = rest.strip_prefix('.') {
        rest = after;
        field.precision = Some(bounded(number(&mut rest)?.unwrap_or(0).max(0))?);
    }
    rest = rest.strip_prefix(['h', 'l', 'L']).unwrap_or(rest);
    let letter = rest.chars().next().ok_or_else(incomplete)?;
    let rest = &rest[letter.len_utf8()..];
    if letter == '%' {
        out.push('%');
        return Ok(rest);
    }
    let value = match &named {
        Some(value) => value,
        None => values.next()?,
    };
    let (sign, body) = match letter {
        's' | 'r' | 'a' => {
            let text = match (letter, escapes) {
                ('s', true) => escaped(value)?,
                ('s', false) => value.to_text()?.to_string(),
                ('r', true) => crate::markup::escape(&value.repr()?),
                ('r', false) => value.repr()?,
                _ => ascii(&value.repr()?),
            };
            field.zero = false;
            let text = match field.precision {
                Some(precision) => text.chars().take(precision).collect(),
                None => text,
            };
            (String::new(), text)
        }
        'c' => {
            field.zero = false;
            (String::new(), character(value)?)
        }
        'd' | 'i' | 'u' => {
            let is_number = value.as_int().is_some() || matches!(value, Value::Float(_));
            if !is_number {
                value.check_defined()?;
                return Err(not_a_number(letter, "a real number", value));
            }
            integer(truncated(value)?, 10, false, &field)
        }
        'o' | 'x' | 'X' => {
            let number = value.as_int();
            let number = number.ok_or_else(|| not_a_number(letter, "an integer", value))?;
            let radix = if letter == 'o' { 8 } else { 16 };
            integer(number, radix, letter == 'X', &field)
        }
        'e' | 'E' | 'f' | 'F' | 'g' | 'G' => {
            value.check_defined()?;
            let number = match value {
                Value::Float(number) => *number,
                other => other.as_int().map(int_to_float).ok_or_else(|| {
                    Error::type_error(format!("must be real number, not {}", value.type_name()))
                })?,
            };
            let style = match letter.to_ascii_lowercase() {
                'e' => FloatStyle::Exponent,
                'f' => FloatStyle::Fixed,
                _ => FloatStyle::General,
            };
            let precision = field.precision.unwrap_or(6);
            let text = float_text(number, style, precision, field.alternate);
            let text = match letter.is_ascii_uppercase() {
                true => text.to_ascii_uppercase(),
                false => text,
            };
            split_sign(text, &field)
        }
        other => {
            return Err(Error::value(format!(
                "unsupported format character {other:?}"
            )));
        }
    };
    runtime.check_text(out.len() + field.width)?;
    let length = sign.chars().count() + body.chars().count();
    let missing = field.width.saturating_sub(length);
    let (spaces, zeros, after) = match (field.left, field.zero) {
        (true, _) => (0, 0, missing),
        (false, true) => (0, missing, 0),
        (false, false) => (missing, 0, 0),
    };
    out.push_str(&" ".repeat(spaces));
    out.push_str(&sign);
    out.push_str(&"0".repeat(zeros));
    out.push_str(&body);
    out.push_str(&" ".repeat(after));
    Ok(rest)
}

fn bounded(number: i128) -> Result<usize> {
    let number = usize::try_from(number).unwrap_or(usize::MAX);
    match number > MAX_WIDTH {
        false => Ok(number),
        true => Err(Error::limit(format!(
            "a width or precision of {number} is larger than {MAX_WIDTH}"
        ))),
    }
}

fn not_a_number(letter: char, expected: &str, value: &Value) -> Error {
    Error::type_error(format!(
        "%{letter} format: {expected} is required, not {}",
        value.type_name()
    ))
}

fn character(value: &Value) -> Result<String> {
    if let Value::Str(text) = value {
        return match text.count() {
            1 => Ok(text.text.to_string()),
            _ => Err(Error::type_error("%c requires int or char")),
        };
    }
    let code = value
        .as_int()
        .ok_or_else(|| Error::type_error("%c requires int or char"))?;
    let letter = u32::try_from(code).ok().and_then(char::from_u32);
    letter
        .map(String::from)
        .ok_or_else(|| Error::value("%c arg is not a character"))
}

fn integer(number: i128, radix: u32, upper: bool, field: &Field) -> (String, String) {
    let digits = match (radix, upper) {
        (8, _) => format!("{:o}", number.unsigned_abs()),
        (16, false) => format!("{:x}", number.unsigned_abs()),
        (16, true) => format!("{:X}", number.unsigned_abs()),
        _ => number.unsigned_abs().to_string(),
    };
    let prefix = match (field.alternate, radix, upper) {
        (true, 8, _) => "0o",
        (true, 16, false) => "0x",
        (true, 16, true) => "0X",
        _ => "",
    };
    let digits = format!("{digits:0>width$}", width = field.precision.unwrap_or(0));
    let sign = format!("{}{prefix}", sign_of(number < 0, field));
    (sign, digits)
}

fn sign_of(is_negative: bool, field: &Field) -> &'static str {
    match (is_negative, field.plus, field.space) {
        (true, _, _) => "-",
        (false, true, _) => "+",
        (false, false, true) => " ",
        _ => "",
    }
}

fn split_sign(text: String, field: &Field) -> (String, String) {
    match text.strip_prefix('-') {
        Some(rest) => ("-".to_owned(), rest.to_owned()),
        None => (sign_of(false, field).to_owned(), text),
    }
}

/// Returns a `repr` with escapes for characters that are not ASCII, as Python's `ascii`.
pub(crate) fn ascii(repr: &str) -> String {
    repr.chars()
        .map(|letter| match u32::from(letter) {
            code @ ..=0x7f => char::from_u32(code).map(String::from).unwrap_or_default(),
            code @ ..=0xff => format!("\\x{code:02x}"),
            code @ ..=0xffff => format!("\\u{code:04x}"),
            code => format!("\\U{code:08x}"),
        })
        .collect()
}
