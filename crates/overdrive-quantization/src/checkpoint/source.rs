//! The folder that is read.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::{Path, PathBuf};

use overdrive_safetensors::{MappedFile, StoredTensor};
use serde::Deserialize;
use serde_json::{Map, Value};

use crate::{Error, Result};

const SINGLE: &str = "model.safetensors";
pub(super) const INDEX: &str = "model.safetensors.index.json";
const CONFIG: &str = "config.json";

/// A Hugging Face folder, mapped.
#[derive(Debug)]
pub(super) struct Source {
    dir: PathBuf,
    files: Vec<MappedFile>,
    /// File and place of each tensor, by name.
    names: BTreeMap<String, usize>,
    pub(super) config: Map<String, Value>,
}

#[derive(Deserialize)]
struct ShardIndex {
    weight_map: BTreeMap<String, String>,
}

impl Source {
    /// Reads configuration and headers; no tensor yet.
    pub(super) fn open(dir: &Path) -> Result<Source> {
        let config: Map<String, Value> = read_json(&dir.join(CONFIG))?;
        if config
            .get("quantization_config")
            .is_some_and(|value| !value.is_null())
        {
            return Err(bad(
                dir,
                "it is quantized already: begin with the folder that it was made of",
            ));
        }
        let mut files = Vec::new();
        let mut names = BTreeMap::new();
        if dir.join(SINGLE).is_file() {
            let file = MappedFile::open(dir.join(SINGLE))?;
            names.extend(
                file.tensors()
                    .iter()
                    .map(|stored| (stored.name().to_owned(), 0)),
            );
            files.push(file);
        } else if dir.join(INDEX).is_file() {
            let index: ShardIndex = read_json(&dir.join(INDEX))?;
            let shards: BTreeSet<&String> = index.weight_map.values().collect();
            for (place, shard) in shards.into_iter().enumerate() {
                // A name comes from the file: it must not lead out of the folder.
                if Path::new(shard)
                    .file_name()
                    .is_none_or(|last| last != shard.as_str())
                {
                    return Err(bad(dir, &format!("its index names the file {shard:?}")));
                }
                let file = MappedFile::open(dir.join(shard))?;
                let own = index.weight_map.iter().filter(|(_, file)| *file == shard);
                for (name, _) in own {
                    file.tensor(name)?;
                    names.insert(name.clone(), place);
                }
                files.push(file);
            }
        } else {
            let reason = format!("it holds neither {SINGLE} nor {INDEX}");
            return Err(bad(dir, &reason));
        }
        Ok(Source {
            dir: dir.to_path_buf(),
            files,
            names,
            config,
        })
    }

    /// Every tensor, file by file and in the order of the files, which a disk reads fastest.
    pub(super) fn tensors(&self) -> Vec<StoredTensor<'_>> {
        let of_file = |(place, file)| {
            let all: Vec<StoredTensor<'_>> = MappedFile::tensors(file);
            all.into_iter()
                .filter(move |stored| self.names.get(stored.name()) == Some(&place))
        };
        self.files.iter().enumerate().flat_map(of_file).collect()
    }

    /// The architecture, in the words of transformers.
    pub(super) fn model_type(&self) -> &str {
        let name = self.config.get("model_type").and_then(Value::as_str);
        name.unwrap_or_default()
    }

    /// Whether the head is the embedding: said by the configuration, or so because there is no head.
    pub(super) fn is_tied(&self) -> bool {
        let said = self
            .config
            .get("tie_word_embeddings")
            .and_then(Value::as_bool);
        !self.has("lm_head.weight") || said == Some(true)
    }

    pub(super) fn has(&self, name: &str) -> bool {
        self.names.contains_key(name)
    }

    pub(super) fn tensor(&self, name: &str) -> Result<StoredTensor<'_>> {
        match self.names.get(name) {
            Some(&place) => Ok(self.files[place].tensor(name)?),
            None => Err(bad(&self.dir, &format!("it has no tensor `{name}`"))),
        }
    }

    /// Copies everything that is no weight and not `config.json` to `out`: tokenizer, generation
    /// settings, templates, licences.
    pub(super) fn copy_rest(&self, out: &Path) -> Result<()> {
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
        for entry in fs::read_dir(&self.dir).map_err(io("list", &self.dir))? {
            let entry = entry.map_err(io("list", &self.dir))?;
            let path = entry.path();
            let name = entry.file_name();
            let text = name.to_string_lossy();
            let extension = path.extension().unwrap_or_default().to_string_lossy();
            let weight = WEIGHTS.contains(&&*extension) || text.ends_with(".index.json");
            if weight || text == CONFIG || text.starts_with('.') || !path.is_file() {
                continue;
            }
            fs::copy(&path, out.join(&name)).map_err(io("copy", &path))?;
        }
        Ok(())
    }
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Result<T> {
    let text = fs::read_to_string(path).map_err(io("read", path))?;
    serde_json::from_str(&text).map_err(|error| bad(path, &format!("it is no such JSON: {error}")))
}

pub(super) fn bad(path: &Path, reason: &str) -> Error {
    Error::BadCheckpoint {
        path: path.to_path_buf(),
        reason: reason.to_owned(),
    }
}

pub(super) fn io<'a>(
    action: &'static str,
    path: &'a Path,
) -> impl FnOnce(std::io::Error) -> Error + 'a {
    move |source| Error::Io {
        action,
        path: path.to_path_buf(),
        source,
    }
}
