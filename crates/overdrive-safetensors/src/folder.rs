use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use overdrive_core::{Error as CommonError, text};
use serde_json::Value;

use crate::{Error, Result};

/// Returns the path of the file `name` in the folder `dir`, for names that come from a file, such as an index of
/// shards, and must not lead out of the folder. In the error, `key` is the origin of the name.
///
/// ```
/// use overdrive_safetensors::file_in;
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let key = "weight_map of model.safetensors.index.json";
/// let path = file_in("models/tiny".as_ref(), "model-00001-of-00002.safetensors", key)?;
/// assert!(path.starts_with("models/tiny"));
/// assert!(file_in("models/tiny".as_ref(), "../other/model.safetensors", key).is_err());
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if the name contains a folder, is an absolute path or is `..`.
pub fn file_in(dir: &Path, name: &str, key: &str) -> Result<PathBuf> {
    let last = Path::new(name).file_name();
    if last.is_some_and(|last| last == name) {
        return Ok(dir.join(name));
    }
    let expected = "the name of a file in the same folder";
    Err(CommonError::option(key.to_owned(), format!("{name:?}"), expected).into())
}

/// The weight files of a Hugging Face folder.
#[derive(Debug)]
pub struct WeightFiles {
    /// The files, sorted by name.
    pub paths: Vec<PathBuf>,
    /// The name of the file of each tensor that the index lists; empty if there is a single file.
    pub weight_map: BTreeMap<String, String>,
}

impl WeightFiles {
    /// Returns `true` if the index has `tensor` in another file than `path`.
    pub fn names_other_file(&self, tensor: &str, path: &Path) -> bool {
        let named = self.weight_map.get(tensor);
        named.is_some_and(|name| !path.ends_with(name))
    }
}

/// Returns the weight files of the folder `dir`: the file `single`, else those that the file `index` lists, else `None`.
/// Usual names are `model.safetensors` and `model.safetensors.index.json`. No weight file is opened.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if the index cannot be read, has no `weight_map`, or names a file outside the
/// folder; [`Error::MissingShard`](crate::Error::MissingShard) if a file that it names does not exist.
pub fn weight_files(dir: &Path, single: &str, index: &str) -> Result<Option<WeightFiles>> {
    if dir.join(single).is_file() {
        return Ok(Some(WeightFiles {
            paths: vec![dir.join(single)],
            weight_map: BTreeMap::new(),
        }));
    }
    let index_path = dir.join(index);
    if !index_path.is_file() {
        return Ok(None);
    }
    let parsed = serde_json::from_str::<BTreeMap<String, Value>>(&text::read(&index_path)?)
        .and_then(|mut index| {
            serde_json::from_value(index.remove("weight_map").unwrap_or_default())
        });
    let weight_map: BTreeMap<String, String> = parsed.map_err(|error| {
        let reason = format!("{error}; `weight_map` must have the file of each tensor");
        CommonError::parse("JSON", &index_path)(reason)
    })?;
    let key = format!("weight_map of {index}");
    let names: BTreeSet<&String> = weight_map.values().collect();
    let mut paths = Vec::with_capacity(names.len());
    for name in names {
        let path = file_in(dir, name, &key)?;
        if !path.is_file() {
            return Err(Error::MissingShard {
                path,
                index: index.to_owned(),
                tensors: weight_map.values().filter(|file| *file == name).count(),
            });
        }
        paths.push(path);
    }
    Ok(Some(WeightFiles { paths, weight_map }))
}
