use std::path::Path;

use overdrive_core::text::expected_by_serde;
use serde_json::{Map, Value};

use super::validate::CACHES;
use crate::optional_file::read_object;
use crate::{CacheConfig, Error, GenerationConfig, Result};

/// The keys of transformers that change the result unless they have the given value (or are null).
const UNSUPPORTED: [(&str, &str); 17] = [
    ("encoder_no_repeat_ngram_size", "0"),
    ("encoder_repetition_penalty", "1.0"),
    ("num_beam_groups", "1"),
    ("diversity_penalty", "0.0"),
    ("penalty_alpha", "null"),
    ("guidance_scale", "1.0"),
    ("dola_layers", "null"),
    ("force_words_ids", "null"),
    ("constraints", "null"),
    ("watermarking_config", "null"),
    ("token_healing", "false"),
    ("use_mtp", "false"),
    ("low_memory", "false"),
    ("assistant_early_exit", "null"),
    ("assistant_ensemble_weight", "null"),
    ("speculation_type", "null"),
    ("max_cache_len", "null"),
];

/// The names of transformers for which this crate has no cache of that kind. The windows of layers come from
/// the model's configuration, and nothing is offloaded, so that the default cache gives the same tokens.
const HINTS: [&str; 8] = [
    "dynamic_full",
    "hybrid",
    "hybrid_chunked",
    "mamba",
    "offloaded",
    "offloaded_hybrid",
    "offloaded_hybrid_chunked",
    "offloaded_static",
];

/// The tokens of an encoder-decoder model that older folders have in `config.json` alone.
const SEQ2SEQ_TOKENS: [&str; 4] = [
    "decoder_start_token_id",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "pad_token_id",
];

impl GenerationConfig {
    /// Reads `generation_config.json` of a Hugging Face folder; returns the defaults if there is none. If it
    /// names no end-of-text token, those of `config.json` are taken; if there is none for an encoder-decoder model,
    /// also the start, forced and padding tokens of `config.json`.
    ///
    /// # Errors
    /// An error if a file cannot be read or parsed, a value does not fit its key, or a key requests
    /// something that this crate does not support.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<GenerationConfig> {
        GenerationConfig::from_map(&GenerationConfig::map_from_dir(dir)?)
    }

    /// Returns the object that [`from_dir`](GenerationConfig::from_dir) reads, so that a program can replace
    /// some of its keys before [`from_map`](GenerationConfig::from_map).
    ///
    /// # Errors
    /// When a file cannot be read or parsed.
    pub fn map_from_dir(dir: impl AsRef<Path>) -> Result<Map<String, Value>> {
        let dir = dir.as_ref();
        let given = read_object(&dir.join("generation_config.json"))?;
        let (alone, mut map) = (given.is_none(), given.unwrap_or_default());
        if (alone || end_of_text(&map).is_none())
            && let Some(config) = read_object(&dir.join("config.json"))?
        {
            if let Some(ids) = end_of_text(&config) {
                map.insert("eos_token_id".to_owned(), ids);
            }
            let seq2seq = config.get("is_encoder_decoder") == Some(&Value::Bool(true));
            for key in SEQ2SEQ_TOKENS {
                if let Some(id) = config.get(key).filter(|_| alone && seq2seq) {
                    map.insert(key.to_owned(), id.clone());
                }
            }
        }
        Ok(map)
    }

    /// Returns the `cache_implementation` of such an object, as JSON, if it is unknown to both this crate and
    /// transformers; [`from_map`](GenerationConfig::from_map) logs and ignores it.
    pub fn unknown_cache(map: &Map<String, Value>) -> Option<String> {
        let value = map.get("cache_implementation")?;
        let known = match value {
            Value::Null => true,
            Value::String(name) => {
                CACHES.contains(&name.as_str()) || HINTS.contains(&name.as_str())
            }
            _ => false,
        };
        (!known).then(|| value.to_string())
    }

    /// Reads the object of a `generation_config.json`. Keys that do not change the generated tokens
    /// (`transformers_version`, `output_attentions`, …) and null values are ignored. The cache is a hint: for an
    /// unsupported or unknown kind, the default is used.
    ///
    /// # Errors
    /// As [`GenerationConfig::from_dir`].
    pub fn from_map(map: &Map<String, Value>) -> Result<GenerationConfig> {
        let mut given: Map<String, Value> = map
            .iter()
            .filter(|(_, v)| !v.is_null())
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
        take_hints(&mut given);
        for (key, neutral) in UNSUPPORTED {
            let found = given.get(key).map(Value::to_string);
            if let Some(found) = found.filter(|found| !is_neutral(found, neutral)) {
                let (key, neutral) = (key.to_owned(), neutral.to_owned());
                return Err(Error::Unsupported {
                    key,
                    found,
                    neutral,
                });
            }
        }
        for (key, value) in &given {
            // Read key by key, so that an error can name the key.
            let one = Value::Object([(key.clone(), value.clone())].into_iter().collect());
            serde_json::from_value::<GenerationConfig>(one).map_err(|error| {
                let message = error.to_string();
                let expected = expected_by_serde(&message).unwrap_or(&message);
                overdrive_core::Error::option(key.clone(), value, expected.to_owned())
            })?;
        }
        let config: GenerationConfig = serde_json::from_value(Value::Object(given)).map_err(
            overdrive_core::Error::parse("JSON", "generation_config.json"),
        )?;
        config.validate()?;
        Ok(config)
    }
}

/// Returns the end-of-text tokens that an object names; that of a model of several modalities has them in its
/// `text_config`.
fn end_of_text(config: &Map<String, Value>) -> Option<Value> {
    let text = config.get("text_config").and_then(Value::as_object);
    [Some(config), text]
        .into_iter()
        .flatten()
        .find_map(|config| {
            let ids = match config.get("eos_token_id")? {
                Value::Array(ids) => ids.clone(),
                id => vec![id.clone()],
            };
            // Ids outside the vocabulary can never be generated; some files write -1 for none.
            let size = config.get("vocab_size").and_then(Value::as_i64);
            let exists = |id: &i64| *id >= 0 && size.is_none_or(|size| *id < size);
            let ids: Vec<i64> = ids
                .iter()
                .filter_map(Value::as_i64)
                .filter(exists)
                .collect();
            (!ids.is_empty()).then(|| ids.into())
        })
}

/// Removes the settings of unsupported caches from `given`.
fn take_hints(given: &mut Map<String, Value>) {
    if let Some(Value::Object(settings)) = given.get_mut("cache_config") {
        // transformers has further keys for its backends of quantization.
        let known = serde_json::to_value(CacheConfig {
            nbits: Some(4),
            window_length: Some(1),
            ..CacheConfig::default()
        });
        let known = known.unwrap_or_default();
        settings.retain(|key, value| known.get(key).is_some() && !value.is_null());
        if let Some(bits) = settings.get("nbits").and_then(Value::as_i64)
            && bits != 4
            && bits != 8
        {
            tracing::warn!("a {bits}-bit cache is not supported; quantized caches use 4 bits");
            settings.remove("nbits");
        }
    }
    let windowed = given
        .get("cache_config")
        .is_some_and(|settings| settings.get("window_length").is_some());
    if let Some(name) = GenerationConfig::unknown_cache(given) {
        tracing::warn!("`cache_implementation` is {name}, which is unknown and ignored");
    }
    let name = given.get("cache_implementation").and_then(Value::as_str);
    // Without a length, this name means the model's own windows, as `hybrid` does.
    let of_model = name == Some("sliding_window") && !windowed;
    if of_model || name.is_none_or(|name| !CACHES.contains(&name)) {
        given.remove("cache_implementation");
    }
}

/// Returns `true` if a JSON value is the neutral one: equal as numbers, or an empty list for null.
fn is_neutral(found: &str, neutral: &str) -> bool {
    match (found.parse::<f64>(), neutral.parse::<f64>()) {
        (Ok(found), Ok(neutral)) => found == neutral,
        _ => found == neutral || (neutral == "null" && (found == "[]" || found == "{}")),
    }
}
