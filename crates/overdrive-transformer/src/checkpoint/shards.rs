use std::path::{Path, PathBuf};

use overdrive_pickle::PickledFile;
use overdrive_safetensors::{MappedFile, StoredTensor, WeightFiles};

use super::{INDEX, INDEX_PICKLE, SINGLE, SINGLE_PICKLE};
use crate::{Error, Result};

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
        if let Some(found) = overdrive_safetensors::weight_files(dir, single, index)? {
            return Ok(found);
        }
    }
    Err(Error::NoWeights {
        path: dir.to_path_buf(),
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
