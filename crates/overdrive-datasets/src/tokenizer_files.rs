//! Tokenizer files in Hugging Face's format.

use std::io::Write;
use std::path::Path;

use tokenizers::Tokenizer;

use overdrive_core::Error as CommonError;

use crate::token_store_writer::{persist, temp_file};
use crate::{Error, Result, Sha256Digest};

/// Reads a `tokenizer.json`; `path` is the file, or the folder of a model with one.
///
/// # Errors
/// Returns an error if the file cannot be read or is not a tokenizer.
pub fn load_tokenizer(path: impl AsRef<Path>) -> Result<Tokenizer> {
    let path = path.as_ref();
    let file = if path.is_dir() {
        path.join("tokenizer.json")
    } else {
        path.to_owned()
    };
    let bytes = std::fs::read(&file).map_err(CommonError::io("read", &file))?;
    Tokenizer::from_bytes(bytes).map_err(Error::tokenizer(format!(
        "read the tokenizer {}",
        file.display()
    )))
}

/// Writes `tokenizer.json` and `tokenizer_config.json` into `folder`, so that transformers'
/// `AutoTokenizer.from_pretrained(folder)` loads the tokenizer.
///
/// `eos_token` becomes transformers' `eos_token` and `bos_token`, `context` its `model_max_length`.
///
/// # Errors
/// Returns an error if the tokenizer does not have `eos_token`, or if the folder cannot be written.
pub fn save_tokenizer(
    folder: impl AsRef<Path>,
    tokenizer: &Tokenizer,
    eos_token: Option<&str>,
    context: usize,
) -> Result<()> {
    let folder = folder.as_ref();
    if let Some(token) = eos_token {
        token_id(tokenizer, token, "eos_token")?;
    }
    std::fs::create_dir_all(folder).map_err(CommonError::io("create the folder", folder))?;
    let mut config = serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        // The default of older transformers versions changes decoded text ("a ." to "a.").
        "clean_up_tokenization_spaces": false,
    });
    if let Some(token) = eos_token {
        config["bos_token"] = token.into();
        config["eos_token"] = token.into();
    }
    let config = format!("{config:#}\n");
    write_file(
        &folder.join("tokenizer.json"),
        to_json(tokenizer, true)?.as_bytes(),
    )?;
    write_file(&folder.join("tokenizer_config.json"), config.as_bytes())
}

/// Returns the SHA-256 that identifies a tokenizer in stores: that of its `tokenizer.json` without white space,
/// truncation and padding (which do not change how this crate tokenizes documents).
///
/// # Errors
/// Returns an error if the tokenizer cannot be written as JSON.
pub fn tokenizer_digest(tokenizer: &Tokenizer) -> Result<Sha256Digest> {
    let mut plain = tokenizer.clone();
    plain
        .with_truncation(None)
        .map_err(Error::tokenizer("switch truncation off"))?;
    plain.with_padding(None);
    Ok(Sha256Digest::of(to_json(&plain, false)?.as_bytes()))
}

fn to_json(tokenizer: &Tokenizer, pretty: bool) -> Result<String> {
    tokenizer
        .to_string(pretty)
        .map_err(Error::tokenizer("write the tokenizer as JSON"))
}

/// Returns the id of the token that an option names.
pub(crate) fn token_id(tokenizer: &Tokenizer, token: &str, option: &'static str) -> Result<u32> {
    if let Some(id) = tokenizer.token_to_id(token) {
        return Ok(id);
    }
    let decoder = tokenizer.get_added_tokens_decoder();
    let mut special: Vec<_> = decoder.iter().filter(|(_, token)| token.special).collect();
    special.sort_unstable_by_key(|(id, _)| **id);
    let special: Vec<_> = special
        .iter()
        .map(|(_, token)| token.content.as_str())
        .collect();
    let known = match special.len() {
        0 => String::new(),
        _ => format!(" (special tokens: {})", special.join(" ")),
    };
    let expected = format!("a token that the tokenizer has{known}, or None");
    Err(CommonError::option(option, format!("{token:?}"), expected).into())
}

/// Writes a small file atomically.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = temp_file(path).map_err(CommonError::io("create", path))?;
    file.write_all(bytes)
        .map_err(CommonError::io("write", path))?;
    persist(file, path)
}
