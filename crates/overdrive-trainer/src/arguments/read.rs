//! Serde's errors in terms of the configuration: the key, its value and the expected type.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::{Path, Segment};

use crate::keys::{self, Program};
use crate::{Error, GradientCheckpointingArguments, Result};

/// The number of keys that an error lists; a longer list is left out.
const MAX_KEYS_LISTED: usize = 16;
/// The number of characters of a string that an error shows.
const MAX_TEXT: usize = 40;

pub(crate) fn as_value(arguments: &impl Serialize) -> Result<Value> {
    serde_json::to_value(arguments).map_err(|error| Error::Unwritable {
        format: "JSON",
        message: error.to_string(),
    })
}

/// Reads the arguments of `program`; every error names the key.
pub(crate) fn read_arguments<T: DeserializeOwned>(
    values: Value,
    origin: &str,
    program: Program,
) -> Result<T> {
    serde_path_to_error::deserialize(&values).map_err(|error| {
        let path = error.path().clone();
        diagnose(&values, &path, &error.inner().to_string(), origin, program)
    })
}

/// Converts an error of serde. Its message is parsed, because serde's errors have no structured fields.
fn diagnose(values: &Value, path: &Path, message: &str, origin: &str, program: Program) -> Error {
    let origin = origin.to_owned();
    // serde quotes names with backticks, first the wrong one and then the valid ones.
    let names = quoted(message);
    let (key, value) = follow(values, path);
    if message.starts_with("unknown field") {
        let (unknown, siblings) = names.split_first().map_or(("", &[][..]), |(a, b)| (*a, b));
        // serde_path_to_error ends the path at the unknown field or at its parent, by the kind of struct.
        let parent = match key.rsplit_once('.') {
            Some((parent, last)) if last == unknown => parent.to_owned(),
            None if key == unknown => String::new(),
            _ => key,
        };
        let hint = nearest_key(&parent, unknown, siblings, program);
        return Error::UnknownKey {
            origin,
            key: joined(&parent, unknown),
            hint,
        };
    }
    if message.starts_with("unknown variant") {
        let (given, choices) = names.split_first().map_or(("", &[][..]), |(a, b)| (*a, b));
        let hint = nearest(given, choices.iter().copied())
            .map_or_else(String::new, |name| format!("; did you mean `{name}`?"));
        let given = given.to_owned();
        return Error::UnknownChoice {
            origin,
            key,
            given,
            choices: listed(choices),
            hint,
        };
    }
    let expected = message
        .rsplit_once("expected ")
        .map_or(message, |(_, expected)| expected);
    Error::WrongType {
        origin,
        key,
        given: describe(value),
        expected: in_words(expected),
    }
}

/// Returns the dotted name of a key, and its value.
fn follow<'a>(values: &'a Value, path: &Path) -> (String, &'a Value) {
    let mut key = String::new();
    let mut value = values;
    for segment in path {
        match segment {
            Segment::Map { key: name } => {
                key = joined(&key, name);
                value = &value[name.as_str()];
            }
            Segment::Seq { index } => {
                key = format!("{key}[{index}]");
                value = &value[*index];
            }
            Segment::Enum { .. } | Segment::Unknown => {}
        }
    }
    (key, value)
}

fn joined(parent: &str, name: &str) -> String {
    if parent.is_empty() {
        name.to_owned()
    } else {
        format!("{parent}.{name}")
    }
}

/// Returns the names between backticks.
fn quoted(message: &str) -> Vec<&str> {
    message.split('`').skip(1).step_by(2).collect()
}

fn listed(names: &[&str]) -> String {
    names
        .iter()
        .map(|name| format!("`{name}`"))
        .collect::<Vec<_>>()
        .join(", ")
}

/// Returns the names in the choices of an [`Error::UnknownChoice`].
pub(crate) fn choices_in(listed: &str) -> Vec<String> {
    quoted(listed).into_iter().map(str::to_owned).collect()
}

/// Returns a hint for an unknown key: the nearest key of the same section, else the nearest of all keys.
fn nearest_key(parent: &str, unknown: &str, siblings: &[&str], program: Program) -> String {
    if !parent.is_empty()
        && let Some(name) = nearest(unknown, siblings.iter().copied())
    {
        return format!("; did you mean `{}`?", joined(parent, name));
    }
    let mut everywhere: Vec<String> = keys::names(program).map(str::to_owned).collect();
    // The keys of this section are not in the table, because no flag sets them one by one.
    if let Ok(Value::Object(inner)) = as_value(&GradientCheckpointingArguments::default()) {
        let inner = inner.keys();
        everywhere.extend(inner.map(|name| joined("gradient_checkpointing_kwargs", name)));
    }
    // A key at the wrong level is compared by its last part: `hidden_size` finds `model.hidden_size`.
    let leaf = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
    let leaves: Vec<String> = everywhere.iter().map(|key| leaf(key)).collect();
    if let Some(name) = nearest(unknown, leaves.iter().map(String::as_str)) {
        let full = everywhere.iter().find(|key| leaf(key) == name);
        return full.map_or_else(String::new, |key| format!("; did you mean `{key}`?"));
    }
    if siblings.len() <= MAX_KEYS_LISTED {
        return format!("; the keys here are {}", listed(siblings));
    }
    "; no known key is similar, see `--help` for all keys".to_owned()
}

/// Returns the candidate nearest to `name`, if `name` may be a misspelling of it.
pub(crate) fn nearest<'a>(
    name: &str,
    candidates: impl Iterator<Item = &'a str>,
) -> Option<&'a str> {
    // Keys are often copied from flags, which have dashes.
    let name = name.to_lowercase().replace('-', "_");
    // A third of the characters may differ; beyond that the suggestion is a guess.
    let most = (name.chars().count() / 3).clamp(1, 4);
    candidates
        .map(|candidate| (strsim::damerau_levenshtein(&name, candidate), candidate))
        .filter(|&(distance, _)| distance <= most)
        .min_by_key(|&(distance, _)| distance)
        .map(|(_, candidate)| candidate)
}

/// Describes a value with its type, short enough for an error.
pub(crate) fn describe(value: &Value) -> String {
    match value {
        Value::Null => "empty".to_owned(),
        Value::Bool(value) => format!("{value}"),
        Value::Number(number) => format!("the number {number}"),
        Value::String(text) if text.chars().count() > MAX_TEXT => {
            let start: String = text.chars().take(MAX_TEXT).collect();
            format!("the string \"{start}…\"")
        }
        Value::String(text) => format!("the string \"{text}\""),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a section of keys".to_owned(),
    }
}

/// Returns the description of a type of Rust in terms of a configuration file.
fn in_words(expected: &str) -> String {
    match expected {
        "f64" => "a number",
        "u64" | "usize" | "u32" | "u8" => "a non-negative integer",
        "i64" => "an integer",
        "a boolean" => "true or false",
        "a string" | "path string" => "a string",
        "a sequence" => "a list",
        other if other.starts_with("struct ") => "a section of keys",
        other => other,
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_likely_misspelling_has_a_suggestion() {
        let keys = ["learning_rate", "seed", "bf16", "fp16"];
        assert_eq!(
            nearest("learning_rat", keys.into_iter()),
            Some("learning_rate")
        );
        assert_eq!(
            nearest("Learning-Rate", keys.into_iter()),
            Some("learning_rate")
        );
        assert_eq!(nearest("sede", keys.into_iter()), Some("seed"));
        assert_eq!(nearest("bf61", keys.into_iter()), Some("bf16"));
        assert_eq!(nearest("temperature", keys.into_iter()), None);
    }
}
