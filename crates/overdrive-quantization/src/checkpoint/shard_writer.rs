//! A writer of safetensors shards whose tensors arrive one by one, so that the header is known last.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{self, Seek, Write};
use std::path::{Path, PathBuf};

use overdrive_core::{Error as CoreError, files};
use overdrive_safetensors::dtype_name;
use serde_json::{Map, Value, json};
use tch::{Device, Tensor};

use super::source::{INDEX, bad};
use crate::Result;

/// The element sizes in bytes. The largest come first in a file, so that every tensor is aligned.
const SIZES: [usize; 4] = [8, 4, 2, 1];

/// A writer of shards. Tensors go to a temporary file for their element size as they arrive; a full shard is
/// concatenated from these files. The memory is that of one tensor.
#[derive(Debug)]
pub(super) struct ShardWriter {
    dir: PathBuf,
    max_shard_bytes: u64,
    /// The temporary file of each element size.
    files: [File; SIZES.len()],
    entries: [Vec<Entry>; SIZES.len()],
    filled: u64,
    /// The names of the tensors of each finished shard.
    shards: Vec<Vec<String>>,
    total: u64,
}

#[derive(Debug)]
struct Entry {
    name: String,
    dtype: String,
    shape: Vec<i64>,
    bytes: u64,
}

impl ShardWriter {
    pub(super) fn new(dir: &Path, max_shard_bytes: u64) -> Result<ShardWriter> {
        // Files without a name disappear when they are closed, also after a crash.
        let file = || tempfile::tempfile_in(dir).map_err(CoreError::io("create a file in", dir));
        Ok(ShardWriter {
            files: [file()?, file()?, file()?, file()?],
            dir: dir.to_path_buf(),
            max_shard_bytes,
            entries: Default::default(),
            filled: 0,
            shards: Vec::new(),
            total: 0,
        })
    }

    /// Writes tensors that belong to one weight, to the same shard. Returns their number of bytes.
    pub(super) fn add(&mut self, tensors: &[(String, Tensor)]) -> Result<u64> {
        let size = |(_, tensor): &(String, Tensor)| {
            (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64
        };
        let bytes: u64 = tensors.iter().map(size).sum();
        if self.filled > 0 && self.filled + bytes > self.max_shard_bytes {
            self.close_shard()?;
        }
        for (name, tensor) in tensors {
            let kind = tensor.f_kind()?;
            let size_index = SIZES
                .iter()
                .position(|&size| size == kind.elt_size_in_bytes());
            let (dtype, size_index) = dtype_name(kind).zip(size_index).ok_or_else(|| {
                overdrive_safetensors::Error::UnwritableKind {
                    name: name.clone(),
                    kind,
                }
            })?;
            let tensor = tensor
                .f_detach()?
                .f_to_device(Device::Cpu)?
                .f_contiguous()?;
            // Copied as bytes: a borrow of the elements would need a case for each dtype.
            let mut buffer = vec![0u8; tensor.numel() * tensor.kind().elt_size_in_bytes()];
            if !buffer.is_empty() {
                tensor
                    .f_view([-1])?
                    .f_copy_data_u8(&mut buffer, tensor.numel())?;
            }
            self.files[size_index]
                .write_all(&buffer)
                .map_err(CoreError::io("write", &self.dir))?;
            self.entries[size_index].push(Entry {
                name: name.clone(),
                dtype,
                shape: tensor.size(),
                bytes: buffer.len() as u64,
            });
        }
        self.filled += bytes;
        self.total += bytes;
        Ok(bytes)
    }

    /// Writes the shard of the tensors since the last one.
    fn close_shard(&mut self) -> Result<()> {
        let path = self.dir.join(temporary_name(self.shards.len()));
        let mut names = Vec::new();
        let mut header = Map::new();
        // transformers refuses a file without it.
        header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
        let mut end = 0;
        for entry in self.entries.iter_mut().flat_map(std::mem::take) {
            let start = end;
            end += entry.bytes;
            let value = json!({
                "dtype": entry.dtype, "shape": entry.shape, "data_offsets": [start, end],
            });
            if header.insert(entry.name.clone(), value).is_some() {
                let reason = format!("two of its tensors would have the name `{}`", entry.name);
                return Err(bad(&self.dir, &reason));
            }
            names.push(entry.name);
        }
        let mut header = Value::Object(header).to_string().into_bytes();
        // The format pads the header with spaces, so that the data is aligned.
        header.resize(header.len().next_multiple_of(8), b' ');
        let mut write = || -> io::Result<()> {
            let mut file = File::create(&path)?;
            file.write_all(&(header.len() as u64).to_le_bytes())?;
            file.write_all(&header)?;
            for part in &mut self.files {
                part.rewind()?;
                // Between two files std copies inside the kernel where it can.
                io::copy(part, &mut file)?;
                part.rewind()?;
                part.set_len(0)?;
            }
            // A shard that is renamed must be on the disk.
            file.sync_all()
        };
        write().map_err(CoreError::io("write", &path))?;
        self.shards.push(names);
        self.filled = 0;
        Ok(())
    }

    /// Renames the shards, and writes their index if there are several. Returns the number of bytes of all
    /// weight files.
    pub(super) fn finish(mut self) -> Result<u64> {
        if self.filled > 0 || self.shards.is_empty() {
            self.close_shard()?;
        }
        let count = self.shards.len();
        let mut weight_map = BTreeMap::new();
        let mut bytes = 0;
        for (index, names) in self.shards.iter().enumerate() {
            let name = match count {
                1 => "model.safetensors".to_owned(),
                _ => format!("model-{:05}-of-{count:05}.safetensors", index + 1),
            };
            let (from, to) = (self.dir.join(temporary_name(index)), self.dir.join(&name));
            fs::rename(&from, &to).map_err(CoreError::io("rename", &from))?;
            bytes += fs::metadata(&to).map_err(CoreError::io("read", &to))?.len();
            weight_map.extend(names.iter().map(|tensor| (tensor.clone(), name.clone())));
        }
        if count > 1 {
            let index = json!({"metadata": {"total_size": self.total}, "weight_map": weight_map});
            write_json(&self.dir.join(INDEX), &index)?;
        }
        Ok(bytes)
    }
}

fn temporary_name(index: usize) -> String {
    format!("shard-{index}.tmp")
}

pub(super) fn write_json(path: &Path, value: &Value) -> Result<()> {
    let mut text = format!("{value:#}").into_bytes();
    text.push(b'\n');
    Ok(files::write(path, &text)?)
}
