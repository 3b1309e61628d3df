use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::Write;
use std::path::Path;

use safetensors::Dtype;
use serde_json::{Map, Value, json};
use tch::{Device, Tensor};

use crate::kinds::dtype_of;
use crate::replace::replace;
use crate::{Error, Result};

/// The key of the header that no tensor may have.
const METADATA: &str = "__metadata__";

/// How many bytes of a tensor are in the host's memory at once while it is written.
const PART: usize = 16 << 20;

/// Writes `tensors` and the text entries `metadata` into one safetensors file.
///
/// The tensors may be on any device and have any strides, and may require gradients. They are copied to
/// the host in parts of 16 MiB; one that is not contiguous is made so first, one at a time.
/// Elements of the largest formats come first, then names in order: every tensor is aligned in
/// the file, and equal input gives equal bytes.
///
/// The file is written under another name in the same folder, flushed to the disk and renamed: a reader
/// finds the old file or the new one, never a part, and after an error nothing is left behind.
///
/// # Errors
/// [`Error::Io`] when the file cannot be written, [`Error::UnwritableKind`] and [`Error::BadName`] for
/// tensors that the format cannot hold, and errors of libtorch. The file at `path` is then as it was.
pub fn write(
    path: impl AsRef<Path>,
    tensors: &[(String, Tensor)],
    metadata: &BTreeMap<String, String>,
) -> Result<()> {
    let path = path.as_ref();
    let entries = in_order(tensors)?;
    let header = header(&entries, metadata)?;
    replace(path, |file| {
        let mut put = |bytes: &[u8]| file.write_all(bytes).map_err(Error::io("write", path));
        put(&(header.len() as u64).to_le_bytes())?;
        put(&header)?;
        let mut buffer = Vec::new();
        for (_, tensor, _) in &entries {
            put_tensor(tensor, &mut buffer, file, path)?;
        }
        Ok(())
    })
}

/// The tensors with their formats, in the order of the file.
fn in_order(tensors: &[(String, Tensor)]) -> Result<Vec<(&str, &Tensor, Dtype)>> {
    let mut names = BTreeSet::new();
    let mut entries = tensors
        .iter()
        .map(|(name, tensor)| {
            let refuse = |reason| {
                let name = name.clone();
                Err(Error::BadName { name, reason })
            };
            if name == METADATA {
                return refuse("the format keeps this name for itself");
            }
            if !names.insert(name) {
                return refuse("another tensor of the same file has this name");
            }
            let kind = tensor.f_kind()?;
            let dtype = dtype_of(kind).ok_or_else(|| Error::UnwritableKind {
                name: name.clone(),
                kind,
            })?;
            Ok((name.as_str(), tensor, dtype))
        })
        .collect::<Result<Vec<_>>>()?;
    entries.sort_by(|a, b| b.2.bitsize().cmp(&a.2.bitsize()).then(a.0.cmp(b.0)));
    Ok(entries)
}

/// The header in JSON, padded so that the tensors begin at a multiple of 8.
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

/// Writes the elements, a part at a time.
fn put_tensor(tensor: &Tensor, buffer: &mut Vec<u8>, file: &mut File, path: &Path) -> Result<()> {
    let size = tensor.f_kind()?.elt_size_in_bytes();
    let flat = tensor.f_detach()?.f_contiguous()?.f_view([-1])?;
    let (elements, step) = (tensor.numel(), PART / size);
    for start in (0..elements).step_by(step) {
        let count = step.min(elements - start);
        let part = flat
            .f_narrow(0, start as i64, count as i64)?
            .f_to_device(Device::Cpu)?;
        buffer.resize(count * size, 0);
        part.f_copy_data_u8(buffer, count)?;
        file.write_all(buffer).map_err(Error::io("write", path))?;
    }
    Ok(())
}
