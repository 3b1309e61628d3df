//! The keyword `format` of JSON schemas.

use serde_json::Value;

/// The formats that the grammar enforces.
const ENFORCED: [&str; 10] = [
    "date-time",
    "time",
    "date",
    "duration",
    "email",
    "hostname",
    "ipv4",
    "ipv6",
    "uuid",
    "uri",
];

/// Removes all other formats from a schema. The grammar refuses them, but to JSON Schema they are annotations, which
/// restrict nothing: pydantic writes `path`, `binary` and `password` for its types of paths, bytes and secrets.
pub(crate) fn remove_annotations(schema: &mut Value) {
    let Value::Object(fields) = schema else {
        return;
    };
    fields.retain(|key, value| {
        let format = value.as_str().filter(|_| key == "format");
        format.is_none_or(|format| ENFORCED.contains(&format))
    });
    for (key, value) in fields {
        match (key.as_str(), value) {
            // Values, not schemas.
            ("const" | "enum" | "default" | "examples", _) => {}
            // Their keys are names, not keywords.
            (
                "properties" | "patternProperties" | "$defs" | "definitions",
                Value::Object(named),
            ) => {
                named.values_mut().for_each(remove_annotations);
            }
            (_, Value::Array(schemas)) => schemas.iter_mut().for_each(remove_annotations),
            (_, schema) => remove_annotations(schema),
        }
    }
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;

    #[test]
    fn formats_that_are_not_enforced_are_removed_and_names_and_values_stay() {
        let mut schema = json!({
            "properties": {
                "format": {"type": "string", "format": "path"},
                "const": {"type": "string", "format": "binary"},
                "when": {"type": "string", "format": "date"},
                "kind": {"const": {"format": "path"}},
            },
            "anyOf": [{"format": "password"}, {"items": {"format": "x"}}],
            "$defs": {"A": {"format": "ipvanyaddress", "default": {"format": "x"}}},
        });
        remove_annotations(&mut schema);
        let want = json!({
            "properties": {
                "format": {"type": "string"},
                "const": {"type": "string"},
                "when": {"type": "string", "format": "date"},
                "kind": {"const": {"format": "path"}},
            },
            "anyOf": [{}, {"items": {}}],
            "$defs": {"A": {"default": {"format": "x"}}},
        });
        assert_eq!(schema, want);
    }
}
