//! The source folder.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

use overdrive_core::{Error as CoreError, text};
use overdrive_safetensors::{MappedFile, StoredTensor, weight_files};
use serde_json::{Map, Value};

use crate::{Error, Result};

const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";

/// A Hugging Face folder with memory-mapped weight files.
#[derive(Debug)]
pub(super) struct SourceFolder {
    dir: PathBuf,
    files: Vec<MappedFile>,
    /// The index in `files` of each tensor, by name.
    names: BTreeMap<String, usize>,
    pub(super) config: Map<String, Value>,
    /// `true` if the files hold a head with other values than the embedding.
    has_own_head: bool,
}

impl SourceFolder {
    /// Reads the configuration and the headers, but no tensor.
    pub(super) fn open(dir: &Path) -> Result<SourceFolder> {
        let config: Map<String, Value> = read_json(&dir.join(CONFIG))?;
        if config
            .get("quantization_config")
            .is_some_and(|value| !value.is_null())
        {
            return Err(bad(dir, "it is already quantized; use the original folder"));
        }
        let model_type = config.get("model_type").and_then(Value::as_str);
        if let Some(name @ ("gpt_oss" | "qwen3_vl_moe")) = model_type {
            let reason = format!(
                "a {name} has one tensor for all experts of a layer, which is not quantized tensor by tensor; load the \
                 model with the option `quantization`, and save it"
            );
            return Err(bad(dir, &reason));
        }
        let mut files = Vec::new();
        let mut names = BTreeMap::new();
        let Some(found) = weight_files(dir, SINGLE, INDEX)? else {
            let reason = format!("it has neither {SINGLE} nor {INDEX}");
            return Err(bad(dir, &reason));
        };
        for (file_index, path) in found.paths.iter().enumerate() {
            let file = MappedFile::open(path)?;
            for (name, shard) in &found.weight_map {
                if path.ends_with(shard) {
                    file.tensor(name)?;
                }
            }
            for stored in file.tensors() {
                // A tensor that the index omits is part of the model nevertheless.
                if !found.names_other_file(stored.name(), path) {
                    names.insert(stored.name().to_owned(), file_index);
                }
            }
            files.push(file);
        }
        let mut source = SourceFolder {
            dir: dir.to_path_buf(),
            files,
            names,
            config,
            has_own_head: false,
        };
        source.has_own_head = source.finds_own_head()?;
        Ok(source)
    }

    /// Returns all tensors, file by file and in the order of the files, which is the fastest order to read from a
    /// disk.
    pub(super) fn tensors(&self) -> Vec<StoredTensor<'_>> {
        let of_file = |(file_index, file)| {
            let all: Vec<StoredTensor<'_>> = MappedFile::tensors(file);
            all.into_iter()
                .filter(move |stored| self.names.get(stored.name()) == Some(&file_index))
        };
        self.files.iter().enumerate().flat_map(of_file).collect()
    }

    /// Returns the `model_type` of transformers.
    pub(super) fn model_type(&self) -> &str {
        let name = self.config.get("model_type").and_then(Value::as_str);
        name.unwrap_or_default()
    }

    /// Returns `true` if the head is tied to the embedding: by the configuration, or because the files have no
    /// head. A head with other values than the embedding is not tied, as in transformers 5.
    pub(super) fn is_tied(&self) -> bool {
        !self.has("lm_head.weight") || (self.is_tied_by_config() && !self.has_own_head)
    }

    /// Returns `true` if the configuration ties the head to the embedding.
    pub(super) fn is_tied_by_config(&self) -> bool {
        let configured = self.config.get("tie_word_embeddings");
        configured.and_then(Value::as_bool) == Some(true)
    }

    /// Compares the head with the embedding.
    fn finds_own_head(&self) -> Result<bool> {
        if !self.has("lm_head.weight") {
            return Ok(false);
        }
        const TABLES: [&str; 3] = ["embed_tokens.weight", "wte.weight", "shared.weight"];
        let table = self
            .names
            .keys()
            .find(|name| TABLES.iter().any(|end| name.ends_with(end)));
        Ok(match table {
            Some(table) => !self
                .tensor("lm_head.weight")?
                .has_same_values(&self.tensor(table)?)?,
            None => false,
        })
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.names.contains_key(name)
    }

    pub(super) fn tensor(&self, name: &str) -> Result<StoredTensor<'_>> {
        match self.names.get(name) {
            Some(&index) => Ok(self.files[index].tensor(name)?),
            None => Err(bad(&self.dir, &format!("it has no tensor `{name}`"))),
        }
    }

    /// Copies all files but the weights and `config.json` to `out`: tokenizer, generation settings, templates,
    /// licences.
    pub(super) fn copy_rest(&self, out: &Path) -> Result<()> {
        // Weights in other formats are as large as the model, and would contradict the quantized ones.
        const WEIGHTS: [&str; 11] = [
            "safetensors",
            "bin",
            "pt",
            "pth",
            "ckpt",
            "gguf",
            "h5",
            "msgpack",
            "onnx",
            "tflite",
            "npz",
        ];
        for entry in fs::read_dir(&self.dir).map_err(CoreError::io("list", &self.dir))? {
            let entry = entry.map_err(CoreError::io("list", &self.dir))?;
            let path = entry.path();
            let name = entry.file_name();
            let name_text = name.to_string_lossy();
            let extension = path.extension().unwrap_or_default().to_string_lossy();
            let weight = WEIGHTS.contains(&&*extension) || name_text.ends_with(".index.json");
            if weight || name_text == CONFIG || name_text.starts_with('.') || !path.is_file() {
                continue;
            }
            fs::copy(&path, out.join(&name)).map_err(CoreError::io("copy", &path))?;
        }
        Ok(())
    }
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let text = text::read(path)?;
    Ok(serde_json::from_str(&text).map_err(CoreError::parse("JSON", path))?)
}

/// Returns the error of a folder or file of a checkpoint.
pub(super) fn bad(path: &Path, reason: &str) -> Error {
    Error::BadCheckpoint {
        path: path.to_path_buf(),
        reason: reason.to_owned(),
    }
}
