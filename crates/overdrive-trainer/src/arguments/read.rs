//! Reading of arguments from keys and values: an error names the key, its value and what is expected there.
//!
//! Derived code of serde reports a mistake through the methods of [`de::Error`], which get the name or the type as a
//! value. So the reader has an error type of its own, which keeps them, and the deserializer adds the key.

use std::fmt;

use serde::de::value::MapAccessDeserializer;
use serde::de::{
    self, DeserializeOwned, DeserializeSeed, Deserializer, Expected, IntoDeserializer, MapAccess,
    SeqAccess, Unexpected, Visitor,
};
use serde::{Serialize, forward_to_deserialize_any};
use serde_json::Value;

use super::choices::GradientCheckpointingArguments;
use super::key::Program;
use super::keys;
use crate::error::listed;
use crate::{Error, Result};

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
    values: &Value,
    origin: &str,
    program: Program,
) -> Result<T> {
    let node = Node {
        key: String::new(),
        value: values,
    };
    T::deserialize(node).map_err(|mistake| mistake.into_error(origin, program))
}

type Read<T> = std::result::Result<T, Mistake>;

/// A key or a value that the arguments do not have.
#[derive(Debug)]
struct Mistake {
    kind: MistakeKind,
    /// The dotted name of the innermost value around it, and a description of that value.
    at: Option<(String, String)>,
}

#[derive(Debug)]
enum MistakeKind {
    Key(String, &'static [&'static str]),
    Choice(String, &'static [&'static str]),
    Type(String),
}

impl de::Error for Mistake {
    fn custom<T: fmt::Display>(expected: T) -> Self {
        MistakeKind::Type(expected.to_string()).into()
    }

    fn invalid_type(_: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::custom(expected)
    }

    fn invalid_value(_: Unexpected<'_>, expected: &dyn Expected) -> Self {
        Self::custom(expected)
    }

    fn unknown_variant(given: &str, choices: &'static [&'static str]) -> Self {
        MistakeKind::Choice(given.to_owned(), choices).into()
    }

    fn unknown_field(name: &str, siblings: &'static [&'static str]) -> Self {
        MistakeKind::Key(name.to_owned(), siblings).into()
    }
}

impl From<MistakeKind> for Mistake {
    fn from(kind: MistakeKind) -> Self {
        Self { kind, at: None }
    }
}

impl fmt::Display for Mistake {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:?}", self.kind)
    }
}

impl std::error::Error for Mistake {}

impl Mistake {
    fn into_error(self, origin: &str, program: Program) -> Error {
        let origin = origin.to_owned();
        let (key, value) = self.at.unwrap_or_default();
        match self.kind {
            MistakeKind::Key(name, siblings) => Error::UnknownKey {
                origin,
                hint: nearest_key(&key, &name, siblings, program),
                key: joined(&key, &name),
            },
            MistakeKind::Choice(given, choices) => Error::UnknownChoice {
                origin,
                key,
                hint: nearest(&given, choices.iter().copied())
                    .map_or_else(String::new, |name| format!("; did you mean `{name}`?")),
                given,
                choices: choices.iter().map(ToString::to_string).collect(),
            },
            MistakeKind::Type(expected) => Error::WrongType {
                origin,
                key,
                given: value,
                expected,
            },
        }
    }
}

/// A value to read, with its dotted name.
struct Node<'de> {
    key: String,
    value: &'de Value,
}

impl<'de> Node<'de> {
    /// Reads the value. Adds its name to a mistake in it, unless the mistake belongs to a value inside.
    fn read<S: DeserializeSeed<'de>>(self, seed: S) -> Read<S::Value> {
        let (key, value) = (self.key.clone(), self.value);
        seed.deserialize(self).map_err(|mut mistake| {
            mistake.at.get_or_insert_with(|| (key, describe(value)));
            mistake
        })
    }

    fn elements(self) -> Read<Elements<'de>> {
        match self.value {
            Value::Array(list) => Ok(Elements {
                rest: list.iter().enumerate(),
                key: self.key,
            }),
            _ => Err(de::Error::custom("a list")),
        }
    }

    fn entries(self) -> Read<Entries<'de>> {
        match self.value {
            Value::Object(section) => Ok(Entries {
                rest: section.iter(),
                key: self.key,
                entry: None,
            }),
            _ => Err(de::Error::custom("a section of keys")),
        }
    }
}

struct Elements<'de> {
    rest: std::iter::Enumerate<std::slice::Iter<'de, Value>>,
    key: String,
}

impl<'de> SeqAccess<'de> for Elements<'de> {
    type Error = Mistake;

    fn next_element_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Read<Option<S::Value>> {
        let next = self.rest.next().map(|(index, value)| {
            let key = format!("{}[{index}]", self.key);
            Node { key, value }.read(seed)
        });
        next.transpose()
    }
}

struct Entries<'de> {
    rest: serde_json::map::Iter<'de>,
    key: String,
    /// The entry whose name was read.
    entry: Option<Node<'de>>,
}

impl<'de> MapAccess<'de> for Entries<'de> {
    type Error = Mistake;

    fn next_key_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Read<Option<S::Value>> {
        let next = self.rest.next().map(|(name, value)| {
            let key = joined(&self.key, name);
            self.entry = Some(Node { key, value });
            seed.deserialize(name.as_str().into_deserializer())
        });
        next.transpose()
    }

    fn next_value_seed<S: DeserializeSeed<'de>>(&mut self, seed: S) -> Read<S::Value> {
        match self.entry.take() {
            Some(node) => node.read(seed),
            None => Err(de::Error::custom("a key before its value")),
        }
    }
}

/// Reads scalars. The expected type is given here, because a visitor knows only its Rust name.
macro_rules! scalars {
    ($($expected:literal: $($method:ident)*;)*) => {
        $($(
            fn $method<V: Visitor<'de>>(self, visitor: V) -> Read<V::Value> {
                scalar(self.value, visitor).map_err(|_| de::Error::custom($expected))
            }
        )*)*
    };
}

fn scalar<'de, V: Visitor<'de>>(value: &'de Value, visitor: V) -> Read<V::Value> {
    match value {
        Value::Bool(value) => visitor.visit_bool(*value),
        Value::Number(number) => match (number.as_u64(), number.as_i64()) {
            (Some(number), _) => visitor.visit_u64(number),
            (_, Some(number)) => visitor.visit_i64(number),
            _ => visitor.visit_f64(number.as_f64().unwrap_or(f64::NAN)),
        },
        Value::String(text) => visitor.visit_borrowed_str(text),
        Value::Null | Value::Array(_) | Value::Object(_) => visitor.visit_unit(),
    }
}

impl<'de> Deserializer<'de> for Node<'de> {
    type Error = Mistake;

    scalars! {
        "true or false": deserialize_bool;
        "an integer": deserialize_i8 deserialize_i16 deserialize_i32 deserialize_i64;
        "a non-negative integer": deserialize_u8 deserialize_u16 deserialize_u32 deserialize_u64;
        "a number": deserialize_f32 deserialize_f64;
        "a string": deserialize_str deserialize_string;
    }

    fn deserialize_any<V: Visitor<'de>>(self, visitor: V) -> Read<V::Value> {
        match self.value {
            Value::Array(_) => visitor.visit_seq(self.elements()?),
            Value::Object(_) => visitor.visit_map(self.entries()?),
            value => scalar(value, visitor),
        }
    }

    fn deserialize_option<V: Visitor<'de>>(self, visitor: V) -> Read<V::Value> {
        match self.value {
            Value::Null => visitor.visit_none(),
            _ => visitor.visit_some(self),
        }
    }

    fn deserialize_seq<V: Visitor<'de>>(self, visitor: V) -> Read<V::Value> {
        visitor.visit_seq(self.elements()?)
    }

    fn deserialize_map<V: Visitor<'de>>(self, visitor: V) -> Read<V::Value> {
        visitor.visit_map(self.entries()?)
    }

    /// Reads a section of keys only: serde would also read a struct from a list, field by field.
    fn deserialize_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Read<V::Value> {
        self.deserialize_map(visitor)
    }

    fn deserialize_enum<V: Visitor<'de>>(
        self,
        _: &'static str,
        _: &'static [&'static str],
        visitor: V,
    ) -> Read<V::Value> {
        match self.value {
            Value::String(name) => visitor.visit_enum(name.as_str().into_deserializer()),
            Value::Object(_) => visitor.visit_enum(MapAccessDeserializer::new(self.entries()?)),
            _ => Err(de::Error::custom("a name")),
        }
    }

    fn deserialize_newtype_struct<V: Visitor<'de>>(
        self,
        _: &'static str,
        visitor: V,
    ) -> Read<V::Value> {
        visitor.visit_newtype_struct(self)
    }

    forward_to_deserialize_any! {
        i128 u128 char bytes byte_buf unit unit_struct tuple tuple_struct identifier ignored_any
    }
}

/// Returns the dotted name of a key in a section; the outermost one has no name.
fn joined(section: &str, name: &str) -> String {
    match section {
        "" => name.to_owned(),
        section => format!("{section}.{name}"),
    }
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
