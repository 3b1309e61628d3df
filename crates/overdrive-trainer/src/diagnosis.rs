//! Serde's errors in the words of the file: the key, what was given and what is expected.

use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;
use serde_path_to_error::{Path, Segment};

use crate::keys::{self, Program};
use crate::{Error, GradientCheckpointingArguments, Result};

/// A longer list of keys is left out of an error.
const MOST_KEYS_LISTED: usize = 16;

pub(crate) fn as_value(arguments: &impl Serialize) -> Result<Value> {
    serde_json::to_value(arguments).map_err(|error| Error::Unwritable {
        format: "JSON",
        message: error.to_string(),
    })
}

/// Reads the arguments of `program`; every error names its key.
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

fn diagnose(values: &Value, path: &Path, message: &str, origin: &str, program: Program) -> Error {
    let origin = origin.to_owned();
    let names = quoted(message);
    let (key, value) = follow(values, path);
    if message.starts_with("unknown field") {
        let (unknown, siblings) = names.split_first().map_or(("", &[][..]), |(a, b)| (*a, b));
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

/// The dotted name of a key, and its value.
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

/// The names between backticks.
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

/// The names in the choices of an [`Error::UnknownChoice`].
pub(crate) fn choices_in(listed: &str) -> Vec<String> {
    quoted(listed).into_iter().map(str::to_owned).collect()
}

/// A hint about an unknown key: the nearest one in the same section, else the nearest one anywhere.
fn nearest_key(parent: &str, unknown: &str, siblings: &[&str], program: Program) -> String {
    if !parent.is_empty()
        && let Some(name) = nearest(unknown, siblings.iter().copied())
    {
        return format!("; did you mean `{}`?", joined(parent, name));
    }
    let mut everywhere: Vec<String> = keys::names(program).map(str::to_owned).collect();
    if let Ok(Value::Object(inner)) = as_value(&GradientCheckpointingArguments::default()) {
        let inner = inner.keys();
        everywhere.extend(inner.map(|name| joined("gradient_checkpointing_kwargs", name)));
    }
    let leaf = |key: &str| key.rsplit('.').next().unwrap_or_default().to_owned();
    let leaves: Vec<String> = everywhere.iter().map(|key| leaf(key)).collect();
    if let Some(name) = nearest(unknown, leaves.iter().map(String::as_str)) {
        let full = everywhere.iter().find(|key| leaf(key) == name);
        return full.map_or_else(String::new, |key| format!("; did you mean `{key}`?"));
    }
    if siblings.len() <= MOST_KEYS_LISTED {
        return format!("; the keys here are {}", listed(siblings));
    }
    "; no known key is near it, `--help` lists all of them".to_owned()
}

/// Returns the candidate nearest to `name`, if `name` can be a typing mistake for it.
pub(crate) fn nearest<'a>(
    name: &str,
    candidates: impl Iterator<Item = &'a str>,
) -> Option<&'a str> {
    let name = name.to_lowercase().replace('-', "_");
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
        Value::String(text) if text.chars().count() > 40 => {
            format!(
                "the text \"{}…\"",
                text.chars().take(40).collect::<String>()
            )
        }
        Value::String(text) => format!("the text \"{text}\""),
        Value::Array(_) => "a list".to_owned(),
        Value::Object(_) => "a set of keys".to_owned(),
    }
}

/// Puts Rust's names of types into words.
fn in_words(expected: &str) -> String {
    match expected {
        "f64" => "a number",
        "u64" | "usize" | "u32" | "u8" => "a whole number from 0",
        "i64" => "a whole number",
        "a boolean" => "true or false",
        "a string" | "path string" => "a text",
        "a sequence" => "a list",
        other if other.starts_with("struct ") => "keys with values",
        other => other,
    }
    .to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_could_be_a_slip_counts_as_near() {
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
