use std::borrow::Cow;
use std::collections::{BTreeSet, HashMap};
use std::fs::{self, File};
use std::path::Path;

use safetensors::{Dtype, View};
use serde_json::{Map, Value};
use tch::{Device, Kind, Tensor};

use super::shards::{IndexMetadata, ShardIndex, shard_name};
use super::{INDEX, SINGLE};
use crate::{CausalLm, Error, Result};

/// How a checkpoint is written.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct SaveOptions {
    /// A file holds at most so many bytes of tensors (a larger tensor has its own); default 50 GB, as
    /// in transformers 5.
    pub max_shard_bytes: u64,
}

impl Default for SaveOptions {
    fn default() -> Self {
        SaveOptions {
            max_shard_bytes: 50_000_000_000,
        }
    }
}

impl SaveOptions {
    /// Shards of at most `bytes`.
    pub fn with_max_shard_bytes(mut self, bytes: u64) -> Self {
        self.max_shard_bytes = bytes;
        self
    }
}

/// Writes weights, then `generation_config.json`, then `config.json`.
pub(crate) fn write(dir: &Path, model: &CausalLm, options: &SaveOptions) -> Result<()> {
    fs::create_dir_all(dir).map_err(Error::io("create", dir))?;
    let tensors = model
        .named_parameters()
        .into_iter()
        .map(|(name, tensor)| Ok((name, HostTensor::new(&tensor)?)))
        .collect::<Result<Vec<_>>>()?;
    let written = write_weights(dir, tensors, options)?;
    remove_stale(dir, &written)?;

    let generation = model.generation_config().cloned();
    let generation = generation.unwrap_or_else(|| model.config().generation_defaults());
    write_json(dir, "generation_config.json", &Value::Object(generation))?;
    let mut config: Map<String, Value> = model.config().to_json();
    config.insert("torch_dtype".to_owned(), kind_name(model.kind()).into());
    write_json(dir, "config.json", &Value::Object(config))
}

/// Writes one file or shards with their index; returns the names.
fn write_weights(
    dir: &Path,
    tensors: Vec<(String, HostTensor)>,
    options: &SaveOptions,
) -> Result<BTreeSet<String>> {
    let total_size = tensors.iter().map(|(_, tensor)| tensor.bytes()).sum();
    let mut groups: Vec<Vec<(String, HostTensor)>> = vec![Vec::new()];
    let mut filled = 0;
    for (name, tensor) in tensors {
        let bytes = tensor.bytes();
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
    let mut index = ShardIndex {
        metadata: IndexMetadata { total_size },
        weight_map: [].into(),
    };
    let mut written = BTreeSet::new();
    for (number, group) in groups.into_iter().enumerate() {
        let file = if count == 1 {
            SINGLE.to_owned()
        } else {
            shard_name(number + 1, count)
        };
        for (name, _) in &group {
            index.weight_map.insert(name.clone(), file.clone());
        }
        atomically(dir, &file, |path| {
            // The mark by which transformers knows whose layout the tensors have.
            let metadata = HashMap::from([("format".to_owned(), "pt".to_owned())]);
            safetensors::serialize_to_file(group, Some(metadata), path).map_err(|error| Error::Io {
                action: "write",
                path: path.to_path_buf(),
                source: std::io::Error::other(error),
            })
        })?;
        written.insert(file);
    }
    if count > 1 {
        let value = serde_json::to_value(&index).map_err(|source| Error::Json {
            path: dir.join(INDEX),
            source,
        })?;
        write_json(dir, INDEX, &value)?;
        written.insert(INDEX.to_owned());
    }
    Ok(written)
}

/// Removes the weight files of an older save, which a reader would prefer or find too many.
fn remove_stale(dir: &Path, written: &BTreeSet<String>) -> Result<()> {
    for entry in fs::read_dir(dir).map_err(Error::io("list", dir))? {
        let entry = entry.map_err(Error::io("list", dir))?;
        let Ok(name) = entry.file_name().into_string() else {
            continue;
        };
        let shard = name.starts_with("model-") && name.ends_with(".safetensors");
        if (shard || name == SINGLE || name == INDEX) && !written.contains(&name) {
            fs::remove_file(entry.path()).map_err(Error::io("remove", &entry.path()))?;
        }
    }
    Ok(())
}

fn write_json(dir: &Path, name: &str, value: &Value) -> Result<()> {
    atomically(dir, name, |path| {
        let mut text = serde_json::to_string_pretty(value).map_err(|source| Error::Json {
            path: path.to_path_buf(),
            source,
        })?;
        text.push('\n');
        fs::write(path, text).map_err(Error::io("write", path))
    })
}

/// Lets `write` fill a temporary file in `dir`, flushes it to the disk and gives it its name.
fn atomically(dir: &Path, name: &str, write: impl FnOnce(&Path) -> Result<()>) -> Result<()> {
    let temporary = dir.join(format!(".{name}.{}.tmp", std::process::id()));
    let path = dir.join(name);
    let result = write(&temporary).and_then(|()| {
        let flushed = File::open(&temporary).and_then(|file| file.sync_all());
        flushed.map_err(Error::io("flush", &temporary))?;
        fs::rename(&temporary, &path).map_err(Error::io("rename", &temporary))
    });
    if result.is_err() {
        // The error to tell is the one that came first; the file may not even exist.
        let _ = fs::remove_file(&temporary);
    }
    result
}

/// A tensor whose bytes are copied only while they are written.
#[derive(Debug)]
struct HostTensor {
    /// Detached, contiguous, on the CPU.
    tensor: Tensor,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl HostTensor {
    fn new(tensor: &Tensor) -> Result<HostTensor> {
        let dtype = match tensor.kind() {
            Kind::Double => Dtype::F64,
            Kind::Float => Dtype::F32,
            Kind::Half => Dtype::F16,
            Kind::BFloat16 => Dtype::BF16,
            other => {
                return Err(Error::Unsupported {
                    key: "torch_dtype".to_owned(),
                    found: format!("{other:?}"),
                    supported: "Double, Float, Half, BFloat16".to_owned(),
                });
            }
        };
        let tensor = tensor
            .f_detach()?
            .f_to_device(Device::Cpu)?
            .f_contiguous()?;
        let shape = tensor.size().iter().map(|&n| n as usize).collect();
        Ok(HostTensor {
            tensor,
            dtype,
            shape,
        })
    }

    fn bytes(&self) -> u64 {
        (self.tensor.numel() * self.tensor.kind().elt_size_in_bytes()) as u64
    }
}

impl View for HostTensor {
    fn dtype(&self) -> Dtype {
        self.dtype
    }

    fn shape(&self) -> &[usize] {
        &self.shape
    }

    fn data(&self) -> Cow<'_, [u8]> {
        let mut bytes = vec![0; self.data_len()];
        self.tensor
            .f_copy_data_u8(&mut bytes, self.tensor.numel())
            .expect("the tensor is contiguous on the CPU, and the buffer has its size");
        bytes.into()
    }

    fn data_len(&self) -> usize {
        self.tensor.numel() * self.tensor.kind().elt_size_in_bytes()
    }
}

/// The name that transformers gives a kind.
fn kind_name(kind: Kind) -> &'static str {
    match kind {
        Kind::Half => "float16",
        Kind::BFloat16 => "bfloat16",
        Kind::Double => "float64",
        _ => "float32",
    }
}
