//! The tool calls of Qwen3-Coder and Qwen3.5, whose arguments are elements and not JSON.

use serde_json::{Map, Value};

const FUNCTION: &str = "<function=";
const PARAMETER: &str = "<parameter=";
const END: &str = "</parameter>";

/// Reads `<function=name><parameter=key>value</parameter>…</function>`, a name and its arguments; `None` if the text is
/// something else. `schema` returns the schema of the parameters of a function.
///
/// A value is text if the schema says so or nothing, as in vLLM's parser; of another type it is read as JSON, and stays text
/// if it is not JSON. The line breaks around a value are not part of it.
pub(crate) fn read<'s>(
    text: &str,
    schema: impl Fn(&str) -> Option<&'s Value>,
) -> Option<(String, Value)> {
    let (name, mut rest) = text.trim().strip_prefix(FUNCTION)?.split_once('>')?;
    let properties = schema(name).and_then(|schema| schema.get("properties"));
    let mut arguments = Map::new();
    while let Some((_, next)) = rest.split_once(PARAMETER) {
        let (key, value) = next.split_once('>')?;
        // The last closing mark may be missing if the model ended its text instead.
        let (value, after) = value.split_once(END).unwrap_or((value, ""));
        let value = value.strip_prefix('\n').unwrap_or(value);
        let value = value.strip_suffix('\n').unwrap_or(value);
        let property = properties.and_then(|properties| properties.get(key));
        arguments.insert(key.to_owned(), typed(value, property));
        rest = after;
    }
    Some((name.to_owned(), Value::Object(arguments)))
}

/// Returns the text as a value of the type that a schema names.
fn typed(text: &str, schema: Option<&Value>) -> Value {
    let as_text = || Value::String(text.to_owned());
    let kind = schema.and_then(|schema| schema.get("type"));
    let may_be_text = match kind {
        // An `anyOf`, a reference: what is JSON is no text.
        None => schema.is_none_or(|schema| schema.get("enum").is_some()),
        Some(Value::String(kind)) => kind == "string",
        Some(Value::Array(kinds)) => kinds.iter().any(|kind| kind == "string"),
        Some(_) => true,
    };
    match may_be_text {
        true => as_text(),
        false => match text.trim() {
            // Templates write the values of earlier calls as Python prints them, and models repeat it.
            "True" => true.into(),
            "False" => false.into(),
            "None" => Value::Null,
            json => serde_json::from_str(json).unwrap_or_else(|_| as_text()),
        },
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn arguments_have_the_types_of_the_schema() {
        let schema = json!({"type": "object", "properties": {
            "path": {"type": "string"}, "count": {"type": "integer"}, "deep": {"type": "boolean"},
            "tags": {"type": "array"}, "limit": {"anyOf": [{"type": "integer"}, {"type": "null"}]},
            "mode": {"enum": ["1", "2"]}, "wide": {"type": "boolean"}, "top": {"type": ["integer", "null"]},
        }});
        let text = "\n<function=find>\n<parameter=path>\n1\n</parameter>\n<parameter=count>\n3\n</parameter>\n\
                    <parameter=deep>true</parameter><parameter=tags>[\"a\"]</parameter>\n\
                    <parameter=limit>\nnull\n</parameter>\n<parameter=mode>2</parameter>\n\
                    <parameter=wide>\nFalse\n</parameter><parameter=top>None</parameter>\n\
                    <parameter=other>\n  7\n\nlines\n</parameter>\n</function>\n";
        let (name, arguments) = read(text, |_| Some(&schema)).unwrap();
        assert_eq!(name, "find");
        let expected = json!({
            "path": "1", "count": 3, "deep": true, "tags": ["a"], "limit": null, "mode": "2",
            "wide": false, "top": null, "other": "  7\n\nlines",
        });
        assert_eq!(arguments, expected);
        // What is not of its type stays text, and a model may stop early.
        let (_, arguments) =
            read("<function=find><parameter=count>many", |_| Some(&schema)).unwrap();
        assert_eq!(arguments, json!({"count": "many"}));
        let (_, arguments) = read("<function=time>\n</function>", |_| None).unwrap();
        assert_eq!(arguments, json!({}));
        for other in [
            "{\"name\": \"find\"}",
            "<function=find",
            "<function=a><parameter=b",
        ] {
            assert!(read(other, |_| None).is_none(), "{other}");
        }
    }
}
