//! Names and values within MLflow's limits.

use serde_json::{Map, Value};

/// The longest name of a metric, parameter or tag.
const MAX_NAME: usize = 250;
/// The longest value of a parameter in all versions of MLflow; newer ones take 6000.
const MAX_PARAM: usize = 500;
/// The longest value of a tag in all versions of MLflow; newer ones take 8000.
const MAX_TAG: usize = 5000;

/// Returns the metric of a [`scalars`](crate::StepMetrics::scalars) tag, with the name that Hugging Face's
/// `MLflowCallback` and `metrics.jsonl` use: `loss`, `learning_rate`, `eval_loss`, and `group/name` for other groups.
pub(super) fn metric_name(tag: &str) -> String {
    match (tag.strip_prefix("train/"), tag.strip_prefix("eval/")) {
        (Some(name), _) => valid_name(name),
        (_, Some(name)) => valid_name(&format!("eval_{name}")),
        _ => valid_name(tag),
    }
}

/// Returns a name that MLflow accepts: other characters become `_`, and so do slashes that do not separate plain names.
pub(super) fn valid_name(name: &str) -> String {
    let allowed = |letter: char| letter.is_ascii_alphanumeric() || "_-. /".contains(letter);
    let name = name.chars().take(MAX_NAME);
    let name: String = name
        .map(|letter| if allowed(letter) { letter } else { '_' })
        .collect();
    let is_plain = |segment: &str| !["", ".", ".."].contains(&segment);
    match name.split('/').all(is_plain) {
        true => name,
        false if name.is_empty() => "_".to_owned(),
        false => name.replace(['/', '.'], "_"),
    }
}

/// Returns a configuration as parameters: keys of nested objects are joined by dots, other values are JSON or plain
/// text.
pub(super) fn params(config: &Map<String, Value>) -> Vec<(String, String)> {
    let mut params = Vec::new();
    add_params("", config, &mut params);
    params
}

fn add_params(prefix: &str, config: &Map<String, Value>, params: &mut Vec<(String, String)>) {
    for (key, value) in config {
        let key = format!("{prefix}{key}");
        let text = match value {
            Value::Object(nested) if !nested.is_empty() => {
                add_params(&format!("{key}."), nested, params);
                continue;
            }
            Value::String(text) => text.clone(),
            other => other.to_string(),
        };
        params.push((valid_name(&key), shortened(&text, MAX_PARAM)));
    }
}

/// Returns the value of a tag.
pub(super) fn tag_value(text: &str) -> String {
    shortened(text, MAX_TAG)
}

/// Returns the text, or its beginning and `…`.
fn shortened(text: &str, max_chars: usize) -> String {
    if text.chars().count() <= max_chars {
        return text.to_owned();
    }
    text.chars().take(max_chars - 1).chain(['…']).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn metrics_have_the_names_of_hugging_faces_callback() {
        for (tag, name) in [
            ("train/loss", "loss"),
            ("train/learning_rate", "learning_rate"),
            ("eval/loss", "eval_loss"),
            ("memory/allocated_bytes", "memory/allocated_bytes"),
            ("train/50 % of x=1", "50 _ of x_1"),
            ("train/../x", "___x"),
            ("train//x", "_x"),
            ("train/", "_"),
        ] {
            assert_eq!(metric_name(tag), name, "{tag}");
        }
        assert_eq!(metric_name(&"ä".repeat(300)).len(), MAX_NAME);
    }

    #[test]
    fn nested_keys_are_joined_by_dots() {
        let config = serde_json::json!({
            "seed": 42, "model": {"hidden_size": 256, "rope": {"theta": 1e4}}, "data": ["a", "b"],
            "name": "tiny", "bf16": false, "none": null, "empty": {}, "long": "ä".repeat(600),
        });
        let found = params(config.as_object().expect("an object"));
        let long = format!("{}…", "ä".repeat(499));
        let expected = [
            ("seed", "42"),
            ("model.hidden_size", "256"),
            ("model.rope.theta", "10000.0"),
            ("data", r#"["a","b"]"#),
            ("name", "tiny"),
            ("bf16", "false"),
            ("none", "null"),
            ("empty", "{}"),
            ("long", long.as_str()),
        ];
        let expected = expected.map(|(key, value)| (key.to_owned(), value.to_owned()));
        assert_eq!(found, expected);
    }
}
