//! Jinja's builtin filters, and transformers' `tojson`.

mod encoding;
mod numbers;
mod sequences;
mod text;

pub(crate) use sequences::sorted;

use crate::args::{Args, bool_or, given, int_or, text};
use crate::ast::MathOperator;
use crate::error::{Error, ErrorKind, Result};
use crate::json::to_json;
use crate::markup::{escape, escaped, strip_tags};
use crate::runtime::Runtime;
use crate::string_methods::{capitalize, justified, replace, strip};
use crate::unicode::is_word;
use crate::value::{Text, Value};
use crate::{methods, operators, wrap};
use encoding::{url_encode, xml_attributes};
use numbers::{file_size, round, to_float, to_int};
use sequences::Getter;

use text::{format, indent, title, truncate, wordwrap};

/// The names of the filters, sorted. `urlize` and `random` are omitted: prompts have no links and must be
/// deterministic.
const NAMES: [&str; 52] = [
    "abs",
    "attr",
    "batch",
    "capitalize",
    "center",
    "count",
    "d",
    "default",
    "dictsort",
    "e",
    "escape",
    "filesizeformat",
    "first",
    "float",
    "forceescape",
    "format",
    "groupby",
    "indent",
    "int",
    "items",
    "join",
    "last",
    "length",
    "list",
    "lower",
    "map",
    "max",
    "min",
    "pprint",
    "reject",
    "rejectattr",
    "replace",
    "reverse",
    "round",
    "safe",
    "select",
    "selectattr",
    "slice",
    "sort",
    "string",
    "striptags",
    "sum",
    "title",
    "tojson",
    "trim",
    "truncate",
    "unique",
    "upper",
    "urlencode",
    "wordcount",
    "wordwrap",
    "xmlattr",
];

pub(crate) fn exists(name: &str) -> bool {
    NAMES.binary_search(&name).is_ok()
}

/// Returns `markupsafe.soft_str(value)`: `str(value)`, except that markup stays markup.
fn soft(value: &Value) -> Result<Text> {
    Ok(match value {
        Value::Str(text) => text.clone(),
        other => Text {
            text: other.to_text()?,
            is_markup: false,
        },
    })
}

/// Passes a value through a filter.
pub(crate) fn call(runtime: &mut Runtime, name: &str, value: Value, args: Args) -> Result<Value> {
    runtime.read_text(&value);
    let result = apply(runtime, name, value, args)?;
    runtime.read_text(&result);
    Ok(result)
}

fn apply(runtime: &mut Runtime, name: &str, value: Value, args: Args) -> Result<Value> {
    match name {
        "abs" => args.none("abs").and_then(|()| operators::absolute(&value)),
        "count" | "length" => {
            args.none("length")?;
            value.length().map(Value::from).ok_or_else(|| {
                Error::type_error(format!(
                    "object of type '{}' has no len()",
                    value.type_name()
                ))
            })
        }
        "e" | "escape" => {
            args.none("escape")?;
            Ok(Value::markup(escaped(&value)?))
        }
        "forceescape" => {
            args.none("forceescape")?;
            Ok(Value::markup(escape(&value.to_text()?)))
        }
        "safe" => {
            args.none("safe")?;
            Ok(Value::markup(value.to_text()?))
        }
        "string" => {
            args.none("string")?;
            Ok(Value::Str(soft(&value)?))
        }
        "striptags" => {
            args.none("striptags")?;
            Ok(Value::from(strip_tags(&value.to_text()?)))
        }
        "attr" => {
            let [name] = args.bind("attr", ["name"], 1)?;
            let name = name.unwrap_or(Value::None);
            let key = text(&name)?;
            match methods::attribute(runtime, &value, key)? {
                Some(_) => runtime.attribute(&value, key),
                None => Ok(Value::undefined(format!(
                    "'{} object' has no attribute '{key}'",
                    value.type_name()
                ))),
            }
        }
        "d" | "default" => {
            let [default, boolean] = args.bind("default", ["default_value", "boolean"], 0)?;
            let replaced = value.is_undefined() || bool_or(boolean, false) && !value.is_true();
            Ok(match replaced {
                true => default.unwrap_or_else(|| Value::from("")),
                false => value,
            })
        }
        "capitalize" | "lower" | "title" | "upper" => {
            args.none(name)?;
            let text = soft(&value)?;
            Ok(text.like(match name {
                "capitalize" => capitalize(&text.text),
                "lower" => text.text.to_lowercase(),
                "upper" => text.text.to_uppercase(),
                // jinja2 joins the words into a plain string.
                _ => return Ok(Value::from(title(&text.text))),
            }))
        }
        "center" => {
            let [width] = args.bind("center", ["width"], 0)?;
            let (text, width) = (soft(&value)?, int_or(width, 80)?);
            Ok(text.like(justified(runtime, &text, "center", width, " ")?))
        }
        "trim" => {
            let [letters] = args.bind("trim", ["chars"], 0)?;
            let (this, letters) = (soft(&value)?, given(letters));
            let letters = letters.as_ref().map(text).transpose()?;
            Ok(this.like(strip(&this.text, letters, "strip")))
        }
        "replace" => {
            let [old, new, count] = args.bind("replace", ["old", "new", "count"], 2)?;
            let (old, new) = (old.unwrap_or(Value::None), new.unwrap_or(Value::None));
            let count = int_or(given(count), -1)?;
            let this = Text {
                text: value.to_text()?,
                is_markup: false,
            };
            replace(runtime, &this, &old.to_text()?, &new.to_text()?, count)
        }
        "format" => format(runtime, &value, args),
        "indent" => indent(runtime, &value, args),
        "truncate" => truncate(&value, args),
        "wordcount" => {
            args.none("wordcount")?;
            runtime.read(&value);
            let text = value.to_text()?;
            let words = text.split(|letter| !is_word(letter));
            Ok(Value::from(words.filter(|word| !word.is_empty()).count()))
        }
        "wordwrap" => wordwrap(runtime, &value, args),
        "pprint" => args
            .none("pprint")
            .and_then(|()| wrap::pretty(&value))
            .map(Value::from),
        "int" => to_int(&value, args),
        "float" => to_float(&value, args),
        "round" => round(&value, args),
        "filesizeformat" => file_size(&value, args),
        "urlencode" => args
            .none("urlencode")
            .and_then(|()| url_encode(runtime, &value)),
        "xmlattr" => xml_attributes(&value, args),
        "tojson" => to_json(&value, args),
        "items" => {
            args.none("items")?;
            let view = match &value {
                Value::Undefined(_) => Value::tuple(Vec::new())?,
                Value::Dict(dict) => Value::View(crate::value::View::Items, dict.clone()),
                // jinja2's generator raises the error when it is first read.
                _ => {
                    return Value::lazy("generator", &[], |_| {
                        Err(Error::type_error("Can only get item pairs from a mapping."))
                    });
                }
            };
            let mut elements = crate::value::Elements::new(&view)?;
            Value::lazy("generator", &[view], move |runtime| elements.next(runtime))
        }
        "first" => {
            args.none("first")?;
            let first = crate::value::Elements::new(&value)?.next(runtime)?;
            Ok(first.unwrap_or_else(|| Value::undefined("No first item, sequence was empty.")))
        }
        "last" => {
            args.none("last")?;
            let last = sequences::reversed_items(runtime, &value)?
                .into_iter()
                .next();
            Ok(last.unwrap_or_else(|| Value::undefined("No last item, sequence was empty.")))
        }
        "list" => {
            args.none("list")?;
            let items = runtime.collect(&value)?;
            Value::list(items)
        }
        "reverse" => {
            args.none("reverse")?;
            sequences::reverse(runtime, &value)
        }
        "join" => {
            let [by, attribute] = args.bind("join", ["d", "attribute"], 0)?;
            let by = by.map_or_else(|| Ok("".into()), |by| by.to_text())?;
            let getter = given(attribute)
                .map(|name| Getter::new(&name))
                .transpose()?;
            let mut elements = crate::value::Elements::new(&value)?;
            let (mut out, mut is_first) = (String::new(), true);
            while let Some(item) = elements.next(runtime)? {
                if !std::mem::take(&mut is_first) {
                    out.push_str(&by);
                }
                let item = match &getter {
                    Some(getter) => getter.get(runtime, item)?,
                    None => item,
                };
                out.push_str(&item.to_text()?);
                runtime.check_text(out.len())?;
            }
            runtime.reserve_text(out.len())?;
            Ok(Value::from(out))
        }
        "sum" => {
            let [attribute, start] = args.bind("sum", ["attribute", "start"], 0)?;
            let getter = given(attribute)
                .map(|name| Getter::new(&name))
                .transpose()?;
            let mut sum = start.unwrap_or(Value::Int(0));
            if matches!(sum, Value::Str(_)) {
                return Err(Error::type_error("sum() can't sum strings"));
            }
            let mut elements = crate::value::Elements::new(&value)?;
            while let Some(item) = elements.next(runtime)? {
                let item = match &getter {
                    Some(getter) => getter.get(runtime, item)?,
                    None => item,
                };
                sum = operators::binary(runtime, MathOperator::Add, &sum, &item)?;
            }
            Ok(sum)
        }
        "batch" | "dictsort" | "groupby" | "map" | "max" | "min" | "reject" | "rejectattr"
        | "select" | "selectattr" | "slice" | "sort" | "unique" => {
            sequences::call(runtime, name, value, args)
        }
        other => Err(Error::new(
            ErrorKind::Runtime,
            format!("No filter named '{other}' found."),
        )),
    }
}
