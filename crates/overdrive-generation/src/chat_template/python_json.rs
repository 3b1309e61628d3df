//! JSON in the format of Python's `json.dumps`: tools and arguments in a prompt must read as they did
//! when the model was trained.

use std::fmt::Write;

use minijinja::value::{Kwargs, Value, ValueKind};
use minijinja::{Error, ErrorKind};

use super::limits::{MAX_DEPTH, MAX_OUTPUT_BYTES};

/// Implements the filter `tojson` of transformers' templates: `json.dumps(x, ensure_ascii=False,
/// indent=None, separators=None, sort_keys=False)`, the last by name only.
pub(super) fn tojson(
    value: &Value,
    ensure_ascii: Option<Value>,
    indent: Option<Value>,
    separators: Option<Value>,
    kwargs: Kwargs,
) -> Result<Value, Error> {
    let option = |positional: Option<Value>, key: &'static str| -> Result<Option<Value>, Error> {
        let named = kwargs.get::<Option<Value>>(key)?;
        Ok(positional.or(named).filter(|value| !value.is_none()))
    };
    let is_true = |value: Option<Value>| value.is_some_and(|value| value.is_true());
    let ascii = is_true(option(ensure_ascii, "ensure_ascii")?);
    let sorted = is_true(option(None, "sort_keys")?);
    let indent = option(indent, "indent")?.map(|value| match value.as_str() {
        Some(text) => text.to_owned(),
        None => " ".repeat(usize::try_from(value).unwrap_or(0).min(MAX_INDENT)),
    });
    let (item, key) = match option(separators, "separators")? {
        // With an indent Python leaves no space before the end of a line.
        None => (
            if indent.is_some() { "," } else { ", " }.to_owned(),
            ": ".to_owned(),
        ),
        Some(pair) => {
            let mut parts = pair.try_iter()?.map(|part| part.to_string());
            match (parts.next(), parts.next(), parts.next()) {
                (Some(item), Some(key), None) => (item, key),
                _ => {
                    let message = "tojson: separators must be a pair of strings";
                    return Err(Error::new(ErrorKind::InvalidOperation, message));
                }
            }
        }
    };
    kwargs.assert_all_used()?;
    let mut writer = Writer {
        out: String::new(),
        ascii,
        sorted,
        indent,
        item,
        key,
    };
    writer.value(value, 0)?;
    // Marked safe: a template that enables escaping would otherwise escape the quotes.
    Ok(Value::from_safe_string(writer.out))
}

/// The largest indent in spaces; each line repeats it by its depth.
const MAX_INDENT: usize = 64;

struct Writer {
    out: String,
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    item: String,
    key: String,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        if depth > MAX_DEPTH || self.out.len() > MAX_OUTPUT_BYTES {
            let message = format!(
                "tojson: a value is nested more than {MAX_DEPTH} levels deep, or longer than {MAX_OUTPUT_BYTES} \
                 bytes"
            );
            return Err(Error::new(ErrorKind::InvalidOperation, message));
        }
        match value.kind() {
            ValueKind::None => self.out.push_str("null"),
            ValueKind::Bool => self
                .out
                .push_str(if value.is_true() { "true" } else { "false" }),
            ValueKind::Number => self.number(value),
            ValueKind::String => self.string(value.as_str().unwrap_or_default()),
            ValueKind::Seq | ValueKind::Iterable => {
                let items: Vec<Value> = value.try_iter()?.collect();
                self.list(('[', ']'), items.len(), depth, |writer, index| {
                    writer.value(&items[index], depth + 1)
                })?;
            }
            ValueKind::Map => self.map(value, depth)?,
            other => {
                let message = format!("tojson: {other} cannot be written as JSON");
                return Err(Error::new(ErrorKind::InvalidOperation, message));
            }
        }
        Ok(())
    }

    fn map(&mut self, value: &Value, depth: usize) -> Result<(), Error> {
        let mut entries = Vec::new();
        for key in value.try_iter()? {
            let entry = value.get_item(&key)?;
            // Python writes keys that are not strings this way.
            let name = match key.kind() {
                ValueKind::None => "null".to_owned(),
                ValueKind::Bool => key.to_string().to_lowercase(),
                _ => key.to_string(),
            };
            entries.push((name, entry));
        }
        if self.sorted {
            entries.sort_by(|(a, _), (b, _)| a.cmp(b));
        }
        self.list(('{', '}'), entries.len(), depth, |writer, index| {
            let (name, entry) = &entries[index];
            writer.string(name);
            let colon = writer.key.clone();
            writer.out.push_str(&colon);
            writer.value(entry, depth + 1)
        })
    }

    fn list(
        &mut self,
        (open, close): (char, char),
        len: usize,
        depth: usize,
        mut write: impl FnMut(&mut Self, usize) -> Result<(), Error>,
    ) -> Result<(), Error> {
        self.out.push(open);
        for index in 0..len {
            if index > 0 {
                let between = self.item.clone();
                self.out.push_str(&between);
            }
            self.new_line(depth + 1);
            write(self, index)?;
        }
        if len > 0 {
            self.new_line(depth);
        }
        self.out.push(close);
        Ok(())
    }

    fn new_line(&mut self, depth: usize) {
        if let Some(indent) = &self.indent {
            self.out.push('\n');
            self.out.push_str(&indent.repeat(depth));
        }
    }

    fn number(&mut self, value: &Value) {
        if value.is_integer() {
            self.out.push_str(&value.to_string());
            return;
        }
        match f64::try_from(value.clone()) {
            Ok(number) => self.out.push_str(&python_float(number)),
            Err(_) => self.out.push_str(&value.to_string()),
        }
    }

    fn string(&mut self, text: &str) {
        self.out.push('"');
        for c in text.chars() {
            match c {
                '"' => self.out.push_str("\\\""),
                '\\' => self.out.push_str("\\\\"),
                '\n' => self.out.push_str("\\n"),
                '\r' => self.out.push_str("\\r"),
                '\t' => self.out.push_str("\\t"),
                '\u{8}' => self.out.push_str("\\b"),
                '\u{c}' => self.out.push_str("\\f"),
                c if c < ' ' || (self.ascii && !c.is_ascii()) || (self.ascii && c == '\u{7f}') => {
                    let mut units = [0; 2];
                    for unit in c.encode_utf16(&mut units) {
                        // Writing to a String cannot fail.
                        let _written = write!(self.out, "\\u{unit:04x}");
                    }
                }
                c => self.out.push(c),
            }
        }
        self.out.push('"');
    }
}

/// Formats a number as Python's `repr`, and NaN and infinities as `json.dumps`.
fn python_float(number: f64) -> String {
    if number.is_nan() {
        return "NaN".to_owned();
    }
    if number.is_infinite() {
        return if number > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .to_owned();
    }
    // Rust and Python both write the shortest digits that read back, and switch to exponents at the
    // same magnitudes; only the exponents look different.
    let text = format!("{number:?}");
    match text.split_once('e') {
        None => text,
        Some((digits, exponent)) => {
            let (sign, exponent) = match exponent.strip_prefix('-') {
                Some(exponent) => ('-', exponent),
                None => ('+', exponent),
            };
            let digits = digits.strip_suffix(".0").unwrap_or(digits);
            format!("{digits}e{sign}{exponent:0>2}")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::python_float;

    #[test]
    fn floats_look_as_in_python() {
        for (number, text) in [
            (1.0, "1.0"),
            (0.1, "0.1"),
            (-2.5, "-2.5"),
            (1e15, "1000000000000000.0"),
            (1e16, "1e+16"),
            (1.5e300, "1.5e+300"),
            (0.0001, "0.0001"),
            (0.00001, "1e-05"),
            (-1.25e-7, "-1.25e-07"),
            (f64::INFINITY, "Infinity"),
        ] {
            assert_eq!(python_float(number), text);
        }
    }
}
