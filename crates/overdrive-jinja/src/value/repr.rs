//! Python's `repr` and `str` of values.

use std::fmt::Write;
use std::sync::Arc;

use super::{Range, Value, View};
use crate::error::Result;
use crate::limits::{MAX_OUTPUT_BYTES, too_long};
use crate::number::float_repr;
use crate::unicode::is_printable;

impl Value {
    /// Returns Python's `str(value)`.
    pub(crate) fn to_text(&self) -> Result<Arc<str>> {
        Ok(match self {
            Value::Str(text) => text.text.clone(),
            Value::Undefined(_) => "".into(),
            other => other.repr()?.into(),
        })
    }

    /// Returns Python's `repr(value)`.
    pub(crate) fn repr(&self) -> Result<String> {
        let mut out = String::new();
        self.write_repr(&mut out)?;
        Ok(out)
    }

    /// Returns the value's `repr` for an error message, or only its type if it is large.
    pub(crate) fn named(&self) -> String {
        match self.shape().weight {
            ..16 => self.repr().unwrap_or_default(),
            _ => format!("a large {}", self.type_name()),
        }
    }

    pub(crate) fn write_repr(&self, out: &mut String) -> Result<()> {
        if out.len() > MAX_OUTPUT_BYTES {
            return Err(too_long());
        }
        match self {
            Value::Undefined(_) => out.push_str("Undefined"),
            Value::None => out.push_str("None"),
            Value::Bool(value) => out.push_str(if *value { "True" } else { "False" }),
            Value::Int(value) => out.push_str(&value.to_string()),
            Value::Float(value) => out.push_str(&float_repr(*value)),
            Value::Str(text) if text.is_markup => {
                out.push_str("Markup(");
                write_quoted(&text.text, out);
                out.push(')');
            }
            Value::Str(text) => write_quoted(&text.text, out),
            Value::List(items) => write_list(out, "[", "]", items.items.iter())?,
            Value::Tuple(items) if items.items.len() == 1 => {
                write_list(out, "(", ",)", items.items.iter())?;
            }
            Value::Tuple(items) => write_list(out, "(", ")", items.items.iter())?,
            Value::Dict(dict) => {
                out.push('{');
                for (number, (key, value)) in dict.entries.iter().enumerate() {
                    out.push_str(if number > 0 { ", " } else { "" });
                    key.write_repr(out)?;
                    out.push_str(": ");
                    value.write_repr(out)?;
                }
                out.push('}');
            }
            Value::View(view, dict) => {
                out.push_str(self.type_name());
                match view {
                    View::Keys => write_list(out, "([", "])", dict.entries.iter().map(|e| &e.0))?,
                    View::Values => write_list(out, "([", "])", dict.entries.iter().map(|e| &e.1))?,
                    View::Items => {
                        out.push_str("([");
                        for (number, (key, value)) in dict.entries.iter().enumerate() {
                            out.push_str(if number > 0 { ", " } else { "" });
                            write_list(out, "(", ")", [key, value].into_iter())?;
                        }
                        out.push_str("])");
                    }
                }
            }
            Value::Range(range) => {
                let Range {
                    start, stop, step, ..
                } = **range;
                out.push_str(&match step {
                    1 => format!("range({start}, {stop})"),
                    _ => format!("range({start}, {stop}, {step})"),
                });
            }
            // Python prints an address as well, which is different in every process.
            Value::Iterator(iterator) => {
                out.push_str(&format!("<{} object>", iterator.type_name));
            }
            Value::Object(object) => object.write_repr(out)?,
        }
        Ok(())
    }
}

fn write_list<'v>(
    out: &mut String,
    open: &str,
    close: &str,
    items: impl Iterator<Item = &'v Value>,
) -> Result<()> {
    out.push_str(open);
    for (number, item) in items.enumerate() {
        out.push_str(if number > 0 { ", " } else { "" });
        item.write_repr(out)?;
    }
    out.push_str(close);
    Ok(())
}

/// Writes the `repr` of a string: in double quotes if it contains single and no double ones, otherwise in single quotes.
fn write_quoted(text: &str, out: &mut String) {
    let quote = match text.contains('\'') && !text.contains('"') {
        true => '"',
        false => '\'',
    };
    out.push(quote);
    for letter in text.chars() {
        match letter {
            '\\' => out.push_str("\\\\"),
            '\n' => out.push_str("\\n"),
            '\r' => out.push_str("\\r"),
            '\t' => out.push_str("\\t"),
            letter if letter == quote => {
                out.push('\\');
                out.push(letter);
            }
            letter if is_printable(letter) => out.push(letter),
            letter => {
                // Writing to a String cannot fail.
                let _written = match u32::from(letter) {
                    code @ ..=0xff => write!(out, "\\x{code:02x}"),
                    code @ ..=0xffff => write!(out, "\\u{code:04x}"),
                    code => write!(out, "\\U{code:08x}"),
                };
            }
        }
    }
    out.push(quote);
}
