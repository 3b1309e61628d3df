use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use overdrive_core::{Error as Common, text};
use overdrive_pickle::PickledFile;
use overdrive_safetensors::{MappedFile, StoredTensor, file_in};
use serde::{Deserialize, Serialize};

use super::{INDEX, INDEX_PICKLE, SINGLE, SINGLE_PICKLE};
use crate::{Error, Result};

/// `model.safetensors.index.json`.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct ShardIndex {
    #[serde(default)]
    pub(super) metadata: IndexMetadata,
    /// The file of each tensor.
    pub(super) weight_map: BTreeMap<String, String>,
}

#[derive(Debug, Default, Serialize, Deserialize)]
pub(super) struct IndexMetadata {
    /// The number of bytes of all tensors.
    #[serde(default)]
    pub(super) total_size: u64,
}

/// The weight files of a folder.
#[derive(Debug)]
pub(super) struct WeightFiles {
    pub(super) paths: Vec<PathBuf>,
    index: Option<ShardIndex>,
}

impl WeightFiles {
    /// Returns `true` if the index has `tensor` in another file than `path`.
    pub(super) fn names_other_file(&self, tensor: &str, path: &Path) -> bool {
        let named = self.index.as_ref().and_then(|i| i.weight_map.get(tensor));
        named.is_some_and(|name| !path.ends_with(name))
    }
}

/// A weight file of either format.
#[derive(Debug)]
pub(super) enum WeightFile {
    Safetensors(MappedFile),
    Pickle(PickledFile),
}

impl WeightFile {
    /// Maps a file; its name determines the format.
    pub(super) fn open(path: &PathBuf) -> Result<WeightFile> {
        Ok(match path.extension() {
            Some(end) if end == "bin" => WeightFile::Pickle(PickledFile::open(path)?),
            _ => WeightFile::Safetensors(MappedFile::open(path)?),
        })
    }

    pub(super) fn tensors(&self) -> Vec<StoredTensor<'_>> {
        match self {
            WeightFile::Safetensors(file) => file.tensors(),
            WeightFile::Pickle(file) => file.tensors(),
        }
    }

    /// Returns the names of the entries that are not tensors.
    pub(super) fn others(&self) -> &[String] {
        match self {
            WeightFile::Safetensors(_) => &[],
            WeightFile::Pickle(file) => file.others(),
        }
    }
}

/// Finds the weight files of a folder. The single file is preferred, and safetensors to pickles, as in transformers.
pub(super) fn weight_files(dir: &Path) -> Result<WeightFiles> {
    for (single, index) in [(SINGLE, INDEX), (SINGLE_PICKLE, INDEX_PICKLE)] {
        let single = dir.join(single);
        if single.is_file() {
            return Ok(WeightFiles {
                paths: vec![single],
                index: None,
            });
        }
        if dir.join(index).is_file() {
            return shards(dir, index);
        }
    }
    Err(Error::NoWeights {
        path: dir.to_path_buf(),
    })
}

/// Returns the files that the index names.
fn shards(dir: &Path, index_name: &str) -> Result<WeightFiles> {
    let path = dir.join(index_name);
    let text = text::read(&path)?;
    let index: ShardIndex = serde_json::from_str(&text).map_err(Common::parse("JSON", &path))?;
    let names: BTreeSet<&String> = index.weight_map.values().collect();
    let mut paths = Vec::with_capacity(names.len());
    for name in names {
        let path = file_in(dir, name, &format!("weight_map of {index_name}"))?;
        if !path.is_file() {
            let tensors = index.weight_map.values().filter(|file| *file == name);
            let tensors = tensors.count();
            let index = index_name.to_owned();
            return Err(Error::MissingShard {
                path,
                index,
                tensors,
            });
        }
        paths.push(path);
    }
    Ok(WeightFiles {
        paths,
        index: Some(index),
    })
}

/// Returns the name of shard `number` (from 1) of `count`.
pub(super) fn shard_name(number: usize, count: usize) -> String {
    format!("model-{number:05}-of-{count:05}.safetensors")
}

/// Returns `true` for what [`shard_name`] returns.
pub(super) fn is_shard_name(name: &str) -> bool {
    let numbers = name
        .strip_prefix("model-")
        .and_then(|rest| rest.strip_suffix(".safetensors"))
        .and_then(|numbers| numbers.split_once("-of-"));
    let is_number = |text: &str| text.len() >= 5 && text.bytes().all(|byte| byte.is_ascii_digit());
    numbers.is_some_and(|(number, count)| is_number(number) && is_number(count))
}
