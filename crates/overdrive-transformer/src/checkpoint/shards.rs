use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use overdrive_core::Error as Common;
use overdrive_safetensors::file_in;
use serde::{Deserialize, Serialize};

use super::{INDEX, SINGLE};
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

/// Finds the weight files of a folder. The single file is preferred, as in transformers.
pub(super) fn weight_files(dir: &Path) -> Result<WeightFiles> {
    let single = dir.join(SINGLE);
    if single.is_file() {
        return Ok(WeightFiles {
            paths: vec![single],
            index: None,
        });
    }
    let path = dir.join(INDEX);
    if !path.is_file() {
        return Err(Error::NoWeights {
            path: dir.to_path_buf(),
        });
    }
    let text = std::fs::read_to_string(&path).map_err(Common::io("read", &path))?;
    let index: ShardIndex = serde_json::from_str(&text).map_err(Common::parse("JSON", &path))?;
    let names: BTreeSet<&String> = index.weight_map.values().collect();
    let mut paths = Vec::with_capacity(names.len());
    for name in names {
        let path = file_in(dir, name, &format!("weight_map of {INDEX}"))?;
        if !path.is_file() {
            let tensors = index.weight_map.values().filter(|file| *file == name);
            let tensors = tensors.count();
            return Err(Error::MissingShard { path, tensors });
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
