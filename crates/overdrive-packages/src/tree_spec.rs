//! The names in a call spec: `torch.utils._pytree`'s JSON of the nesting of arguments and results.

use serde_json::Value;

/// Returns a name for each leaf of the arguments: the keyword, or the index of a positional argument, followed by
/// the index or key within a list or dictionary (`1.0`). `None` if the text is not a call spec.
pub(crate) fn argument_names(text: &str) -> Option<Vec<String>> {
    let root = root(text)?;
    let mut names = Vec::new();
    let [args, kwargs] = children(&root)?.as_slice() else {
        return None;
    };
    for tree in [args, kwargs] {
        walk(tree, "", &mut names)?;
    }
    Some(names)
}

/// Returns a name for each leaf of the results; a single leaf is called `output`.
pub(crate) fn result_names(text: &str) -> Option<Vec<String>> {
    let mut names = Vec::new();
    walk(&root(text)?, "", &mut names)?;
    if let [name] = names.as_mut_slice()
        && name.is_empty()
    {
        *name = "output".to_owned();
    }
    Some(names)
}

/// Returns the tree from `[1, {…}]`, a format version and a tree.
fn root(text: &str) -> Option<Value> {
    let Ok(Value::Array(mut elements)) = serde_json::from_str(text) else {
        return None;
    };
    (elements.len() == 2).then(|| elements.remove(1))
}

fn children(node: &Value) -> Option<&Vec<Value>> {
    node.get("children_spec")?.as_array()
}

fn walk(node: &Value, path: &str, names: &mut Vec<String>) -> Option<()> {
    // A leaf has the type null.
    let kind = node.get("type")?;
    if kind.is_null() {
        names.push(path.to_owned());
        return Some(());
    }
    // A dictionary stores its keys in its context, as JSON within a JSON string.
    let keys: Option<Vec<Value>> = node
        .get("context")
        .and_then(Value::as_str)
        .and_then(|context| serde_json::from_str(context).ok());
    for (index, child) in children(node)?.iter().enumerate() {
        let key = keys.as_ref().and_then(|keys| keys.get(index));
        let key = match key {
            Some(Value::String(key)) => key.clone(),
            Some(other) => other.to_string(),
            None => index.to_string(),
        };
        let below = match path {
            "" => key,
            _ => format!("{path}.{key}"),
        };
        walk(child, &below, names)?;
    }
    Some(())
}

#[cfg(test)]
mod tests {
    use super::*;

    const LEAF: &str = r#"{"type": null, "context": null, "children_spec": []}"#;

    #[test]
    fn arguments_are_named_by_keyword_or_index() {
        let text = format!(
            r#"[1, {{"type": "builtins.tuple", "context": "null", "children_spec": [
                {{"type": "builtins.tuple", "context": "null", "children_spec": [{LEAF},
                    {{"type": "builtins.list", "context": "null", "children_spec": [{LEAF}, {LEAF}]}}]}},
                {{"type": "builtins.dict", "context": "[\"mask\"]", "children_spec": [{LEAF}]}}]}}]"#
        );
        let names = argument_names(&text).unwrap_or_default();
        assert_eq!(names, ["0", "1.0", "1.1", "mask"]);
    }

    #[test]
    fn a_single_result_has_a_name_and_a_dictionary_its_keys() {
        let single = result_names(&format!("[1, {LEAF}]"));
        assert_eq!(single.unwrap_or_default(), ["output"]);
        let pair = format!(
            r#"[1, {{"type": "builtins.dict", "context": "[\"a\", \"b\"]", "children_spec": [{LEAF}, {LEAF}]}}]"#
        );
        assert_eq!(result_names(&pair).unwrap_or_default(), ["a", "b"]);
        assert_eq!(result_names("no JSON"), None);
        assert_eq!(argument_names("[1]"), None);
    }
}
