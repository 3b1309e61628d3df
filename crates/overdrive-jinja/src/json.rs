//! JSON in the format of Python's `json.dumps`: tools and arguments in a prompt must read as they did
//! when the model was trained.

use std::fmt::Write;

use crate::args::{Args, bool_or, given};
use crate::error::{Error, Result};
use crate::filters::sorted;
use crate::limits::{MAX_OUTPUT_BYTES, too_long};
use crate::number::float_repr;
use crate::value::{Items, Value};

/// The largest indent in bytes; each line repeats it by its depth.
const MAX_INDENT: usize = 64;

/// Implements the filter `tojson` of transformers' templates: `json.dumps(x, ensure_ascii=False,
/// indent=None, separators=None, sort_keys=False)`.
pub(crate) fn to_json(value: &Value, args: Args) -> Result<Value> {
    let [ascii, indent, separators, sorted] = args.bind(
        "tojson",
        ["ensure_ascii", "indent", "separators", "sort_keys"],
        0,
    )?;
    let indent = match given(indent) {
        None => None,
        Some(Value::Str(text)) => Some(text.text.to_string()),
        Some(value) => {
            let width = crate::args::int(&value)?.max(0);
            let width = usize::try_from(width).unwrap_or(usize::MAX);
            Some(" ".repeat(width.min(MAX_INDENT + 1)))
        }
    };
    if indent
        .as_ref()
        .is_some_and(|indent| indent.len() > MAX_INDENT)
    {
        return Err(Error::limit(format!(
            "an indent of tojson is larger than {MAX_INDENT} bytes"
        )));
    }
    let (item, key) = match given(separators) {
        // With an indent, Python writes no space after a comma.
        None => (
            if indent.is_some() { "," } else { ", " }.into(),
            ": ".into(),
        ),
        Some(Value::List(pair) | Value::Tuple(pair)) if pair.items.len() == 2 => {
            (separator(&pair, 0)?, separator(&pair, 1)?)
        }
        Some(_) => {
            return Err(Error::value("tojson: separators must be a pair of strings"));
        }
    };
    let mut writer = Writer {
        out: String::new(),
        ascii: bool_or(ascii, false),
        sorted: bool_or(sorted, false),
        indent,
        item,
        key,
    };
    writer.value(value, 0)?;
    Ok(Value::from(writer.out))
}

fn separator(pair: &Items, at: usize) -> Result<String> {
    match pair.items.get(at) {
        Some(Value::Str(text)) => Ok(text.text.to_string()),
        _ => Err(Error::type_error(
            "tojson: separators must be a pair of strings",
        )),
    }
}

struct Writer {
    out: String,
    ascii: bool,
    sorted: bool,
    indent: Option<String>,
    item: String,
    key: String,
}

impl Writer {
    fn value(&mut self, value: &Value, depth: usize) -> Result<()> {
        if self.out.len() > MAX_OUTPUT_BYTES {
            return Err(too_long());
        }
        match value {
            Value::None => self.out.push_str("null"),
            Value::Bool(value) => self.out.push_str(if *value { "true" } else { "false" }),
            Value::Int(value) => self.out.push_str(&value.to_string()),
            Value::Float(value) => self.out.push_str(&float(*value)),
            Value::Str(text) => self.string(&text.text),
            Value::List(items) | Value::Tuple(items) => {
                self.list(('[', ']'), items.items.len(), depth, |writer, index| {
                    writer.value(&items.items[index], depth + 1)
                })?;
            }
            Value::Dict(dict) => {
                let mut entries: Vec<&(Value, Value)> = dict.entries.iter().collect();
                if self.sorted {
                    let keyed = entries.into_iter().map(|entry| (entry.0.clone(), entry));
                    entries = sorted(keyed.collect(), false)?;
                }
                self.list(('{', '}'), entries.len(), depth, |writer, index| {
                    let (name, entry) = entries[index];
                    writer.string(&key(name)?);
                    let colon = writer.key.clone();
                    writer.out.push_str(&colon);
                    writer.value(entry, depth + 1)
                })?;
            }
            other => {
                return Err(Error::type_error(format!(
                    "Object of type {} is not JSON serializable",
                    other.type_name()
                )));
            }
        }
        Ok(())
    }

    fn list(
        &mut self,
        (open, close): (char, char),
        len: usize,
        depth: usize,
        mut write: impl FnMut(&mut Self, usize) -> Result<()>,
    ) -> Result<()> {
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
                c if c < ' ' || (self.ascii && !c.is_ascii()) => {
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

/// Returns the string of a key; `json.dumps` writes numbers, booleans and None as keys in quotes.
fn key(key: &Value) -> Result<String> {
    Ok(match key {
        Value::Str(text) => text.text.to_string(),
        Value::None => "null".to_owned(),
        Value::Bool(value) => value.to_string(),
        Value::Int(value) => value.to_string(),
        Value::Float(value) => float(*value),
        other => {
            return Err(Error::type_error(format!(
                "keys must be str, int, float, bool or None, not {}",
                other.type_name()
            )));
        }
    })
}

fn float(number: f64) -> String {
    match (number.is_nan(), number.is_infinite()) {
        (true, _) => "NaN".to_owned(),
        (_, true) => if number > 0.0 {
            "Infinity"
        } else {
            "-Infinity"
        }
        .to_owned(),
        _ => float_repr(number),
    }
}
