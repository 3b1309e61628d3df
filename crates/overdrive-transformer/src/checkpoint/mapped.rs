//! Weight files mapped into memory. The only unsafe code of the crate.
#![allow(unsafe_code)]

use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::SafeTensors;
use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// A safetensors file in memory, read by the system as its pages are touched.
#[derive(Debug)]
pub(super) struct MappedFile {
    path: PathBuf,
    map: Mmap,
}

impl MappedFile {
    pub(super) fn open(path: &Path) -> Result<MappedFile> {
        let file = File::open(path).map_err(Error::io("read", path))?;
        // SAFETY: the map is read-only and private. If another process cuts the file short while it
        // is mapped, touching the lost pages ends this process with SIGBUS; that is the known limit of
        // mapping a file, and the same in safetensors' own Python and Rust loaders.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io("map", path))?;
        Ok(MappedFile {
            path: path.to_path_buf(),
            map,
        })
    }

    /// The file's tensors, after a check that the header is sound and covers the file exactly.
    pub(super) fn tensors(&self) -> Result<SafeTensors<'_>> {
        SafeTensors::deserialize(&self.map).map_err(|error| Error::BadWeightFile {
            path: self.path.clone(),
            reason: error.to_string(),
        })
    }
}

/// Copies `data`, elements of `from`, into a new tensor of `shape`, converted on the way to `kind` and
/// `device`: one pass over the bytes, without a copy in between.
pub(super) fn copy_to_tensor(
    data: &[u8],
    shape: &[i64],
    from: Kind,
    kind: Kind,
    device: Device,
) -> Result<Tensor> {
    let size = from.elt_size_in_bytes();
    let elements: i64 = shape.iter().product();
    debug_assert_eq!(
        data.len() as i64,
        elements * size as i64,
        "safetensors checked it"
    );
    let mut target = Tensor::f_empty(shape, (kind, device))?;
    if data.is_empty() {
        return Ok(target);
    }
    if data.as_ptr().align_offset(size) != 0 {
        // A writer that does not pad its header; libtorch wants aligned elements.
        target.f_copy_(&Tensor::f_from_data_size(data, shape, from)?)?;
        return Ok(target);
    }
    let mut strides = vec![1i64; shape.len()];
    for axis in (0..shape.len().saturating_sub(1)).rev() {
        strides[axis] = strides[axis + 1] * shape[axis + 1];
    }
    // SAFETY: the pointer is aligned and `data` holds all elements of the contiguous shape. The
    // borrowed tensor is only read, and dropped before this function returns, while `data` lives.
    let borrowed =
        unsafe { Tensor::f_from_blob(data.as_ptr(), shape, &strides, from, Device::Cpu) }?;
    target.f_copy_(&borrowed)?;
    Ok(target)
}
