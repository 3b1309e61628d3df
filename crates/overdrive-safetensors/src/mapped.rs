//! Weight files mapped into memory. The only unsafe code of the crate.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensors};
use tch::{Device, Kind, Tensor};

use crate::kinds::kind_of;
use crate::{Error, Result};

/// How a file begins that `git clone` has left in place of a large one.
const LFS: &[u8] = b"version https://git-lfs";

/// A safetensors file in memory, read by the system as its pages are touched.
///
/// The file must not be cut short while it is mapped: touching the lost pages would end the process.
/// Replacing it by another file ([`write`](crate::write()) does that) is no harm, the map keeps the old one.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    map: Mmap,
    header: Metadata,
    metadata: BTreeMap<String, String>,
    /// Where the tensors begin.
    start: usize,
}

impl MappedFile {
    /// Maps the file and checks that its header is sound and covers it exactly; no tensor is read yet.
    ///
    /// # Errors
    /// [`Error::Io`] when the file cannot be opened or mapped, [`Error::BadFile`] when it is cut short,
    /// damaged, or of another format.
    pub fn open(path: impl AsRef<Path>) -> Result<MappedFile> {
        let path = path.as_ref();
        let file = File::open(path).map_err(Error::io("read", path))?;
        // SAFETY: the map is read-only and private. If another process cuts the file short while it
        // is mapped, touching the lost pages ends this process with SIGBUS; that is the known limit of
        // mapping a file, and the same in safetensors' own Python and Rust loaders.
        let map = unsafe { Mmap::map(&file) }.map_err(Error::io("map", path))?;
        let (length, header) =
            SafeTensors::read_metadata(&map).map_err(|error| Error::BadFile {
                path: path.to_path_buf(),
                reason: match map.starts_with(LFS) {
                    true => "it is a Git LFS pointer and not the file itself".to_owned(),
                    false => error.to_string(),
                },
            })?;
        let metadata = header.metadata().iter().flatten();
        Ok(MappedFile {
            path: path.to_path_buf(),
            metadata: metadata.map(|(k, v)| (k.clone(), v.clone())).collect(),
            map,
            header,
            start: size_of::<u64>() + length,
        })
    }

    /// The file's path, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// The text entries of the header.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Every tensor, in the order in which they lie in the file.
    pub fn tensors(&self) -> Vec<StoredTensor<'_>> {
        let names = self.header.offset_keys().into_iter();
        names
            .filter_map(|name| Some(self.stored(self.header.info(&name)?, name)))
            .collect()
    }

    /// The tensor `name`.
    ///
    /// # Errors
    /// [`Error::NoTensor`] where there is none of this name.
    pub fn tensor(&self, name: &str) -> Result<StoredTensor<'_>> {
        let info = self.header.info(name).ok_or_else(|| Error::NoTensor {
            path: self.path.clone(),
            name: name.to_owned(),
        })?;
        Ok(self.stored(info, name.to_owned()))
    }

    fn stored(&self, info: &TensorInfo, name: String) -> StoredTensor<'_> {
        let (from, to) = info.data_offsets;
        StoredTensor {
            name,
            dtype: info.dtype,
            // A length that does not fit i64 fits no file either: the check of the header bounded it.
            shape: info.shape.iter().map(|&n| n as i64).collect(),
            data: &self.map[self.start + from..self.start + to],
        }
    }
}

/// A tensor in a [`MappedFile`], whose elements have not been read yet.
#[derive(Debug, Clone)]
pub struct StoredTensor<'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<i64>,
    data: &'a [u8],
}

impl<'a> StoredTensor<'a> {
    /// Its name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its shape.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// The kind of its elements in the file, where tch has one.
    pub fn kind(&self) -> Option<Kind> {
        kind_of(self.dtype)
    }

    /// The name of the format of its elements: `F32`, `BF16`, `I64`, …
    pub fn format(&self) -> String {
        self.dtype.to_string()
    }

    /// Its elements in the file's format, not aligned to anything.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// A new tensor with its elements, of `kind` (`None`: as in the file) on `device`: one pass over
    /// the bytes, without a copy in between where `device` is the CPU.
    ///
    /// # Errors
    /// [`Error::UnreadableFormat`] for a format without a kind, and errors of libtorch.
    pub fn copy_to_tensor(&self, kind: Option<Kind>, device: Device) -> Result<Tensor> {
        let kind = kind.unwrap_or(self.readable()?);
        let target = Tensor::f_empty(&self.shape, (kind, device))?;
        self.copy_into(&target)?;
        Ok(target)
    }

    /// Overwrites `target`, which has this shape and any kind, device and strides, with its elements.
    /// Gradients are not tracked.
    ///
    /// # Errors
    /// [`Error::WrongShape`], [`Error::UnreadableFormat`], and errors of libtorch.
    pub fn copy_into(&self, target: &Tensor) -> Result<()> {
        let from = self.readable()?;
        // The same memory without its history: writing to a parameter is no step of a graph.
        let mut target = target.f_detach()?;
        if target.size() != self.shape {
            return Err(Error::WrongShape {
                name: self.name.clone(),
                found: self.shape.clone(),
                expected: target.size(),
            });
        }
        if self.data.is_empty() {
            return Ok(());
        }
        if from == Kind::Bool {
            // A byte that is neither 0 nor 1 is no `bool` that libtorch may read.
            let bytes = Tensor::f_from_data_size(self.data, &self.shape, Kind::Uint8)?;
            target.f_copy_(&bytes.f_ne(0)?)?;
            return Ok(());
        }
        if self.data.as_ptr().align_offset(from.elt_size_in_bytes()) != 0 {
            // A writer that does not pad its header; libtorch wants aligned elements.
            target.f_copy_(&Tensor::f_from_data_size(self.data, &self.shape, from)?)?;
            return Ok(());
        }
        let mut strides = vec![1i64; self.shape.len()];
        for axis in (0..self.shape.len().saturating_sub(1)).rev() {
            strides[axis] = strides[axis + 1] * self.shape[axis + 1];
        }
        let (data, shape) = (self.data.as_ptr(), &self.shape);
        // SAFETY: the pointer is aligned and `data` holds all elements of the contiguous shape, which
        // the check of the header made sure of. The borrowed tensor is only read, and dropped before
        // this function returns, while `data` lives.
        let borrowed = unsafe { Tensor::f_from_blob(data, shape, &strides, from, Device::Cpu) }?;
        target.f_copy_(&borrowed)?;
        Ok(())
    }

    fn readable(&self) -> Result<Kind> {
        self.kind().ok_or_else(|| Error::UnreadableFormat {
            name: self.name.clone(),
            format: self.format(),
        })
    }
}
