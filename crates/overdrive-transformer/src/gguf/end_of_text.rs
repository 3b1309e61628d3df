//! The tokens that end a text, which a GGUF file names in several ways.

use overdrive_core::Error as Common;
use overdrive_quantization::{GgufFile, GgufValue};

use crate::Result;

/// The keys of `tokenizer.ggml` with a token that ends a text or a turn. The end of the text comes first,
/// because the first one also fills rows that have ended.
const KEYS: [&str; 6] = [
    "eos_token_id",
    "eot_token_id",
    "eom_token_id",
    "fim_pad_token_id",
    "fim_rep_token_id",
    "fim_sep_token_id",
];

/// The texts of tokens that end a turn in any model, as in llama.cpp's list of end-of-generation tokens
/// (`special_eog_ids` in llama-vocab.cpp): converters often write the end of the text only. Its `</s>` is left
/// out: models that end with it name it as `eos_token_id`, and in Gemma it is a tag of HTML.
const TEXTS: [&str; 29] = [
    "<|eot_id|>",
    "<|im_end|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "<|flush|>",
    "<|calls|>",
    "<end_of_turn>",
    "<|endoftext|>",
    "<|eom_id|>",
    "<EOT>",
    "_<EOT>",
    "[EOT]",
    "[EOS]",
    "<|end_of_text|>",
    "<end_of_utterance>",
    "<eos>",
    "<turn|>",
    "<|tool_response>",
    "<|fim_pad|>",
    "<fim-pad>",
    "<fim_pad>",
    "<|fim_repo|>",
    "<|repo_name|>",
    "<fim-repo>",
    "<reponame>",
    "<|file_sep|>",
    "<｜end▁of▁sentence｜>",
    "[e~[",
];

/// Returns the ids of all tokens after which llama.cpp ends a generation: those of the metadata first, then
/// those with a known text.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) for an id of another type.
pub fn end_of_text_tokens(file: &GgufFile) -> Result<Vec<i64>> {
    let texts = file
        .value("tokenizer.ggml.tokens")
        .and_then(GgufValue::as_strings)
        .unwrap_or_default();
    let mut ids = Vec::new();
    for key in KEYS {
        let key = format!("tokenizer.ggml.{key}");
        let Some(value) = file.value(&key) else {
            continue;
        };
        let id = value
            .as_i64()
            .ok_or_else(|| Common::option(key, format!("{value:?}"), "a token id"))?;
        // Some converters write -1, or its bits as a u32, for a token that does not exist.
        let exists = id >= 0 && id < i64::from(u32::MAX);
        if exists && (texts.is_empty() || (id as usize) < texts.len()) && !ids.contains(&id) {
            ids.push(id);
        }
    }
    let position = |text: &str| texts.iter().position(|token| token == text);
    // In the harmony format `<|end|>` ends a message, and others the answer.
    let messages = position("<|call|>").is_some() && position("<|return|>").is_some()
        || position("<|calls|>").is_some() && position("<|flush|>").is_some();
    for (id, text) in texts.iter().enumerate() {
        let ends = TEXTS.contains(&text.as_str()) && !(messages && text == "<|end|>");
        let id = id as i64;
        if ends && !ids.contains(&id) {
            ids.push(id);
        }
    }
    Ok(ids)
}
