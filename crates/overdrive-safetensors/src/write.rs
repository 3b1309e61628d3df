use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::path::Path;

use safetensors::Dtype;
use serde_json::{Map, Value, json};
use tch::{Device, Tensor};

use crate::kinds::dtype_of;
use crate::{Error, Result};
use overdrive_core::{Error as CommonError, files};

/// The header key that the format reserves for the metadata.
const METADATA: &str = "__metadata__";

/// The size of the host buffer through which tensors are written, in bytes: large enough to make the overhead of
/// device copies and system calls negligible.
const CHUNK_BYTES: usize = 16 << 20;

/// Writes `tensors` and `metadata` (`__metadata__` of the header) into one safetensors file.
///
/// The tensors may be on any device, have any strides and require gradients. They are copied to the host in
/// chunks of 16 MiB; a tensor that is not contiguous is made contiguous first, one at a time. Tensors are
/// ordered by element size, largest first, and then by name: every tensor is aligned in the file, and equal
/// input gives equal bytes.
///
/// The file is written under a temporary name in the same folder, flushed to disk and renamed: a reader
/// finds the old file or the new one, never a partial one, and an error leaves nothing behind.
///
/// # Errors
/// [`Error::Common`] if the file cannot be written, [`Error::UnwritableKind`], [`Error::UnwritableTensor`] and
/// [`Error::BadName`] for tensors that the format does not support, and errors of libtorch. An existing file at `path` is then unchanged.
pub fn write(
    path: impl AsRef<Path>,
    tensors: &[(String, Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let path = path.as_ref();
    let entries = file_order(tensors)?;
    let header = header(&entries, metadata)?;
    let mut unfinished = files::unfinished(path)?;
    let file = unfinished.as_file_mut();
    let mut put = |bytes: &[u8]| {
        file.write_all(bytes)
            .map_err(CommonError::io("write", path))
    };
    put(&(header.len() as u64).to_le_bytes())?;
    put(&header)?;
    let mut buffer = Vec::new();
    for (_, tensor, _) in &entries {
        write_elements(tensor, &mut buffer, file, path)?;
    }
    Ok(files::commit(unfinished, path)?)
}

/// Returns the tensors with their dtypes, in the order of the file.
fn file_order(tensors: &[(String, Tensor)]) -> Result<Vec<(&str, &Tensor, Dtype)>> {
    let mut names = BTreeSet::new();
    let mut entries = tensors
        .iter()
        .map(|(name, tensor)| {
            let refuse = |reason| {
                let name = name.clone();
                Err(Error::BadName { name, reason })
            };
            if name == METADATA {
                return refuse("the format reserves this name");
            }
            if !names.insert(name) {
                return refuse("another tensor of the file has this name");
            }
            let unwritable = |problem| {
                let name = name.clone();
                Err(Error::UnwritableTensor { name, problem })
            };
            if !tensor.defined() {
                return unwritable(
                    "undefined, as the gradient of a parameter without one; leave it out",
                );
            }
            if tensor.is_sparse() {
                return unwritable("sparse; convert it with `to_dense` first");
            }
            let kind = tensor.f_kind()?;
            let dtype = dtype_of(kind).ok_or_else(|| Error::UnwritableKind {
                name: name.clone(),
                kind,
            })?;
            Ok((name.as_str(), tensor, dtype))
        })
        .collect::<Result<Vec<_>>>()?;
    // Larger elements first: each tensor then starts at a multiple of its own element size without padding,
    // which the format does not allow.
    entries.sort_by(|a, b| b.2.bitsize().cmp(&a.2.bitsize()).then(a.0.cmp(b.0)));
    Ok(entries)
}

/// Returns the header as JSON, padded with spaces so that the tensors begin at a multiple of 8 bytes.
fn header(
    entries: &[(&str, &Tensor, Dtype)],
    metadata: &BTreeMap<String, String>,
) -> Result<Vec<u8>> {
    let mut map = Map::new();
    if !metadata.is_empty() {
        map.insert(METADATA.to_owned(), json!(metadata));
    }
    let mut end = 0;
    for (name, tensor, dtype) in entries {
        let start = end;
        end += tensor.numel() * dtype.bitsize() / 8;
        let entry = json!({
            "dtype": dtype,
            "shape": tensor.size(),
            "data_offsets": [start, end],
        });
        map.insert((*name).to_owned(), entry);
    }
    let mut bytes = Value::Object(map).to_string().into_bytes();
    bytes.resize(bytes.len().next_multiple_of(8), b' ');
    Ok(bytes)
}

/// Writes the elements of a tensor, one chunk at a time.
fn write_elements(
    tensor: &Tensor,
    buffer: &mut Vec<u8>,
    file: &mut File,
    path: &Path,
) -> Result<()> {
    let size = tensor.f_kind()?.elt_size_in_bytes();
    let flat = tensor.f_detach()?.f_contiguous()?.f_view([-1])?;
    let (elements, step) = (tensor.numel(), CHUNK_BYTES / size);
    for start in (0..elements).step_by(step) {
        let count = step.min(elements - start);
        let chunk = flat
            .f_narrow(0, start as i64, count as i64)?
            .f_to_device(Device::Cpu)?;
        buffer.resize(count * size, 0);
        chunk.f_copy_data_u8(buffer, count)?;
        file.write_all(buffer)
            .map_err(CommonError::io("write", path))?;
    }
    Ok(())
}
