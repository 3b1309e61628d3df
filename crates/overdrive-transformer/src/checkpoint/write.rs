use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::{fs, io};

use overdrive_core::{Error as Common, files};
use serde_json::{Map, Value, json};
use tch::{Kind, Tensor};

use super::contents::Contents;
use super::quantized::{self, LAYOUT_KEY, Written};
use super::shards::{is_shard_name, shard_name};
use super::{INDEX, SINGLE};
use crate::{Error, Result};

/// The options of writing a checkpoint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SaveOptions {
    /// The largest number of bytes of tensors in one file (a larger tensor gets its own file); default 50 GB, as in
    /// transformers 5.
    pub max_shard_bytes: u64,
}

impl Default for SaveOptions {
    fn default() -> Self {
        SaveOptions {
            max_shard_bytes: 50_000_000_000,
        }
    }
}

/// Writes weights, then `generation_config.json`, then `config.json`: a reader that finds a configuration finds
/// its weights.
pub(crate) fn write(dir: &Path, contents: &Contents<'_>, options: &SaveOptions) -> Result<()> {
    if !matches!(
        contents.kind,
        Kind::Half | Kind::BFloat16 | Kind::Float | Kind::Double
    ) {
        return Err(Error::unsupported(
            "torch_dtype",
            format!("{:?}", contents.kind),
            "Double, Float, Half, BFloat16",
        ));
    }
    fs::create_dir_all(dir).map_err(Common::io("create", dir))?;
    let Written { tensors, layout } = quantized::written(contents)?;
    let written = write_weights(dir, tensors, options)?;
    // Only after the new weights are complete: an old single file is valid until then.
    remove_stale(dir, &written)?;

    if let Some(generation) = &contents.generation {
        let generation = Value::Object(generation.clone());
        write_json(dir, "generation_config.json", &generation)?;
    }
    let mut config: Map<String, Value> = contents.config.to_json();
    // transformers 4 reads `torch_dtype`; 5 accepts it as an older name of `dtype`.
    config.insert("torch_dtype".to_owned(), kind_name(contents.kind).into());
    // The model may have been dequantized, or quantized by another scheme, since it was read.
    config.remove(LAYOUT_KEY);
    if let Some(layout) = layout {
        config.insert(LAYOUT_KEY.to_owned(), layout.to_json()?);
    }
    write_json(dir, "config.json", &Value::Object(config))
}

/// Writes one file, or shards with their index, and returns their names. All are complete before one of them replaces a
/// file of an older save. Old and new shards may have the same names, so there is no index while they are replaced: a
/// folder without it cannot be loaded, while one with the old index would be loaded as a mixture.
fn write_weights(
    dir: &Path,
    tensors: Vec<(String, Tensor)>,
    options: &SaveOptions,
) -> Result<BTreeSet<String>> {
    let bytes = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
    let total_size: u64 = tensors.iter().map(|(_, tensor)| bytes(tensor)).sum();
    let mut groups: Vec<Vec<(String, Tensor)>> = vec![Vec::new()];
    let mut filled = 0;
    for (name, tensor) in tensors {
        let bytes = bytes(&tensor);
        // `filled > 0`: a tensor above the limit gets a file of its own instead of an empty one before it.
        if filled + bytes > options.max_shard_bytes && filled > 0 {
            groups.push(Vec::new());
            filled = 0;
        }
        filled += bytes;
        if let Some(group) = groups.last_mut() {
            group.push((name, tensor));
        }
    }
    let count = groups.len();
    let mut weight_map = BTreeMap::new();
    let mut written = BTreeSet::new();
    let unfinished = files::unfinished_folder(dir.join(SINGLE))?;
    for (number, group) in groups.into_iter().enumerate() {
        let file = if count == 1 {
            SINGLE.to_owned()
        } else {
            shard_name(number + 1, count)
        };
        for (name, _) in &group {
            weight_map.insert(name.clone(), file.clone());
        }
        // transformers refuses a file without this key.
        let metadata = BTreeMap::from([("format".to_owned(), "pt".to_owned())]);
        overdrive_safetensors::write(unfinished.path().join(&file), &group, &metadata)?;
        written.insert(file);
    }
    if count > 1 {
        remove_index(dir)?;
    }
    for file in &written {
        let path = dir.join(file);
        fs::rename(unfinished.path().join(file), &path).map_err(Common::io("write", &path))?;
    }
    files::sync_folder(dir)?;
    if count > 1 {
        let index = json!({"metadata": {"total_size": total_size}, "weight_map": weight_map});
        write_json(dir, INDEX, &index)?;
        written.insert(INDEX.to_owned());
    }
    Ok(written)
}

fn remove_index(dir: &Path) -> Result<()> {
    let path = dir.join(INDEX);
    match fs::remove_file(&path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => {
            Err(Common::io("replace", path)(error).into())
        }
        _ => Ok(files::sync_folder(dir)?),
    }
}

/// Removes the weight files of an older save, which a reader might prefer to the new ones. Other files with weights, such as
/// `model-merged.safetensors`, are the user's.
fn remove_stale(dir: &Path, written: &BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(Common::io("list", dir))? {
        let entry = entry.map_err(Common::io("list", dir))?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let is_ours = is_shard_name(&name) || name == SINGLE || name == INDEX;
        let path = entry.path();
        if is_ours && !written.contains(&name) && path.is_file() {
            fs::remove_file(&path).map_err(Common::io("remove", path))?;
        }
    }
    Ok(())
}

fn write_json(dir: &Path, name: &str, value: &Value) -> Result<()> {
    let path = dir.join(name);
    let mut text = serde_json::to_string_pretty(value).map_err(Common::parse("JSON", &path))?;
    // As transformers ends its JSON files.
    text.push('\n');
    Ok(files::write(path, text.as_bytes())?)
}

/// Returns transformers' name of a dtype.
fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Half => "float16",
        Kind::BFloat16 => "bfloat16",
        Kind::Double => "float64",
        _ => "float32",
    }
}
