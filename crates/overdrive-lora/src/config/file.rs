//! `adapter_config.json`.

use overdrive_core::Error as Common;
use serde::Deserialize;
use serde::de::DeserializeOwned;
use serde_json::{Map, Value, json};

use super::{InitLoraWeights, LayerIndices, LoraConfig, TargetModules};
use crate::file::CONFIG;
use crate::{Error, Result};

/// Keys whose value is ignored: they describe the writer of the file, or depend on a key that is not set. Every
/// other key that is not read must be at its default: null, false, or empty.
const INDIFFERENT: [&str; 9] = [
    "auto_mapping",
    // Options of data-based initialization, which matter only when an adapter is initialized.
    "corda_config",
    "eva_config",
    "lora_ga_config",
    // Read with `init_lora_weights`; ignored for the other methods, as in PEFT.
    "loftq_config",
    "megatron_core",
    "peft_version",
    "qalora_group_size",
    "runtime_config",
];

impl LoraConfig {
    /// Reads the text of an `adapter_config.json`. Keys that are absent or null have their defaults.
    ///
    /// # Errors
    /// [`Error::Common`] with the key and its allowed values, [`Error::UnsupportedKey`] for a key that is set and
    /// not implemented.
    pub fn from_json(text: &str) -> Result<LoraConfig> {
        LoraConfig::from_value(serde_json::from_str(text).map_err(Common::parse("JSON", CONFIG))?)
    }

    /// Reads the configuration from the content of an `adapter_config.json`.
    pub(crate) fn from_value(keys: Value) -> Result<LoraConfig> {
        let Value::Object(keys) = keys else {
            return Err(Common::option(CONFIG, "not an object", "a JSON object").into());
        };
        let config = LoraConfig::from_keys(keys)?;
        config.validate()?;
        Ok(config)
    }

    fn from_keys(mut keys: Map<String, Value>) -> Result<LoraConfig> {
        let default = LoraConfig::default();
        let peft_type: Option<String> = take(&mut keys, "peft_type", None)?;
        if let Some(kind) = peft_type.filter(|kind| kind != "LORA") {
            let expected = "\"LORA\", the only method that is implemented";
            return Err(Common::option("peft_type", format!("\"{kind}\""), expected).into());
        }
        let init = match keys.shift_remove("init_lora_weights") {
            None | Some(Value::Null) => default.init_lora_weights,
            Some(value) => InitLoraWeights::from_json(&value, keys.get("loftq_config"))?,
        };
        let config = LoraConfig {
            r: take(&mut keys, "r", default.r)?,
            lora_alpha: take(&mut keys, "lora_alpha", default.lora_alpha)?,
            lora_dropout: take(&mut keys, "lora_dropout", default.lora_dropout)?,
            target_modules: take(&mut keys, "target_modules", None)?.map(targets),
            target_parameters: take(&mut keys, "target_parameters", None)?,
            exclude_modules: take(&mut keys, "exclude_modules", None)?,
            bias: take(&mut keys, "bias", default.bias)?,
            use_rslora: take(&mut keys, "use_rslora", false)?,
            use_dora: take(&mut keys, "use_dora", false)?,
            modules_to_save: take(&mut keys, "modules_to_save", None)?,
            trainable_token_indices: take(&mut keys, "trainable_token_indices", None)?,
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

    /// Returns the text of an `adapter_config.json` that PEFT reads, with its keys in the order of PEFT's files.
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
            ("target_parameters", json!(self.target_parameters)),
            ("exclude_modules", json!(self.exclude_modules)),
            ("bias", json!(self.bias)),
            ("use_rslora", json!(self.use_rslora)),
            ("use_dora", json!(self.use_dora)),
            ("modules_to_save", json!(self.modules_to_save)),
            (
                "trainable_token_indices",
                json!(self.trainable_token_indices),
            ),
            ("init_lora_weights", self.init_lora_weights.to_json()),
            ("loftq_config", self.init_lora_weights.loftq_json()),
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
        // PEFT writes its files with `sort_keys=True`.
        keys.sort_by_key(|(key, _)| *key);
        let object: Map<String, Value> = keys
            .into_iter()
            .map(|(key, value)| (key.to_owned(), value))
            .collect();
        // The alternate form of a `Value` is indented JSON; unlike `to_string_pretty`, it cannot fail.
        format!("{:#}", Value::Object(object))
    }
}

/// The JSON forms of `target_modules`.
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

/// Returns `true` if a key that is not read is at its default.
fn is_idle(key: &str, value: &Value) -> bool {
    let is_default = match value {
        Value::Null | Value::Bool(false) => true,
        Value::Array(list) => list.is_empty(),
        Value::Object(object) => object.is_empty(),
        _ => false,
    };
    is_default || INDIFFERENT.contains(&key)
}

/// Takes a key out, or returns its default if it is absent or null.
fn take<T: DeserializeOwned>(keys: &mut Map<String, Value>, key: &str, default: T) -> Result<T> {
    // `swap_remove` would reorder the rest, and the error names the first unsupported key of the file.
    match keys.shift_remove(key) {
        None | Some(Value::Null) => Ok(default),
        Some(value) => T::deserialize(&value).map_err(|source| wrong_type(key, &value, &source)),
    }
}

fn patterns<V: DeserializeOwned>(
    keys: &mut Map<String, Value>,
    key: &str,
) -> Result<Vec<(String, V)>> {
    let patterns: Map<String, Value> = take(keys, key, Map::new())?;
    let read = |(pattern, value): (String, Value)| match V::deserialize(&value) {
        Ok(value) => Ok((pattern, value)),
        Err(source) => {
            let key = format!("{key}[\"{pattern}\"]");
            Err(wrong_type(&key, &value, &source))
        }
    };
    patterns.into_iter().map(read).collect()
}

/// Returns the error for a value of the wrong type.
fn wrong_type(key: &str, value: &Value, source: &serde_json::Error) -> Error {
    let expected = format!("of the type in PEFT's configuration ({source})");
    Common::option(key.to_owned(), value, expected).into()
}

fn object<V>(pattern: &[(String, V)], value: impl Fn(&V) -> Value) -> Value {
    let entries = pattern.iter().map(|(key, own)| (key.clone(), value(own)));
    Value::Object(entries.collect())
}

/// Writes a whole number without a decimal point, as Python writes integers.
fn number(value: f64) -> Value {
    // From 2^53 on an f64 does not hold every integer.
    if value.fract() == 0.0 && value.abs() < 2f64.powi(53) {
        json!(value as i64)
    } else {
        json!(value)
    }
}
