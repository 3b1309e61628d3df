//! The generation settings of a GGUF file.

use overdrive_core::Error as Common;
use overdrive_quantization::{GgufFile, GgufValue};
use serde_json::{Map, Value};

use super::end_of_text::end_of_text_tokens;
use crate::Result;

/// The keys of `generation_config.json` and the corresponding keys of `general.sampling`.
const SAMPLING_KEYS: [(&str, &str); 5] = [
    ("temp", "temperature"),
    ("top_k", "top_k"),
    ("top_p", "top_p"),
    ("min_p", "min_p"),
    ("penalty_repeat", "repetition_penalty"),
];

/// Returns the object of a `generation_config.json`: the tokens that begin, end and pad a text, and the sampling
/// defaults of `general.sampling`. With one of these, `do_sample` is `true`. XTC and Mirostat have no such key, and
/// are logged and ignored.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) for a value of another type.
pub fn generation_config_from_gguf(file: &GgufFile) -> Result<Map<String, Value>> {
    let mut map = Map::new();
    for (key, name) in [
        ("bos_token_id", "bos_token_id"),
        ("padding_token_id", "pad_token_id"),
    ] {
        let id = file.value(&format!("tokenizer.ggml.{key}"));
        // Some converters write -1, or its bits as a u32, for a token that does not exist.
        let exists = |id: &i64| *id >= 0 && *id < i64::from(u32::MAX);
        if let Some(id) = id.and_then(GgufValue::as_i64).filter(exists) {
            map.insert(name.to_owned(), id.into());
        }
    }
    let ends = end_of_text_tokens(file)?;
    if !ends.is_empty() {
        map.insert("eos_token_id".to_owned(), ends.into());
    }
    for (key, name) in SAMPLING_KEYS {
        let key = format!("general.sampling.{key}");
        let Some(value) = file.value(&key) else {
            continue;
        };
        let wrong = || Common::option(key.clone(), format!("{value:?}"), "a finite number");
        let number = match name {
            "top_k" => value.as_i64().map(|count| count.max(0).into()),
            // Converted through its decimal digits, because 0.8 as an f32 is 0.800000011920929.
            _ => value
                .as_f64()
                .and_then(|number| (number as f32).to_string().parse::<f64>().ok())
                .and_then(serde_json::Number::from_f64)
                .map(Value::Number),
        };
        map.insert(name.to_owned(), number.ok_or_else(wrong)?);
        if name != "repetition_penalty" {
            map.insert("do_sample".to_owned(), true.into());
        }
    }
    for name in ["xtc_probability", "mirostat"] {
        let value = file.value(&format!("general.sampling.{name}"));
        if value
            .and_then(GgufValue::as_f64)
            .is_some_and(|number| number > 0.0)
        {
            tracing::warn!("`general.sampling.{name}` in the file is not supported and is ignored");
        }
    }
    Ok(map)
}
