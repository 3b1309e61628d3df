//! Filters that encode for URLs and HTML.

use crate::args::{Args, bool_or, text};
use crate::error::{Error, Result};
use crate::markup::escaped;
use crate::runtime::Runtime;
use crate::value::{Elements, Value, View};

pub(super) fn url_quote(value: &Value, in_query: bool) -> Result<String> {
    let mut out = String::new();
    for byte in value.to_text()?.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'_' | b'.' | b'-' | b'~' => {
                out.push(char::from(byte));
            }
            b'/' if !in_query => out.push('/'),
            b' ' if in_query => out.push('+'),
            byte => out.push_str(&format!("%{byte:02X}")),
        }
    }
    Ok(out)
}

pub(super) fn url_encode(runtime: &mut Runtime, value: &Value) -> Result<Value> {
    let is_iterable = Elements::new(value).is_ok();
    if matches!(value, Value::Str(_)) || !is_iterable {
        return Ok(Value::from(url_quote(value, false)?));
    }
    let pairs = match value {
        Value::Dict(dict) => Value::View(View::Items, dict.clone()),
        other => other.clone(),
    };
    let mut parts = Vec::new();
    for pair in runtime.collect(&pairs)? {
        match <[Value; 2]>::try_from(runtime.collect(&pair)?) {
            Ok([key, value]) => {
                parts.push(format!(
                    "{}={}",
                    url_quote(&key, true)?,
                    url_quote(&value, true)?
                ));
            }
            Err(_) => return Err(Error::value("urlencode needs pairs")),
        }
    }
    Ok(Value::from(parts.join("&")))
}

pub(super) fn xml_attributes(value: &Value, args: Args) -> Result<Value> {
    let [autospace] = args.bind("xmlattr", ["autospace"], 0)?;
    value.check_defined()?;
    let Value::Dict(dict) = value else {
        return Err(Error::type_error("xmlattr needs a mapping"));
    };
    let mut parts = Vec::new();
    for (key, value) in &dict.entries {
        if value.is_none() || value.is_undefined() {
            continue;
        }
        let name = text(key)?;
        let invalid = |c: char| matches!(c, ' ' | '\t'..='\r' | '/' | '>' | '=');
        if name.contains(invalid) {
            return Err(Error::value(format!(
                "Invalid character in attribute name: {}",
                key.named()
            )));
        }
        parts.push(format!("{}=\"{}\"", escaped(key)?, escaped(value)?));
    }
    let text = parts.join(" ");
    let spaced = bool_or(autospace, true) && !text.is_empty();
    Ok(Value::from(if spaced { format!(" {text}") } else { text }))
}
