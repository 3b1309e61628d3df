//! Chat templates of GGUF files: `tokenizer.chat_template`, and named ones as `tokenizer.chat_template.NAME`.

use std::collections::BTreeMap;

use overdrive_quantization::{GgufFile, GgufValue};
use serde_json::{Map, Value};

use super::{ChatTemplate, DEFAULT};
use crate::{Error, Result, gguf};

/// The names of special tokens in templates, and of their ids in a GGUF file (with the format's own spelling).
pub(crate) const SPECIAL_TOKENS: [(&str, &str); 7] = [
    ("bos_token", "bos_token_id"),
    ("eos_token", "eos_token_id"),
    ("unk_token", "unknown_token_id"),
    ("sep_token", "seperator_token_id"),
    ("pad_token", "padding_token_id"),
    ("cls_token", "cls_token_id"),
    ("mask_token", "mask_token_id"),
];

/// The prefix of the keys of templates.
const KEY: &str = "tokenizer.chat_template";

impl ChatTemplate {
    /// Reads the templates of a GGUF file, and the special tokens that its metadata name.
    ///
    /// # Errors
    /// [`Error::NoChatTemplate`] if there is none; [`Error::ChatTemplate`] if one cannot be parsed.
    pub fn from_gguf(file: &GgufFile) -> Result<ChatTemplate> {
        let sources = templates_of_gguf(file)?;
        if sources.is_empty() {
            return Err(Error::NoChatTemplate {
                dir: file.path().to_owned(),
            });
        }
        ChatTemplate::from_sources(sources, special_tokens_of_gguf(file)?)
    }
}

/// Returns the sources of the templates by their names.
pub(crate) fn templates_of_gguf(file: &GgufFile) -> Result<BTreeMap<String, String>> {
    let mut sources = BTreeMap::new();
    for (key, value) in file.metadata() {
        let Some(rest) = key.strip_prefix(KEY) else {
            continue;
        };
        let name = match rest.strip_prefix('.') {
            Some(name) if !name.is_empty() => name,
            None if rest.is_empty() => DEFAULT,
            // `tokenizer.chat_templates` is the list of the names.
            _ => continue,
        };
        let source = value.as_str().ok_or_else(|| {
            overdrive_core::Error::option(key.clone(), "not a string", "the source of a template")
        })?;
        sources.insert(name.to_owned(), source.to_owned());
    }
    Ok(sources)
}

/// Returns the special tokens of a file by their names.
pub(crate) fn special_tokens_of_gguf(file: &GgufFile) -> Result<Map<String, Value>> {
    let mut special_tokens = Map::new();
    for (name, _) in SPECIAL_TOKENS {
        if let Some(text) = special_token(file, name)? {
            special_tokens.insert(name.to_owned(), text.into());
        }
    }
    Ok(special_tokens)
}

/// Returns the text of a special token, such as `eos_token`.
pub(crate) fn special_token(file: &GgufFile, name: &str) -> Result<Option<String>> {
    let tokens = file.value("tokenizer.ggml.tokens");
    let tokens = tokens.and_then(GgufValue::as_strings).unwrap_or_default();
    let key = SPECIAL_TOKENS.iter().find(|(token, _)| *token == name);
    let Some((_, key)) = key else {
        return Ok(None);
    };
    let id = gguf::special(file, key, tokens.len())?;
    Ok(id.and_then(|id| tokens.get(id as usize)).cloned())
}
