use std::path::Path;

use serde_json::{Map, Value};

use crate::{Error, GenerationConfig, Result};

/// The keys of transformers that change the result unless they have this value (or are null).
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

impl GenerationConfig {
    /// Reads `generation_config.json` of a Hugging Face folder; returns the defaults if there is none.
    ///
    /// # Errors
    /// When the file cannot be read or parsed, a value does not fit its key, or a key asks for
    /// something that this crate does not support.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<GenerationConfig> {
        let path = dir.as_ref().join("generation_config.json");
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(GenerationConfig::default());
            }
            Err(error) => return Err(overdrive_core::Error::io("read", &path)(error).into()),
        };
        let map =
            serde_json::from_str(&text).map_err(overdrive_core::Error::parse("JSON", &path))?;
        GenerationConfig::from_map(&map)
    }

    /// Reads the object of a `generation_config.json`. Keys that do not change the generated tokens
    /// (`transformers_version`, `output_attentions`, …) and null values are ignored.
    ///
    /// # Errors
    /// As [`GenerationConfig::from_dir`].
    pub fn from_map(map: &Map<String, Value>) -> Result<GenerationConfig> {
        let given: Map<String, Value> = map
            .iter()
            .filter(|(_, v)| !v.is_null())
            .map(|(k, v)| (k.clone(), v.clone()))
            .collect();
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
            // Key by key, so that an error can name its own.
            let one = Value::Object([(key.clone(), value.clone())].into_iter().collect());
            serde_json::from_value::<GenerationConfig>(one).map_err(|error| {
                // serde says "invalid type: string "x", expected f64".
                let message = error.to_string();
                let expected = message.rsplit("expected ").next().unwrap_or_default();
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

/// Returns `true` if a JSON value is the neutral one: equal as numbers, or an empty list for null.
fn is_neutral(found: &str, neutral: &str) -> bool {
    match (found.parse::<f64>(), neutral.parse::<f64>()) {
        (Ok(found), Ok(neutral)) => found == neutral,
        _ => found == neutral || (neutral == "null" && (found == "[]" || found == "{}")),
    }
}
