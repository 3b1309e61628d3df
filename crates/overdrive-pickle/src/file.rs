//! Files of `torch.save` mapped into memory.

use std::collections::BTreeMap;
use std::ops::Range;
use std::path::{Path, PathBuf};

use overdrive_core::files::FileMap;
use overdrive_safetensors::StoredTensor;
use tch::Kind;

use crate::error::{Checked, Fault, bad};
use crate::machine::Value;
use crate::storages::{Contents, contents};
use crate::tensor::TensorRef;
use crate::{Error, Result};

/// The largest number of other entries that are reported by name.
const MAX_OTHERS: usize = 8;

/// A weight file written by `torch.save`, mapped into memory.
///
/// The file must not change while it is mapped ([`FileMap`]).
#[derive(Debug)]
pub struct PickledFile {
    path: PathBuf,
    map: FileMap,
    tensors: Vec<Named>,
    others: Vec<String>,
}

#[derive(Debug)]
struct Named {
    name: String,
    kind: Kind,
    shape: Vec<i64>,
    data: Data,
}

#[derive(Debug)]
enum Data {
    /// A part of the map.
    Mapped(Range<usize>),
    /// The elements of a tensor that is stored with gaps or transposed.
    Copied(Vec<u8>),
}

impl PickledFile {
    /// Maps the file and reads the names, shapes and offsets of its tensors. The file must hold a dictionary of
    /// tensors, as `torch.save(model.state_dict(), path)` writes it. Other values of the dictionary are skipped, as are
    /// sparse and quantized tensors, those of dtypes that
    /// [`StoredTensor`](overdrive_safetensors::StoredTensor) does not have, and those with a conjugate or negative bit;
    /// [`PickledFile::others`] names them. Tensors that share a storage share its part of the map.
    ///
    /// # Errors
    /// [`Error::Common`] if the file cannot be opened or mapped, [`Error::Refused`] if it names a function or class that
    /// weights do not need, [`Error::BadFile`] if it is truncated, damaged or in another format, or if a tensor exceeds
    /// its storage.
    pub fn open(path: impl AsRef<Path>) -> Result<PickledFile> {
        PickledFile::open_dictionary(path.as_ref(), None)
    }

    /// Maps a file that holds several dictionaries, such as a checkpoint of training, and reads the tensors of the one under
    /// `key`: `"model"` of `torch.save({"step": step, "model": model.state_dict()}, path)`.
    ///
    /// # Errors
    /// As [`PickledFile::open`], and [`Error::BadFile`] if the file has no dictionary under this key.
    pub fn open_entry(path: impl AsRef<Path>, key: &str) -> Result<PickledFile> {
        PickledFile::open_dictionary(path.as_ref(), Some(key))
    }

    fn open_dictionary(path: &Path, key: Option<&str>) -> Result<PickledFile> {
        let map = FileMap::open(path)?;
        let entries = contents(&map).and_then(|contents| named(&contents, key, &map));
        let path = path.to_owned();
        match entries {
            Ok((tensors, others)) => Ok(PickledFile {
                path,
                map,
                tensors,
                others,
            }),
            Err(Fault::Bad(reason)) => Err(Error::BadFile { path, reason }),
            Err(Fault::Refused(global)) => Err(Error::Refused { path, global }),
        }
    }

    /// Returns the path of the file, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns all tensors, in the order of their names.
    pub fn tensors(&self) -> Vec<StoredTensor<'_>> {
        let stored = self.tensors.iter().filter_map(|named| self.stored(named));
        stored.collect()
    }

    /// Returns the names of at most 8 entries that were skipped, in the order of the file.
    pub fn others(&self) -> &[String] {
        &self.others
    }

    fn stored<'a>(&'a self, named: &'a Named) -> Option<StoredTensor<'a>> {
        let data = match &named.data {
            Data::Mapped(range) => &self.map[range.clone()],
            Data::Copied(bytes) => bytes,
        };
        // `named` has checked that kind, shape and data match.
        StoredTensor::new(&named.name, named.kind, &named.shape, data).ok()
    }
}

/// Returns the tensors of the dictionary in a file, or of the one under `entry` in it, and the names of at most 8 other
/// entries.
fn named(
    contents: &Contents,
    entry: Option<&str>,
    bytes: &[u8],
) -> Checked<(Vec<Named>, Vec<String>)> {
    let Value::Dict(items) = contents.values.get(contents.values.result) else {
        return bad("it holds no dictionary; save `model.state_dict()`");
    };
    let mut items = items;
    if let Some(entry) = entry {
        let is_entry = |key| matches!(contents.values.get(key), Value::Text(name) if name == entry);
        let found = items.iter().rfind(|(key, _)| is_entry(*key));
        let Some(Value::Dict(inner)) = found.map(|&(_, value)| contents.values.get(value)) else {
            return bad(format!("it has no dictionary under the key `{entry}`"));
        };
        items = inner;
    }
    let mut tensors = BTreeMap::new();
    let mut others = Vec::new();
    for &(key, value) in items {
        match (contents.values.get(key), contents.values.get(value)) {
            (Value::Text(name), Value::Tensor(tensor)) => drop(tensors.insert(name, tensor)),
            _ if others.len() == MAX_OTHERS => {}
            (Value::Text(name), _) => others.push(name.clone()),
            _ => others.push("an entry whose name is not a string".to_owned()),
        }
    }
    if tensors.is_empty() && !others.is_empty() {
        let keys = others.join(", ");
        return bad(format!(
            "it has no named tensors, only {keys}; if one of them is the model's dictionary, open it by its key \
             (`PickledFile::open_entry`), or save `model.state_dict()` alone"
        ));
    }
    // The bytes left for copies of tensors with gaps: a hostile file could name one storage many times.
    let mut copies = bytes.len();
    let named = tensors.into_iter().map(|(name, tensor)| {
        let data = data(contents, tensor, bytes, &mut copies);
        Ok(Named {
            name: name.clone(),
            kind: tensor.kind,
            // `TensorRef` has checked that they fit.
            shape: tensor.shape.iter().map(|&n| n as i64).collect(),
            data: data.map_err(|fault| match fault {
                Fault::Bad(reason) => Fault::Bad(format!("`{name}`: {reason}")),
                refused => refused,
            })?,
        })
    });
    Ok((named.collect::<Checked<_>>()?, others))
}

fn data(
    contents: &Contents,
    tensor: &TensorRef,
    bytes: &[u8],
    copies: &mut usize,
) -> Checked<Data> {
    if tensor.elements() == 0 {
        return Ok(Data::Mapped(0..0));
    }
    let storage = &tensor.storage;
    let Some(range) = contents.storages.get(&storage.key) else {
        return bad(format!("the storage {} is not in the file", storage.key));
    };
    if storage.bytes().is_none_or(|length| length > range.len()) {
        let (elements, length) = (storage.elements, range.len());
        return bad(format!(
            "a storage of {elements} elements has {length} bytes"
        ));
    }
    let size = tensor.kind.elt_size_in_bytes();
    if tensor.is_contiguous() {
        let start = range.start + tensor.offset * size;
        return Ok(Data::Mapped(start..start + tensor.elements() * size));
    }
    let copied = tensor
        .elements()
        .checked_mul(size)
        .and_then(|length| copies.checked_sub(length));
    let Some(left) = copied else {
        return bad("tensors with gaps are larger than the file");
    };
    *copies = left;
    Ok(Data::Copied(tensor.gather(&bytes[range.clone()])))
}
