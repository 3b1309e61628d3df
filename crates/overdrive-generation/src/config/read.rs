use std::path::Path;

use serde_json::{Map, Value};

use crate::{Error, GenerationConfig, Result};

/// Keys of transformers that change the result unless they have this value (or are null).
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
    /// Reads `generation_config.json` of a Hugging Face folder, or the defaults where there is none.
    ///
    /// # Errors
    /// When the file cannot be read or parsed, a value does not fit its key, or a key asks for what
    /// this crate does not compute.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<GenerationConfig> {
        let path = dir.as_ref().join("generation_config.json");
        let text = match std::fs::read_to_string(&path) {
            Ok(text) => text,
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
                return Ok(GenerationConfig::default());
            }
            Err(source) => return Err(Error::Io { path, source }),
        };
        let map = serde_json::from_str(&text).map_err(|source| Error::Json { path, source })?;
        GenerationConfig::from_map(&map)
    }

    /// Reads the object of a `generation_config.json`. Keys that do not change what is generated
    /// (`transformers_version`, `output_attentions`, …) are passed over, as is `null`.
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
            serde_json::from_value::<GenerationConfig>(one).map_err(|error| Error::BadConfig {
                key: key.clone(),
                found: value.to_string(),
                expected: error.to_string(),
            })?;
        }
        let config: GenerationConfig =
            serde_json::from_value(Value::Object(given)).map_err(|source| Error::Json {
                path: "generation_config.json".into(),
                source,
            })?;
        config.validate()?;
        Ok(config)
    }
}

/// Whether a JSON text is the neutral value: equal as numbers, or an empty list for null.
fn is_neutral(found: &str, neutral: &str) -> bool {
    match (found.parse::<f64>(), neutral.parse::<f64>()) {
        (Ok(found), Ok(neutral)) => found == neutral,
        _ => found == neutral || (neutral == "null" && (found == "[]" || found == "{}")),
    }
}
