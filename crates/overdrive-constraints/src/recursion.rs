//! Detects infinitely recursive JSON schemas, for which the error of the grammar's parser shows only its own rules.

use std::collections::HashSet;

use serde_json::{Map, Value};

/// The levels of references and subschemas that are followed; deeper ones are left to the grammar's parser.
const MAX_DEPTH: usize = 200;

/// Returns a reference through which a schema requires itself, so that no JSON text fits it.
pub(crate) fn endless_reference(schema: &Value) -> Option<String> {
    let mut search = Search {
        root: schema,
        finite: HashSet::new(),
        under_way: Vec::new(),
        endless: None,
    };
    // The root counts as being checked from the beginning, as if a reference to it had been followed.
    search.under_way.push("#");
    match search.is_finite(schema, 0) {
        true => None,
        false => search.endless.map(str::to_owned),
    }
}

struct Search<'s> {
    root: &'s Value,
    /// The references that some text satisfies.
    finite: HashSet<&'s str>,
    under_way: Vec<&'s str>,
    /// The first reference that was reached again while it was being checked.
    endless: Option<&'s str>,
}

impl<'s> Search<'s> {
    /// Returns `true` unless every text that fits the schema would contain another text that fits it.
    fn is_finite(&mut self, schema: &'s Value, depth: usize) -> bool {
        let Value::Object(fields) = schema else {
            return true;
        };
        if depth > MAX_DEPTH {
            return true;
        }
        let list = |key: &str| fields.get(key).and_then(Value::as_array);
        if let Some(Value::String(reference)) = fields.get("$ref")
            && !self.is_reference_finite(reference, depth)
        {
            return false;
        }
        if let Some(parts) = list("allOf")
            && !parts.iter().all(|part| self.is_finite(part, depth + 1))
        {
            return false;
        }
        for key in ["anyOf", "oneOf"] {
            if let Some(choices) = list(key)
                && !choices.is_empty()
                && !choices
                    .iter()
                    .any(|choice| self.is_finite(choice, depth + 1))
            {
                return false;
            }
        }
        self.are_members_finite(fields, depth)
    }

    /// Checks the members that an object or an array must have.
    fn are_members_finite(&mut self, fields: &'s Map<String, Value>, depth: usize) -> bool {
        match fields.get("type").and_then(Value::as_str) {
            Some("object") => {
                let required = fields.get("required").and_then(Value::as_array);
                let properties = fields.get("properties").and_then(Value::as_object);
                let mut members = required
                    .into_iter()
                    .flatten()
                    .filter_map(|name| properties?.get(name.as_str()?));
                members.all(|member| self.is_finite(member, depth + 1))
            }
            Some("array") => {
                let least = fields.get("minItems").and_then(Value::as_u64);
                match fields.get("items") {
                    Some(items)
                        if least.unwrap_or(0) > 0 && !fields.contains_key("prefixItems") =>
                    {
                        self.is_finite(items, depth + 1)
                    }
                    _ => true,
                }
            }
            _ => true,
        }
    }

    fn is_reference_finite(&mut self, reference: &'s str, depth: usize) -> bool {
        if self.finite.contains(reference) {
            return true;
        }
        if self.under_way.contains(&reference) {
            self.endless.get_or_insert(reference);
            return false;
        }
        // References to other documents and anchors are left to the grammar's parser.
        let pointer = reference.strip_prefix('#');
        let pointer = pointer.filter(|pointer| pointer.is_empty() || pointer.starts_with('/'));
        let Some(target) = pointer.and_then(|pointer| self.root.pointer(pointer)) else {
            return true;
        };
        self.under_way.push(reference);
        let is_finite = self.is_finite(target, depth + 1);
        self.under_way.pop();
        if is_finite {
            self.finite.insert(reference);
        }
        is_finite
    }
}
