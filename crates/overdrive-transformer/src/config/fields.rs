use std::path::Path;

use overdrive_core::{Error as Common, text};
use serde_json::{Map, Value};

use super::sizes::{MAX_SIZE, too_large};
use crate::{Error, Result};

/// A JSON object whose keys are taken one by one and checked for their types; unknown keys remain. A key with the
/// value `null` counts as absent, as in transformers.
#[derive(Debug, Default)]
pub(crate) struct Fields(Map<String, Value>);

/// Reads the object of `config.json` in a folder.
pub(crate) fn read(dir: &Path) -> Result<Fields> {
    let path = dir.join("config.json");
    object(serde_json::from_str(&text::read(&path)?).map_err(Common::parse("JSON", &path))?)
}

/// Parses the text of a `config.json`.
pub(crate) fn parse(text: &str) -> Result<Fields> {
    object(serde_json::from_str(text).map_err(Common::parse("JSON", "config.json"))?)
}

/// Returns the fields of the object `value`, that of a `config.json`.
pub(crate) fn object(value: Value) -> Result<Fields> {
    match value {
        Value::Object(map) => Ok(Fields::new(map)),
        other => Err(Common::option("config.json", other, "an object").into()),
    }
}

impl Fields {
    pub(crate) fn new(map: Map<String, Value>) -> Self {
        Fields(map)
    }

    pub(crate) fn take(&mut self, key: &str) -> Option<Value> {
        self.0.remove(key).filter(|value| !value.is_null())
    }

    /// Returns the value that [`Fields::take`] would take.
    pub(crate) fn peek(&self, key: &str) -> Option<&Value> {
        self.0.get(key).filter(|value| !value.is_null())
    }

    /// Sets a key to a value of another object.
    pub(crate) fn put(&mut self, key: &str, value: Value) {
        self.0.insert(key.to_owned(), value);
    }

    /// Takes a key where `null` has another meaning than absence.
    pub(crate) fn take_nullable(&mut self, key: &str) -> Option<Option<Value>> {
        self.0
            .remove(key)
            .map(|value| (!value.is_null()).then_some(value))
    }

    /// Sets `slot` to the positive integer of `key`, if it is given.
    pub(crate) fn positive(&mut self, key: &str, slot: &mut i64) -> Result<()> {
        if let Some(value) = self.optional_positive(key)? {
            *slot = value;
        }
        Ok(())
    }

    /// Sets `slot` to the number of layers of `key`, if it is given.
    pub(crate) fn layers(&mut self, key: &str, slot: &mut i64) -> Result<()> {
        self.positive(key, slot)?;
        super::sizes::check_layers(key, *slot)
    }

    pub(crate) fn optional_positive(&mut self, key: &str) -> Result<Option<i64>> {
        self.take(key)
            .map(|value| positive(key, &value))
            .transpose()
    }

    /// Sets `slot` to the finite number of `key`, if it is given.
    pub(crate) fn number(&mut self, key: &str, slot: &mut f64) -> Result<()> {
        if let Some(value) = self.take(key) {
            *slot = number(key, &value)?;
        }
        Ok(())
    }

    /// Sets `slot` to the boolean of `key`, if it is given.
    pub(crate) fn boolean(&mut self, key: &str, slot: &mut bool) -> Result<()> {
        if let Some(value) = self.take(key) {
            *slot = value
                .as_bool()
                .ok_or_else(|| bad(key, &value, "true or false"))?;
        }
        Ok(())
    }

    pub(crate) fn string(&mut self, key: &str) -> Result<Option<String>> {
        self.take(key)
            .map(|value| match value {
                Value::String(text) => Ok(text),
                other => Err(bad(key, &other, "a string")),
            })
            .transpose()
    }

    /// Sets `slot` to the token id of `key`, if it is given; `null` sets it to `None`.
    pub(crate) fn token_id(&mut self, key: &str, slot: &mut Option<i64>) -> Result<()> {
        if let Some(value) = self.take_nullable(key) {
            *slot = value.map(|value| id(key, &value)).transpose()?;
        }
        Ok(())
    }

    /// Sets `slot` to the one or many ids of `key`, if it is given; `null` clears it.
    pub(crate) fn token_ids(&mut self, key: &str, slot: &mut Vec<i64>) -> Result<()> {
        match self.take_nullable(key) {
            None => {}
            Some(None) => slot.clear(),
            Some(Some(Value::Array(values))) => {
                *slot = values
                    .iter()
                    .map(|value| id(key, value))
                    .collect::<Result<_>>()?;
            }
            Some(Some(value)) => *slot = vec![id(key, &value)?],
        }
        Ok(())
    }

    pub(crate) fn object(&mut self, key: &str) -> Result<Option<Fields>> {
        self.take(key)
            .map(|value| match value {
                Value::Object(map) => Ok(Fields(map)),
                other => Err(bad(key, &other, "an object")),
            })
            .transpose()
    }

    pub(crate) fn into_rest(self) -> Map<String, Value> {
        self.0
    }
}

/// Writes token ids in the form of transformers: null, one id, or a list.
pub(crate) fn ids_to_json(ids: &[i64]) -> Value {
    match ids {
        [] => Value::Null,
        [one] => (*one).into(),
        many => many.to_vec().into(),
    }
}

/// Returns the error of a key of `config.json` whose value is not `expected`.
pub(crate) fn bad(key: &str, value: &Value, expected: &str) -> Error {
    Common::option(key.to_owned(), value, expected.to_owned()).into()
}

pub(crate) fn positive(key: &str, value: &Value) -> Result<i64> {
    match value.as_i64() {
        Some(number) if (1..=MAX_SIZE).contains(&number) => Ok(number),
        Some(number) if number > MAX_SIZE => Err(too_large(key, number)),
        // Between 2^63 and 2^64: an integer that is no `i64`.
        None if value.is_u64() => Err(too_large(key, value.clone())),
        _ => Err(bad(key, value, "a positive integer")),
    }
}

pub(crate) fn number(key: &str, value: &Value) -> Result<f64> {
    value
        .as_f64()
        .filter(|x| x.is_finite())
        .ok_or_else(|| bad(key, value, "a number"))
}

fn id(key: &str, value: &Value) -> Result<i64> {
    // -1 stands for "none" in some checkpoints; transformers takes it.
    value
        .as_i64()
        .ok_or_else(|| bad(key, value, "a token id or a list of them"))
}
