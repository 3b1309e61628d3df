//! Reading of arguments from keys and values: an error names the key, its value and what is expected there.
//!
//! Derived code of serde reports a mistake through the methods of [`de::Error`], which get the name or the type as a
//! value. So the reader has an error type of its own, which keeps them; serde_path_to_error adds the key.

use std::fmt;

use overdrive_core::text::type_in_words;
use serde::Serialize;
use serde::de::value::{MapAccessDeserializer, MapDeserializer, SeqDeserializer};
use serde::de::{
    self, DeserializeOwned, Deserializer, Expected, IntoDeserializer, Unexpected, Visitor,
};
use serde_json::{Map, Value};
use serde_path_to_error::Segment;

use super::choices::GradientCheckpointingArguments;
use super::key::{Program, plain};
use super::keys;
use crate::error::listed;
use crate::{Error, Result};

/// The number of keys that an error lists; a longer list is left out.
const MAX_KEYS_LISTED: usize = 16;
/// The number of characters of a string that an error shows.
const MAX_TEXT: usize = 40;
/// The description of a JSON object.
pub(super) const SECTION: &str = "a section of keys";

pub(crate) fn as_value(arguments: &impl Serialize) -> Result<Value> {
    serde_json::to_value(arguments).map_err(|error| Error::Unwritable {
        format: "JSON",
        message: error.to_string(),
    })
}

/// Returns the keys of a configuration with their values.
pub(crate) fn keys_of(arguments: &impl Serialize) -> Result<Map<String, Value>> {
    Ok(match as_value(arguments)? {
        Value::Object(values) => values,
        _ => Map::new(),
    })
}

/// Reads the arguments of `program`; every error names the key.
pub(crate) fn read_arguments<T: DeserializeOwned + Serialize + Default>(
    values: &Value,
    origin: &str,
    program: Program,
) -> Result<T> {
    // serde would also read a section from a list, field by field.
    let defaults = as_value(&T::default())?;
    for (key, section) in defaults.as_object().into_iter().flatten() {
        if section.is_object() && values[key].is_array() {
            return Err(wrong_type(origin, key.clone(), &values[key], SECTION));
        }
    }
    serde_path_to_error::deserialize(Given(values)).map_err(|error| {
        let given = error
            .path()
            .iter()
            .fold(values, |value, segment| match segment {
                Segment::Seq { index } => &value[*index],
                Segment::Map { key } | Segment::Enum { variant: key } => &value[key],
                Segment::Unknown => value,
            });
        let key = error.path().to_string();
        error.into_inner().at(origin, key, given, program)
    })
}

/// A value that is read with [`Mistake`] as the error, and with its keys in their order.
struct Given<'a>(&'a Value);

/// Reads an object key by key.
fn in_order<'de>(
    keys: &'de Map<String, Value>,
) -> MapDeserializer<'de, impl Iterator<Item = (&'de str, Given<'de>)>, Mistake> {
    MapDeserializer::new(keys.iter().map(|(key, value)| (key.as_str(), Given(value))))
}

impl<'de> IntoDeserializer<'de, Mistake> for Given<'de> {
    type Deserializer = Self;

    fn into_deserializer(self) -> Self {
        self
    }
}

impl<'de> Deserializer<'de> for Given<'de> {
    type Error = Mistake;

    fn deserialize_any<V: Visitor<'de>>(
        self,
        visitor: V,
    ) -> std::result::Result<V::Value, Mistake> {
        match self.0 {
            Value::Null => visitor.visit_unit(),
            Value::Bool(value) => visitor.visit_bool(*value),
            Value::Number(number) => match (number.as_u64(), number.as_i64()) {
                (Some(number), _) => visitor.visit_u64(number),
                (None, Some(number)) => visitor.visit_i64(number),
                _ => visitor.visit_f64(number.as_f64().unwrap_or(f64::NAN)),
            },
            Value::String(text) => visitor.visit_borrowed_str(text),
            Value::Array(list) => visitor.visit_seq(SeqDeserializer::new(list.iter().map(Given))),
            Value::Object(keys) => visitor.visit_map(in_order(keys)),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(
        self,
        visitor: V,
    ) -> std::result::Result<V::Value, Mistake> {
        match self.0 {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> std::result::Result<V::Value, Mistake> {
        visitor.visit_newtype_struct(self)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        choices: &'static [&'static str],
        visitor: V,
    ) -> std::result::Result<V::Value, Mistake> {
        match self.0 {
            Value::String(name) => visitor.visit_enum(name.as_str().into_deserializer()),
            Value::Object(keys) => visitor.visit_enum(MapAccessDeserializer::new(in_order(keys))),
            other => Err(Mistake::Choice(plain(other), choices)),
        }
    }

    serde::forward_to_deserialize_any! {
        bool i8 i16 i32 i64 i128 u8 u16 u32 u64 u128 f32 f64 char str string bytes byte_buf unit unit_struct seq tuple
        tuple_struct map struct identifier ignored_any
    }
}

/// A key or a value that the arguments do not have.
#[derive(Debug)]
enum Mistake {
    Key(String, &'static [&'static str]),
    Choice(String, &'static [&'static str]),
    Type(String),
}

impl de::Error for Mistake {
    fn custom<T: fmt::Display>(expected: T) -> Self {
        Self::Type(expected.to_string())
    }

    fn invalid_type(_: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::custom(expected)
    }

    fn invalid_value(_: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::custom(expected)
    }

    fn unknown_field(name: &str, siblings: &'static [&'static str]) -> Self {
        Self::Key(name.to_owned(), siblings)
    }

    fn unknown_variant(given: &str, choices: &'static [&'static str]) -> Self {
        Self::Choice(given.to_owned(), choices)
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{self:?}")
    }
}

impl std::error::Error for Mistake {}

impl Mistake {
    /// Returns the error of the value `given` of `key`.
    fn at(self, origin: &str, key: String, given: &Value, program: Program) -> Error {
        let expected = match self {
            Self::Key(name, siblings) => {
                let section = key.strip_suffix(&name).unwrap_or_default();
                let section = section.trim_end_matches('.');
                return Error::UnknownKey {
                    origin: origin.to_owned(),
                    hint: nearest_key(section, &name, siblings, program),
                    key,
                };
            }
            Self::Choice(given, choices) => {
                return Error::UnknownChoice {
                    origin: origin.to_owned(),
                    key,
                    hint: nearest(&given, choices.iter().copied())
                        .map_or_else(String::new, |name| format!("; did you mean `{name}`?")),
                    given,
                    choices: choices.iter().map(ToString::to_string).collect(),
                };
            }
            Self::Type(expected) => expected,
        };
        let expected = match expected.as_str() {
            text if text.starts_with("struct ") => SECTION,
            other => type_in_words(other),
        };
        wrong_type(origin, key, given, expected)
    }
}

/// Returns the error of a value that is not of the `expected` type.
pub(super) fn wrong_type(origin: &str, key: String, given: &Value, expected: &str) -> Error {
    Error::WrongType {
        origin: origin.to_owned(),
        key,
        given: describe(given),
        expected: expected.to_owned(),
    }
}

/// Returns a hint for an unknown key: the nearest key of the same section, else the nearest of all keys.
fn nearest_key(parent: &str, unknown: &str, siblings: &[&str], program: Program) -> String {
    if !parent.is_empty()
        && let Some(name) = nearest(unknown, siblings.iter().copied())
    {
        return format!("; did you mean `{parent}.{name}`?");
    }
    let mut everywhere: Vec<String> = keys::names(program).map(str::to_owned).collect();
    // The keys of this section are not in the table, because no flag sets them one by one.
    if let Ok(Value::Object(inner)) = as_value(&GradientCheckpointingArguments::default()) {
        let inner = inner.keys();
        everywhere.extend(inner.map(|name| format!("gradient_checkpointing_kwargs.{name}")));
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
fn describe(value: &Value) -> String {
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
        Value::Object(_) => SECTION.to_owned(),
    }
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
