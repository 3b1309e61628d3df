//! `adapter_config.json`.

use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::{InitLoraWeights, LayerIndices, LoraConfig, TargetModules};
use crate::{Error, Result};

/// Keys whose value does not matter here: they say who wrote the file, or belong to a key that is not
/// set. Every other key that is not read must say nothing: null, false, or empty.
const INDIFFERENT: [&str; 5] = [
    "auto_mapping",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "runtime_config",
];

impl LoraConfig {
    /// Reads the text of an `adapter_config.json`. Keys that are absent or null have their defaults.
    ///
    /// # Errors
    /// [`Error::BadConfig`] naming the key and what it should be, [`Error::UnsupportedKey`] for one
    /// that is set and not computed here.
    pub fn from_json(text: &str) -> Result<LoraConfig> {
        let value: Value = serde_json::from_str(text).map_err(|source| Error::BadConfig {
            key: "adapter_config.json".to_owned(),
            found: source.to_string(),
            expected: "JSON".to_owned(),
        })?;
        let Value::Object(keys) = value else {
            return Err(Error::BadConfig {
                key: "adapter_config.json".to_owned(),
                found: "no object".to_owned(),
                expected: "an object of keys".to_owned(),
            });
        };
        let config = LoraConfig::from_keys(keys)?;
        config.validate()?;
        Ok(config)
    }

    fn from_keys(mut keys: Map<String, Value>) -> Result<LoraConfig> {
        let default = LoraConfig::default();
        let peft_type: Option<String> = take(&mut keys, "peft_type", None)?;
        if let Some(kind) = peft_type.filter(|kind| kind != "LORA") {
            return Err(Error::BadConfig {
                key: "peft_type".to_owned(),
                found: format!("\"{kind}\""),
                expected: "\"LORA\": other methods are not computed here".to_owned(),
            });
        }
        let init = match keys.shift_remove("init_lora_weights") {
            None | Some(Value::Null) => default.init_lora_weights,
            Some(value) => InitLoraWeights::from_json(&value)?,
        };
        let config = LoraConfig {
            r: take(&mut keys, "r", default.r)?,
            lora_alpha: take(&mut keys, "lora_alpha", default.lora_alpha)?,
            lora_dropout: take(&mut keys, "lora_dropout", default.lora_dropout)?,
            target_modules: take(&mut keys, "target_modules", None)?.map(targets),
            exclude_modules: take(&mut keys, "exclude_modules", None)?,
            bias: take(&mut keys, "bias", default.bias)?,
            use_rslora: take(&mut keys, "use_rslora", false)?,
            use_dora: take(&mut keys, "use_dora", false)?,
            modules_to_save: take(&mut keys, "modules_to_save", None)?,
            init_lora_weights: init,
            layers_to_transform: take::<Option<LayerIndices>>(
                &mut keys,
                "layers_to_transform",
                None,
            )?,
            layers_pattern: take(&mut keys, "layers_pattern", None)?,
            rank_pattern: patterns(&mut keys, "rank_pattern")?,
            alpha_pattern: patterns(&mut keys, "alpha_pattern")?,
            lora_bias: take(&mut keys, "lora_bias", false)?,
            fan_in_fan_out: take(&mut keys, "fan_in_fan_out", false)?,
            base_model_name_or_path: take(&mut keys, "base_model_name_or_path", None)?,
            revision: take(&mut keys, "revision", None)?,
            task_type: take(&mut keys, "task_type", None)?,
            inference_mode: take(&mut keys, "inference_mode", false)?,
        };
        match keys.into_iter().find(|(key, value)| !is_idle(key, value)) {
            None => Ok(config),
            Some((key, value)) => Err(Error::UnsupportedKey {
                key,
                value: value.to_string(),
            }),
        }
    }

    /// The text of an `adapter_config.json` that PEFT reads, with its keys in the order of its files.
    pub fn to_json(&self) -> String {
        let targets = match &self.target_modules {
            None => Value::Null,
            Some(TargetModules::Names(names)) => json!(names),
            Some(TargetModules::Pattern(pattern)) => json!(pattern),
            Some(TargetModules::AllLinear) => json!("all-linear"),
        };
        let mut keys: Vec<(&str, Value)> = vec![
            ("r", json!(self.r)),
            ("lora_alpha", number(self.lora_alpha)),
            ("lora_dropout", json!(self.lora_dropout)),
            ("target_modules", targets),
            ("exclude_modules", json!(self.exclude_modules)),
            ("bias", json!(self.bias)),
            ("use_rslora", json!(self.use_rslora)),
            ("use_dora", json!(self.use_dora)),
            ("modules_to_save", json!(self.modules_to_save)),
            ("init_lora_weights", self.init_lora_weights.to_json()),
            ("layers_to_transform", json!(self.layers_to_transform)),
            ("layers_pattern", json!(self.layers_pattern)),
            (
                "rank_pattern",
                object(&self.rank_pattern, |rank| json!(rank)),
            ),
            (
                "alpha_pattern",
                object(&self.alpha_pattern, |alpha| number(*alpha)),
            ),
            ("lora_bias", json!(self.lora_bias)),
            ("fan_in_fan_out", json!(self.fan_in_fan_out)),
            (
                "base_model_name_or_path",
                json!(self.base_model_name_or_path),
            ),
            ("revision", json!(self.revision)),
            ("task_type", json!(self.task_type)),
            ("inference_mode", json!(self.inference_mode)),
            ("peft_type", json!("LORA")),
        ];
        keys.sort_by_key(|(key, _)| *key);
        let object: Map<String, Value> = keys
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect();
        // The alternate form of a value is indented JSON.
        format!("{:#}", Value::Object(object))
    }
}

/// What a JSON list or string means.
#[derive(Deserialize)]
#[serde(untagged)]
enum RawTargets {
    Text(String),
    List(Vec<String>),
}

fn targets(raw: RawTargets) -> TargetModules {
    match raw {
        RawTargets::Text(text) => TargetModules::from(text.as_str()),
        RawTargets::List(names) => TargetModules::Names(names),
    }
}

/// Whether a key that is not read says nothing.
fn is_idle(key: &str, value: &Value) -> bool {
    let says_nothing = match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(map) => map.is_empty(),
        _ => false,
    };
    says_nothing || INDIFFERENT.contains(&key)
}

/// Takes a key out; its default where it is absent or null.
fn take<T: DeserializeOwned>(keys: &mut Map<String, Value>, key: &str, default: T) -> Result<T> {
    match keys.shift_remove(key) {
        None | Some(Value::Null) => Ok(default),
        Some(value) => T::deserialize(&value).map_err(|source| Error::BadConfig {
            key: key.to_owned(),
            found: value.to_string(),
            expected: source.to_string(),
        }),
    }
}

fn patterns<V: DeserializeOwned>(
    keys: &mut Map<String, Value>,
    key: &str,
) -> Result<Vec<(String, V)>> {
    let map: Map<String, Value> = take(keys, key, Map::new())?;
    let read = |(pattern, value): (String, Value)| match V::deserialize(&value) {
        Ok(value) => Ok((pattern, value)),
        Err(source) => Err(Error::BadConfig {
            key: format!("{key}[\"{pattern}\"]"),
            found: value.to_string(),
            expected: source.to_string(),
        }),
    };
    map.into_iter().map(read).collect()
}

fn object<V>(pattern: &[(String, V)], value: impl Fn(&V) -> Value) -> Value {
    let entries = pattern.iter().map(|(key, own)| (key.clone(), value(own)));
    Value::Object(entries.collect())
}

/// A whole number without a point, as Python's integers are written.
fn number(value: f64) -> Value {
    if value.fract() == 0.0 && value.abs() < 2f64.powi(53) {
        json!(value as i64)
    } else {
        json!(value)
    }
}
