//! The files: the graph with its small constants, and the weights in it or beside it.
//!
//! Protobuf stores the length of a message before its contents. All lengths are computed from shapes, before
//! any weight is converted, so the file is written from front to back with one weight in memory at a time.

use std::ffi::OsString;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

use overdrive_core::{Error, files};
use prost::Message;
use prost::encoding::{encode_varint, encoded_len_varint};
use tch::Tensor;

use crate::initializer::{Data, Initializer};
use crate::proto::{GraphProto, ModelProto};
use crate::{ExternalData, Result};

/// The number of bytes below which a tensor stays in the graph: shapes and scalars, which runtimes read when they
/// load the graph.
const SMALL: u64 = 1 << 10;
/// The alignment of tensors in a separate file: a page, so that they can be mapped.
const PAGE: u64 = 4 << 10;
/// The alignment of large tensors: the granularity of mappings on Windows.
const GRANULE: u64 = 64 << 10;
/// The number of bytes from which a tensor counts as large.
const LARGE: u64 = 1 << 20;
/// The limit in bytes for weights in the graph. Protobuf limits a message to 2 GiB; the difference is for the nodes.
const MOST_BYTES: u64 = 2_000_000_000;
/// The number of bytes of a tensor that are copied at a time.
const CHUNK: usize = 16 << 20;

// The tags of protobuf fields: number << 3 | wire type, which is 2 for a length and contents.
const GRAPH_OF_MODEL: u8 = 7 << 3 | 2;
const INITIALIZER_OF_GRAPH: u8 = 5 << 3 | 2;
const RAW_DATA_OF_TENSOR: u8 = 9 << 3 | 2;

/// The sizes of the written files.
#[derive(Debug)]
pub(crate) struct Written {
    pub(crate) bytes: u64,
    /// The file of the weights and its size, if there is one.
    pub(crate) data: Option<(PathBuf, u64)>,
}

/// Writes `model`, whose graph has no initializers, and the initializers.
pub(crate) fn write(
    path: &Path,
    mut model: ModelProto,
    initializers: &[Initializer],
    external: ExternalData,
) -> Result<Written> {
    let total: u64 = initializers.iter().map(Initializer::bytes).sum();
    let separate = external == ExternalData::Always || total >= MOST_BYTES;
    let data_path = with_suffix(path, "_data")?;
    let graph = model.graph.take().unwrap_or_default();
    if !separate {
        let file = files::unfinished(path)?;
        let bytes = fill(file.as_file(), path, |out| {
            put_model(out, path, &model, &graph, initializers, None)
        })?;
        files::commit(file, path)?;
        // Removes the weights of an earlier export, to which no graph refers any more.
        remove_if_there(&data_path)?;
        return Ok(Written { bytes, data: None });
    }
    let name = data_path.file_name().unwrap_or_default();
    let name = name.to_string_lossy();
    let offsets = offsets(initializers);
    // The weights are complete before the graph that refers to them exists.
    let data = files::unfinished(&data_path)?;
    let data_bytes = fill(data.as_file(), &data_path, |out| {
        put_data(out, &data_path, initializers, &offsets)
    })?;
    let file = files::unfinished(path)?;
    let locations = Some((&*name, offsets.as_slice()));
    let bytes = fill(file.as_file(), path, |out| {
        put_model(out, path, &model, &graph, initializers, locations)
    })?;
    // If the machine stops here, an older graph must not be left beside newer weights.
    remove_if_there(path)?;
    files::commit(data, &data_path)?;
    files::commit(file, path)?;
    Ok(Written {
        bytes,
        data: Some((data_path, data_bytes)),
    })
}

fn remove_if_there(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => {
            Err(Error::io("replace", path)(error).into())
        }
        _ => Ok(()),
    }
}

/// Returns the offset of each tensor in the file of weights, or `None` if it stays in the graph.
fn offsets(initializers: &[Initializer]) -> Vec<Option<u64>> {
    let mut end = 0u64;
    let offset = |initializer: &Initializer| {
        let bytes = initializer.bytes();
        if bytes < SMALL {
            return None;
        }
        let start = end.next_multiple_of(if bytes >= LARGE { GRANULE } else { PAGE });
        end = start + bytes;
        Some(start)
    };
    initializers.iter().map(offset).collect()
}

/// Writes the weights at their offsets.
fn put_data(
    out: &mut Counter<'_>,
    path: &Path,
    initializers: &[Initializer],
    offsets: &[Option<u64>],
) -> Result<()> {
    for (initializer, offset) in initializers.iter().zip(offsets) {
        let Some(offset) = offset else {
            continue;
        };
        // The gap is smaller than the alignment, so this writes few zeros.
        let gap = offset.saturating_sub(out.bytes) as usize;
        out.put(path, &vec![0; gap])?;
        put_elements(out, path, initializer)?;
    }
    Ok(())
}

/// Writes the model with its graph and constants; those in another file are written as references.
fn put_model(
    out: &mut Counter<'_>,
    path: &Path,
    model: &ModelProto,
    graph: &GraphProto,
    initializers: &[Initializer],
    locations: Option<(&str, &[Option<u64>])>,
) -> Result<()> {
    let graph = graph.encode_to_vec();
    let mut headers = Vec::new();
    let mut graph_len = graph.len() as u64;
    for (index, initializer) in initializers.iter().enumerate() {
        let location = locations.and_then(|(name, offsets)| Some((name, offsets[index]?)));
        let header = match location {
            Some((name, offset)) => initializer.external(name, offset),
            None => initializer.header(),
        };
        let header = header.encode_to_vec();
        // `raw_data` is written by hand behind the header: encoding it would hold the weight twice.
        let raw = location.is_none().then(|| initializer.bytes());
        let raw_len = raw.map_or(0, |len| 1 + encoded_len_varint(len) as u64 + len);
        let len = header.len() as u64 + raw_len;
        graph_len += 1 + encoded_len_varint(len) as u64 + len;
        headers.push((header, raw, len));
    }
    let field = |out: &mut Counter<'_>, tag: u8, len: u64| {
        let mut bytes = vec![tag];
        encode_varint(len, &mut bytes);
        out.put(path, &bytes)
    };
    out.put(path, &model.encode_to_vec())?;
    field(out, GRAPH_OF_MODEL, graph_len)?;
    out.put(path, &graph)?;
    for ((header, raw, len), initializer) in headers.iter().zip(initializers) {
        field(out, INITIALIZER_OF_GRAPH, *len)?;
        out.put(path, header)?;
        if let Some(raw) = raw {
            field(out, RAW_DATA_OF_TENSOR, *raw)?;
            put_elements(out, path, initializer)?;
        }
    }
    Ok(())
}

/// Writes the elements of a tensor in little-endian order.
fn put_elements(out: &mut Counter<'_>, path: &Path, initializer: &Initializer) -> Result<()> {
    match &initializer.data {
        Data::Bytes(bytes) => out.put(path, bytes),
        Data::Made(make) => put_tensor(out, path, &initializer.make(make)?),
    }
}

/// Writes a contiguous tensor on the CPU, a chunk at a time.
fn put_tensor(out: &mut Counter<'_>, path: &Path, tensor: &Tensor) -> Result<()> {
    let size = tensor.kind().elt_size_in_bytes();
    let flat = tensor.f_view([-1])?;
    let (elements, step) = (tensor.numel(), CHUNK / size);
    let mut buffer = Vec::new();
    for start in (0..elements).step_by(step) {
        let count = step.min(elements - start);
        let chunk = flat.f_narrow(0, start as i64, count as i64)?;
        buffer.resize(count * size, 0);
        chunk.f_copy_data_u8(&mut buffer, count)?;
        out.put(path, &buffer)?;
    }
    Ok(())
}

/// A file that counts the bytes written to it.
struct Counter<'a> {
    file: BufWriter<&'a File>,
    bytes: u64,
}

impl Counter<'_> {
    /// Writes `bytes`. `path` is the final path of the file, for messages.
    fn put(&mut self, path: &Path, bytes: &[u8]) -> Result<()> {
        self.bytes += bytes.len() as u64;
        Ok(self
            .file
            .write_all(bytes)
            .map_err(Error::io("write", path))?)
    }
}

/// Writes the unfinished file for `path` and returns its number of bytes.
fn fill(
    file: &File,
    path: &Path,
    fill: impl FnOnce(&mut Counter<'_>) -> Result<()>,
) -> Result<u64> {
    let mut out = Counter {
        file: BufWriter::new(file),
        bytes: 0,
    };
    fill(&mut out)?;
    // Synced here, so that no error occurs after the old graph is removed.
    let flushed = out.file.flush().and_then(|()| file.sync_all());
    flushed.map_err(Error::io("write", path))?;
    Ok(out.bytes)
}

/// Appends `suffix` to the name of the file `path`.
fn with_suffix(path: &Path, suffix: &str) -> Result<PathBuf> {
    let name = path
        .file_name()
        .ok_or_else(|| Error::option("path", path.display(), "the name of a file"))?;
    let mut name = OsString::from(name);
    name.push(suffix);
    Ok(path.with_file_name(name))
}
