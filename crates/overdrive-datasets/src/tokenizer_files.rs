//! Tokenizers as files of Hugging Face.

use std::io::Write;
use std::path::Path;

use tokenizers::Tokenizer;

use crate::token_store_writer::{persist, temp_file};
use crate::{Error, Result, Sha256Digest};

/// Reads a `tokenizer.json`; `path` is the file, or the folder of a model that holds one.
///
/// # Errors
/// When it cannot be read or is no tokenizer.
pub fn load_tokenizer(path: impl AsRef<Path>) -> Result<Tokenizer> {
    let path = path.as_ref();
    let file = if path.is_dir() {
        path.join("tokenizer.json")
    } else {
        path.to_owned()
    };
    let bytes = std::fs::read(&file).map_err(Error::io("read", &file))?;
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
/// When the tokenizer lacks `eos_token`, or the folder cannot be written.
pub fn save_tokenizer(
    folder: impl AsRef<Path>,
    tokenizer: &Tokenizer,
    eos_token: Option<&str>,
    context: usize,
) -> Result<()> {
    let folder = folder.as_ref();
    if let Some(token) = eos_token.filter(|token| tokenizer.token_to_id(token).is_none()) {
        return Err(Error::UnknownToken {
            token: token.to_owned(),
            option: "eos_token",
            known: String::new(),
        });
    }
    std::fs::create_dir_all(folder).map_err(Error::io("create the folder", folder))?;
    let mut config = serde_json::json!({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": context,
        // The default of older versions of transformers changes decoded text ("a ." to "a.").
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

/// The SHA-256 by which stores know their tokenizer: of its `tokenizer.json` without white space,
/// with truncation and padding left out (they do not change how a document is tokenized here).
///
/// # Errors
/// When the tokenizer cannot be written as JSON.
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

/// Writes a small file in one step: it is there whole, or not at all.
pub(crate) fn write_file(path: &Path, bytes: &[u8]) -> Result<()> {
    let mut file = temp_file(path).map_err(Error::io("create", path))?;
    file.write_all(bytes).map_err(Error::io("write", path))?;
    persist(file, path)
}
