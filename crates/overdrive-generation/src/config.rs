use std::path::Path;

use serde::{Deserialize, Deserializer, Serialize};
use serde_json::{Map, Value};

use crate::{Error, Result};

/// How text is generated, in the keys of transformers' `GenerationConfig` and with its defaults.
///
/// (De)serialises as `generation_config.json`; `seed` is our own key, for transformers has a global
/// one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct GenerationConfig {
    /// The most tokens to add to a prompt; default `None`: as `max_length` says, else 20.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_new_tokens: Option<usize>,
    /// The most tokens of prompt and continuation together, where `max_new_tokens` is `None`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_length: Option<usize>,
    /// No end-of-text token before so many new tokens; default 0.
    pub min_new_tokens: usize,
    /// Draw from the distribution (true) or take the likeliest token (false, the default).
    pub do_sample: bool,
    /// Logits are divided by it before sampling; above 1 flatter, below 1 sharper; 0 is greedy;
    /// default 1.
    pub temperature: f64,
    /// Sample among the `top_k` likeliest tokens; 0 is all; default 50.
    pub top_k: usize,
    /// Sample among the fewest tokens whose probabilities reach `top_p` together, in (0, 1]; 1, the
    /// default, is all (Holtzman et al. 2019, arXiv:1904.09751).
    pub top_p: f64,
    /// Sample among tokens at least `min_p` times as likely as the likeliest, in [0, 1]; default
    /// `None` (Nguyen et al. 2024, arXiv:2407.01082).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_p: Option<f64>,
    /// Scores of tokens already present, prompt included, are divided by it where positive and
    /// multiplied where negative; default 1 (Keskar et al. 2019, arXiv:1909.05858).
    pub repetition_penalty: f64,
    /// Keep keys and values of earlier tokens; default true. Without, every step computes the whole
    /// text again: only good as a reference.
    pub use_cache: bool,
    /// The ids that end a text, one or a list in JSON; default none.
    #[serde(deserialize_with = "one_or_many", serialize_with = "as_one_or_many")]
    pub eos_token_id: Vec<i64>,
    /// What fills the ends of rows that finish early; default `None`: the first of `eos_token_id`, else
    /// 0.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pad_token_id: Option<i64>,
    /// Seed of the sampling; default `None`: another at each call.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
}

impl Default for GenerationConfig {
    fn default() -> Self {
        GenerationConfig {
            max_new_tokens: None,
            max_length: None,
            min_new_tokens: 0,
            do_sample: false,
            temperature: 1.0,
            top_k: 50,
            top_p: 1.0,
            min_p: None,
            repetition_penalty: 1.0,
            use_cache: true,
            eos_token_id: Vec::new(),
            pad_token_id: None,
            seed: None,
        }
    }
}

/// Keys of transformers that change the result unless they have this value (or are null).
const UNSUPPORTED: [(&str, &str); 21] = [
    ("num_beams", "1"),
    ("num_return_sequences", "1"),
    ("min_length", "0"),
    ("no_repeat_ngram_size", "0"),
    ("encoder_no_repeat_ngram_size", "0"),
    ("encoder_repetition_penalty", "1.0"),
    ("typical_p", "1.0"),
    ("epsilon_cutoff", "0.0"),
    ("eta_cutoff", "0.0"),
    ("top_h", "null"),
    ("penalty_alpha", "null"),
    ("guidance_scale", "null"),
    ("bad_words_ids", "null"),
    ("force_words_ids", "null"),
    ("sequence_bias", "null"),
    ("forced_bos_token_id", "null"),
    ("forced_eos_token_id", "null"),
    ("suppress_tokens", "null"),
    ("begin_suppress_tokens", "null"),
    ("stop_strings", "null"),
    ("exponential_decay_length_penalty", "null"),
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
    /// (`transformers_version`, `output_scores`, …) are passed over, as is `null`.
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

    /// Checks every value against its range.
    ///
    /// # Errors
    /// [`Error::BadConfig`] naming the key, its value and the range.
    pub fn validate(&self) -> Result<()> {
        let check = |fits: bool, key: &str, found: f64, expected: &str| {
            if fits {
                return Ok(());
            }
            let (key, found, expected) = (key.to_owned(), found.to_string(), expected.to_owned());
            Err(Error::BadConfig {
                key,
                found,
                expected,
            })
        };
        let t = self.temperature;
        check(
            t.is_finite() && t >= 0.0,
            "temperature",
            t,
            "at least 0, where 0 is greedy",
        )?;
        let p = self.top_p;
        check(
            p > 0.0 && p <= 1.0,
            "top_p",
            p,
            "above 0 and at most 1, where 1 is off",
        )?;
        let p = self.min_p.unwrap_or(0.0);
        check(
            (0.0..=1.0).contains(&p),
            "min_p",
            p,
            "between 0 and 1, where 0 is off",
        )?;
        let r = self.repetition_penalty;
        check(
            r.is_finite() && r > 0.0,
            "repetition_penalty",
            r,
            "above 0, where 1 is off",
        )?;
        if self.max_new_tokens == Some(0) {
            check(false, "max_new_tokens", 0.0, "at least 1")?;
        }
        Ok(())
    }

    /// Whether the likeliest token is taken: no sampling, or a temperature of 0.
    pub fn is_greedy(&self) -> bool {
        !self.do_sample || self.temperature == 0.0
    }

    /// How many tokens may be added to a prompt of `prompt` tokens.
    pub(crate) fn new_tokens(&self, prompt: usize) -> usize {
        match (self.max_new_tokens, self.max_length) {
            (Some(new), _) => new,
            (None, Some(length)) => length.saturating_sub(prompt),
            (None, None) => 20,
        }
    }

    pub(crate) fn pad(&self) -> i64 {
        self.pad_token_id
            .or(self.eos_token_id.first().copied())
            .unwrap_or(0)
    }
}

/// Whether a JSON text is the neutral value: equal as numbers, or an empty list for null.
fn is_neutral(found: &str, neutral: &str) -> bool {
    match (found.parse::<f64>(), neutral.parse::<f64>()) {
        (Ok(found), Ok(neutral)) => found == neutral,
        _ => found == neutral || (neutral == "null" && found == "[]"),
    }
}

fn one_or_many<'de, D: Deserializer<'de>>(
    deserializer: D,
) -> std::result::Result<Vec<i64>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a token id or a list of them")]
    enum Ids {
        One(i64),
        Many(Vec<i64>),
    }
    Ok(match Option::<Ids>::deserialize(deserializer)? {
        None => Vec::new(),
        Some(Ids::One(id)) => vec![id],
        Some(Ids::Many(ids)) => ids,
    })
}

fn as_one_or_many<S: serde::Serializer>(
    ids: &[i64],
    serializer: S,
) -> std::result::Result<S::Ok, S::Error> {
    match ids {
        [] => serializer.serialize_none(),
        [one] => serializer.serialize_i64(*one),
        many => many.serialize(serializer),
    }
}
