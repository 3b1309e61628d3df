//! Tokenizer files in Hugging Face's format.

use std::path::{Path, PathBuf};

use tokenizers::Tokenizer;

use overdrive_core::{Error as CommonError, files, text};

use crate::{Error, Result, Sha256Digest};

/// The files of a tokenizer, beside the templates of `additional_chat_templates`.
const FILES: [&str; 9] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "merges.txt",
    "tokenizer.model",
];

/// Reads a `tokenizer.json`; `path` is the file, or the folder of a model with one. Truncation and padding that the
/// file enables are switched off: they are left over from another program's batches, and would silently truncate a
/// prompt or a document.
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
    let json = text::read(&file)?;
    // tokenizers 0.23 calls `expect` for each kind of decoder and normalizer, so it panics on invalid files; a
    // template that names an undefined special token panics at the first text.
    let read = std::panic::catch_unwind(|| {
        let tokenizer = Tokenizer::from_bytes(json.as_bytes())?;
        // Whether these texts can be encoded does not matter.
        drop(tokenizer.encode("", true));
        drop(tokenizer.encode(("", ""), true));
        Ok(tokenizer)
    });
    let read = read.unwrap_or_else(|_| {
        Err(
            "it is damaged: the tokenizers crate panicked, with the message on standard error"
                .into(),
        )
    });
    let mut tokenizer = read.map_err(Error::tokenizer(format!(
        "read the tokenizer {}",
        file.display()
    )))?;
    switch_limits_off(&mut tokenizer)?;
    Ok(tokenizer)
}

/// Switches truncation and padding off.
pub(crate) fn switch_limits_off(tokenizer: &mut Tokenizer) -> Result<()> {
    tokenizer
        .with_truncation(None)
        .map_err(Error::tokenizer("switch truncation off"))?;
    tokenizer.with_padding(None);
    Ok(())
}

/// Copies the tokenizer's files and the chat templates from one model's folder to another; returns the names of the
/// copied files.
///
/// # Errors
/// Returns an error if a file cannot be copied.
pub fn copy_tokenizer(from: impl AsRef<Path>, to: impl AsRef<Path>) -> Result<Vec<PathBuf>> {
    let (from, to) = (from.as_ref(), to.as_ref());
    let mut names: Vec<PathBuf> = FILES.iter().map(PathBuf::from).collect();
    let templates = Path::new("additional_chat_templates");
    // Most models have no such folder.
    for entry in std::fs::read_dir(from.join(templates))
        .into_iter()
        .flatten()
    {
        let entry = entry.map_err(CommonError::io("list", from.join(templates)))?;
        names.push(templates.join(entry.file_name()));
    }
    names.retain(|name| from.join(name).is_file());
    for name in &names {
        let (source, target) = (from.join(name), to.join(name));
        if let Some(folder) = target.parent() {
            std::fs::create_dir_all(folder).map_err(CommonError::io("create", folder))?;
        }
        // Read before it is written: a copy of a file onto itself would empty it.
        let bytes = std::fs::read(&source).map_err(CommonError::io("read", &source))?;
        files::write(&target, &bytes)?;
    }
    Ok(names)
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
    files::write(
        folder.join("tokenizer.json"),
        to_json(tokenizer, true)?.as_bytes(),
    )?;
    files::write(folder.join("tokenizer_config.json"), config.as_bytes())?;
    Ok(())
}

/// Returns the SHA-256 that identifies a tokenizer in stores: that of its `tokenizer.json` without white space,
/// truncation and padding (which do not change how this crate tokenizes documents).
///
/// # Errors
/// Returns an error if the tokenizer cannot be written as JSON.
pub fn tokenizer_digest(tokenizer: &Tokenizer) -> Result<Sha256Digest> {
    let mut plain = tokenizer.clone();
    switch_limits_off(&mut plain)?;
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tokenizer_is_opened_without_the_limits_of_its_file() {
        let folder = tempfile::tempdir().unwrap();
        let json = serde_json::json!({
            "version": "1.0", "added_tokens": [],
            "truncation": {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0},
            "padding": {"strategy": {"Fixed": 9}, "direction": "Right", "pad_to_multiple_of": null,
                "pad_id": 0, "pad_type_id": 0, "pad_token": "a"},
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"},
        });
        std::fs::write(folder.path().join("tokenizer.json"), json.to_string()).unwrap();
        let tokenizer = load_tokenizer(folder.path()).unwrap();
        let encoding = tokenizer.encode("b b b a b", false).unwrap();
        assert_eq!(encoding.get_ids(), [1, 1, 1, 0, 1]);
    }

    /// `cargo xtask fuzz tokenizer` found the first of these files.
    #[test]
    fn files_on_which_the_tokenizers_crate_panics_are_errors() {
        let folder = tempfile::tempdir().unwrap();
        let rest = r#""model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}"#;
        let normalizer = r#"{"type": "Precompiled", "precompiled_charsmap": "AAAA"}"#;
        for text in [
            format!(r#"{{"decoder": {{"type": "ByteFallback"!: 1}}, {rest}}}"#),
            format!(r#"{{"normalizer": {normalizer}, {rest}}}"#),
        ] {
            std::fs::write(folder.path().join("tokenizer.json"), &text).unwrap();
            let error = load_tokenizer(folder.path()).unwrap_err().to_string();
            assert!(error.contains("tokenizer.json"), "{text}: {error}");
        }
    }

    #[test]
    fn a_copy_has_every_file_of_the_tokenizer_and_no_other() {
        let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        std::fs::create_dir(from.path().join("additional_chat_templates")).unwrap();
        let names = [
            "tokenizer.json",
            "tokenizer.model",
            "chat_template.jinja",
            "additional_chat_templates/tool_use.jinja",
        ];
        for name in names.iter().chain(&["model.safetensors"]) {
            std::fs::write(from.path().join(name), name).unwrap();
        }
        let copied = copy_tokenizer(from.path(), to.path()).unwrap();
        assert_eq!(copied.len(), names.len());
        for name in names {
            let text = std::fs::read_to_string(to.path().join(name)).unwrap();
            assert_eq!(text, name);
        }
        assert!(!to.path().join("model.safetensors").exists());
        // Copying a folder onto itself changes nothing.
        copy_tokenizer(to.path(), to.path()).unwrap();
        let text = std::fs::read_to_string(to.path().join("tokenizer.json")).unwrap();
        assert_eq!(text, "tokenizer.json");
    }
}
