//! The choice of the files that a model needs.

use std::collections::BTreeSet;
use std::path::Path;

use overdrive_core::{Error as Common, text};
use serde_json::Value;

use crate::name::{HubName, is_relative_file};
use crate::{Error, Result};

/// Configurations, tokenizers, chat templates, and the configuration of embedding models: files of kilobytes to a few
/// megabytes.
const SMALL: [&str; 20] = [
    "config.json",
    "generation_config.json",
    "adapter_config.json",
    "quantize_config.json",
    "quant_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template.jinja",
    "chat_template.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "tokenizer.model",
    "spiece.model",
    "sentencepiece.bpe.model",
    "modules.json",
    "config_sentence_transformers.json",
    "sentence_bert_config.json",
];
const TEMPLATES: &str = "additional_chat_templates/";

/// The weight files of a model, the preferred ones first.
const MODEL_WEIGHTS: [&str; 4] = [
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
];
const ADAPTER_WEIGHTS: [&str; 1] = ["adapter_model.safetensors"];

/// The quantization that llama.cpp selects for a name without one.
const DEFAULT_QUANTIZATION: &str = "Q4_K_M";
/// The largest index of shards that is read, in bytes.
const MAX_INDEX: u64 = 64 << 20;

/// The use of the files.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Wanted {
    Model,
    Adapter,
    /// The tokenizer without the weights.
    Tokenizer,
}

/// The files that are needed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Selection {
    pub(crate) files: Vec<String>,
    /// The index among `files` that names the shards.
    pub(crate) index: Option<String>,
    /// The file that stands for the model; `None`: the folder does.
    pub(crate) entry: Option<String>,
}

/// Selects among the files of a repository.
pub(crate) fn select(names: &[String], name: &HubName, wanted: Wanted) -> Result<Selection> {
    let has = |file: &str| names.iter().any(|name| name == file);
    if name.file.is_some() || name.quantization.is_some() {
        return gguf(names, name);
    }
    let is_small = |file: &&String| {
        SMALL.contains(&file.as_str())
            || (file.starts_with(TEMPLATES) && file.ends_with(".jinja") && is_relative_file(file))
            || wanted == Wanted::Model && is_of_module(file)
    };
    let mut files: Vec<String> = names.iter().filter(is_small).cloned().collect();
    if wanted == Wanted::Tokenizer && has("tokenizer.json") {
        return Ok(Selection {
            files,
            index: None,
            entry: None,
        });
    }
    let weights: &[&str] = match wanted {
        Wanted::Model | Wanted::Tokenizer => &MODEL_WEIGHTS,
        Wanted::Adapter => &ADAPTER_WEIGHTS,
    };
    let Some(weights) = weights.iter().find(|file| has(file)) else {
        if wanted != Wanted::Adapter && names.iter().any(|name| is_model_gguf(name)) {
            return gguf(names, name);
        }
        return Err(no_weights(names, name, wanted));
    };
    files.push((*weights).to_owned());
    Ok(Selection {
        files,
        index: weights
            .ends_with(".index.json")
            .then(|| (*weights).to_owned()),
        entry: None,
    })
}

/// Returns the names of the shards in the index at `path`.
pub(crate) fn shards(path: &Path) -> Result<Vec<String>> {
    let length = std::fs::metadata(path)
        .map_err(Common::io("read", path))?
        .len();
    if length > MAX_INDEX {
        let expected = format!("at most {MAX_INDEX}");
        return Err(Common::option("bytes of the index of shards", length, expected).into());
    }
    let text = text::read(path)?;
    let index: Value = serde_json::from_str(&text).map_err(Common::parse("JSON", path))?;
    let map = index["weight_map"].as_object().into_iter().flatten();
    let names: BTreeSet<&str> = map.filter_map(|(_, file)| file.as_str()).collect();
    let wrong = names
        .iter()
        .find(|name| !is_relative_file(name) || name.contains('/'));
    if let Some(wrong) = wrong {
        let expected = "the name of a file in the same folder";
        let key = format!("weight_map of {}", path.display());
        return Err(Common::option(key, format!("{wrong:?}"), expected).into());
    }
    Ok(names.into_iter().map(str::to_owned).collect())
}

fn gguf(names: &[String], name: &HubName) -> Result<Selection> {
    let groups: Vec<&String> = names.iter().filter(|name| is_model_gguf(name)).collect();
    // For a split model, only the first file is a candidate.
    let mut first: Vec<&String> = groups
        .iter()
        .copied()
        .filter(|name| split_of(name).is_none_or(|(_, number, _)| number == "00001"))
        .collect();
    first.sort_by_key(|name| (name.len(), name.as_str()));
    let of = |quantization: &str| {
        first
            .iter()
            .copied()
            .find(|name| has_tag(name, quantization))
    };
    let found = match (&name.file, &name.quantization) {
        (Some(file), _) => names.iter().find(|name| *name == file),
        (None, Some(quantization)) => of(quantization),
        (None, None) => of(DEFAULT_QUANTIZATION).or(first.first().copied()),
    };
    let Some(found) = found.filter(|file| is_relative_file(file)) else {
        let file = match (&name.file, &name.quantization) {
            (Some(file), _) => format!("file `{file}`"),
            (_, quantization) => {
                format!(
                    "GGUF file of {}",
                    quantization.as_deref().unwrap_or("a model")
                )
            }
        };
        let found = match first.is_empty() {
            true => "no GGUF file".to_owned(),
            false => listed(first.iter().map(|name| name.as_str())),
        };
        let repository = name.repository.clone();
        return Err(Error::NoFile {
            repository,
            file,
            found,
        });
    };
    let files = match split_of(found) {
        None => vec![found.clone()],
        Some((stem, _, count)) => {
            // The count in a name can be anything; only files that the hub lists are requested.
            let same =
                |name: &&&String| split_of(name).is_some_and(|(s, _, c)| (s, c) == (stem, count));
            groups
                .iter()
                .filter(same)
                .map(|name| (*name).clone())
                .collect()
        }
    };
    Ok(Selection {
        files,
        index: None,
        entry: Some(found.clone()),
    })
}

/// Returns `true` for the files of a module of sentence-transformers, such as `1_Pooling/config.json` and
/// `2_Dense/model.safetensors`.
fn is_of_module(name: &str) -> bool {
    let Some((folder, file)) = name.split_once('/') else {
        return false;
    };
    let is_numbered = folder.split_once('_').is_some_and(|(number, kind)| {
        !kind.is_empty() && number.parse::<u8>().is_ok() && is_relative_file(folder)
    });
    is_numbered && ["config.json", "model.safetensors"].contains(&file)
}

/// Returns the stem, the number and the count of `STEM-00001-of-00003.gguf`.
fn split_of(name: &str) -> Option<(&str, &str, &str)> {
    let stem = name.strip_suffix(".gguf")?;
    let (stem, count) = stem.rsplit_once("-of-")?;
    let (stem, number) = stem.rsplit_once('-')?;
    let digits = |text: &str| text.len() == 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    (digits(number) && digits(count)).then_some((stem, number, count))
}

/// Returns `true` for the GGUF file of a model, and `false` for image encoders and calibration data.
fn is_model_gguf(name: &str) -> bool {
    let name = name.to_ascii_lowercase();
    name.ends_with(".gguf") && !name.contains("mmproj") && !name.contains("imatrix")
}

/// Returns `true` if `tag` is a whole word of `name`: `Q4_K` is one in `a-Q4_K.gguf`, but not in `a-Q4_K_M.gguf` or
/// `a-IQ4_K.gguf`.
fn has_tag(name: &str, tag: &str) -> bool {
    let (name, tag) = (name.to_ascii_uppercase(), tag.to_ascii_uppercase());
    name.match_indices(&tag).any(|(at, _)| {
        let before = name[..at].chars().next_back();
        let after = name[at + tag.len()..].chars().next();
        before.is_none_or(|letter| !letter.is_alphanumeric())
            && after.is_none_or(|letter| !letter.is_alphanumeric() && letter != '_')
    })
}

fn no_weights(names: &[String], name: &HubName, wanted: Wanted) -> Error {
    let file = match wanted {
        Wanted::Tokenizer => "tokenizer.json or GGUF file",
        Wanted::Model => {
            "weights that can be read (model.safetensors, pytorch_model.bin or GGUF files)"
        }
        Wanted::Adapter => "adapter in PEFT's format (adapter_model.safetensors)",
    };
    let adapter = wanted == Wanted::Model && names.iter().any(|name| name == "adapter_config.json");
    let found = match adapter {
        true => "an adapter: give its base model, and the adapter as --adapter".to_owned(),
        false => listed(names.iter().map(String::as_str)),
    };
    Error::NoFile {
        repository: name.repository.clone(),
        file: file.to_owned(),
        found,
    }
}

/// Joins the first names of a set.
pub(crate) fn listed<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 12;
    let names: BTreeSet<&str> = names.collect();
    let shown: Vec<&str> = names.iter().take(SHOWN).copied().collect();
    match names.len() {
        0 => "no files".to_owned(),
        count if count > SHOWN => format!("{} and {} more", shown.join(", "), count - SHOWN),
        _ => shown.join(", "),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn chosen(names: &[&str], name: &str, wanted: Wanted) -> Result<Selection> {
        let names: Vec<String> = names.iter().map(|&name| name.to_owned()).collect();
        select(&names, &HubName::parse(name).expect("a name"), wanted)
    }

    fn files(names: &[&str], name: &str) -> Vec<String> {
        chosen(names, name, Wanted::Model).expect("weights").files
    }

    #[test]
    fn safetensors_are_preferred_and_other_files_left_out() {
        let names = [
            ".gitattributes",
            "README.md",
            "config.json",
            "consolidated.safetensors",
            "model.safetensors",
            "onnx/model.onnx",
            "pytorch_model.bin",
            "tf_model.h5",
            "tokenizer.json",
            "additional_chat_templates/rag.jinja",
            "additional_chat_templates/../../x.jinja",
            "1_Pooling/config.json",
            "2_Dense/model.safetensors",
            "2_Dense/pytorch_model.bin",
            "2_Dense/../config.json",
            "2_Dense/more/config.json",
        ];
        let expected = [
            "config.json",
            "tokenizer.json",
            "additional_chat_templates/rag.jinja",
            "1_Pooling/config.json",
            "2_Dense/model.safetensors",
            "model.safetensors",
        ];
        assert_eq!(files(&names, "a/b"), expected);
        assert_eq!(
            files(&["config.json", "pytorch_model.bin"], "a/b")
                .last()
                .expect("one"),
            "pytorch_model.bin"
        );
        let sharded = chosen(
            &["pytorch_model.bin", "model.safetensors.index.json"],
            "a/b",
            Wanted::Model,
        );
        assert_eq!(
            sharded.expect("weights").index.as_deref(),
            Some("model.safetensors.index.json")
        );
        let adapter = ["adapter_config.json", "adapter_model.safetensors"];
        let error = chosen(&adapter, "a/b", Wanted::Model)
            .expect_err("no model")
            .to_string();
        assert!(error.contains("--adapter"), "{error}");
        assert_eq!(
            chosen(&adapter, "a/b", Wanted::Adapter).expect("one").files,
            adapter
        );
    }

    #[test]
    fn gguf_files_are_chosen_by_quantization() {
        let names = [
            "README.md",
            "m-IQ4_XS.gguf",
            "m-Q4_K_M.gguf",
            "m-Q4_K_S.gguf",
            "mmproj-Q8_0.gguf",
            "Q8_0/m-Q8_0-00001-of-00002.gguf",
            "Q8_0/m-Q8_0-00002-of-00002.gguf",
        ];
        assert_eq!(files(&names, "a/b"), ["m-Q4_K_M.gguf"]);
        assert_eq!(files(&names, "a/b:q4_k_s"), ["m-Q4_K_S.gguf"]);
        assert_eq!(files(&names, "a/b/m-IQ4_XS.gguf"), ["m-IQ4_XS.gguf"]);
        let split = chosen(&names, "a/b:Q8_0", Wanted::Model).expect("a model");
        assert_eq!(split.files, names[5..]);
        assert_eq!(split.entry.as_deref(), Some(names[5]));
        for missing in ["a/b:Q4_K", "a/b:Q4", "a/b/other.gguf"] {
            let error = chosen(&names, missing, Wanted::Model)
                .expect_err(missing)
                .to_string();
            assert!(
                error.contains("m-Q4_K_M.gguf") && !error.contains("00002-of"),
                "{error}"
            );
        }
    }

    #[test]
    fn an_index_may_not_name_files_elsewhere() {
        let folder = tempfile::tempdir().expect("temporary folder");
        let path = folder.path().join("model.safetensors.index.json");
        for name in [
            "../x.safetensors",
            "/etc/passwd",
            "a/b.safetensors",
            "a\\b",
            "",
        ] {
            let index = serde_json::json!({"weight_map": {"w": name}}).to_string();
            std::fs::write(&path, index).expect("writes");
            let error = shards(&path).expect_err(name).to_string();
            assert!(error.contains("weight_map"), "{error}");
        }
        std::fs::write(
            &path,
            r#"{"weight_map": {"a": "2.bin", "b": "1.bin", "c": "2.bin"}}"#,
        )
        .expect("writes");
        assert_eq!(shards(&path).expect("valid"), ["1.bin", "2.bin"]);
    }
}
