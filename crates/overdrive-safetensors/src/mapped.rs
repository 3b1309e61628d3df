//! safetensors files mapped into memory.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use overdrive_sys::cuda::on_device;
use overdrive_sys::transfer::copy_bytes;
use safetensors::tensor::{Metadata, TensorInfo};
use safetensors::{Dtype, SafeTensors};
use tch::{Device, Kind, Tensor};

use crate::kinds::{dtype_of, kind_of};
use crate::{Error, Result};
use overdrive_core::Error as CommonError;
use overdrive_core::files::FileMap;

/// The beginning of a Git LFS pointer file, which `git clone` without LFS leaves in place of a large file.
const GIT_LFS_POINTER: &[u8] = b"version https://git-lfs";

/// A safetensors file mapped into memory; the operating system reads its pages on first access.
///
/// The file must not change while it is mapped ([`FileMap`]).
/// Replacing the file, as [`write`](crate::write()) does, is harmless: the map keeps the old one.
#[derive(Debug)]
pub struct MappedFile {
    path: PathBuf,
    map: FileMap,
    header: Metadata,
    metadata: BTreeMap<String, String>,
    /// The offset of the tensors' data in the file, in bytes.
    start: usize,
}

impl MappedFile {
    /// Maps the file and checks that its header is valid and covers the file exactly; no tensor is read yet.
    ///
    /// # Errors
    /// [`Error::Common`] if the file cannot be opened or mapped, [`Error::BadFile`] if it is truncated, damaged
    /// or in another format.
    pub fn open(path: impl AsRef<Path>) -> Result<MappedFile> {
        let path = path.as_ref();
        let map = FileMap::open(path)?;
        let (length, header) =
            SafeTensors::read_metadata(&map).map_err(|error| Error::BadFile {
                path: path.to_path_buf(),
                reason: match map.starts_with(GIT_LFS_POINTER) {
                    true => "it is a Git LFS pointer and not the file itself".to_owned(),
                    false => error.to_string(),
                },
            })?;
        // The header's own check compares the product of the dimensions with the file, so that a dimension of 0 hides
        // the size of the others.
        for (name, info) in header.tensors() {
            if info.shape.iter().any(|&n| i64::try_from(n).is_err()) {
                return Err(Error::BadFile {
                    path: path.to_path_buf(),
                    reason: format!("`{name}` has the impossible shape {:?}", info.shape),
                });
            }
        }
        let metadata = header.metadata().iter().flatten();
        Ok(MappedFile {
            path: path.to_path_buf(),
            metadata: metadata.map(|(k, v)| (k.clone(), v.clone())).collect(),
            map,
            header,
            // The header is preceded by its length as a u64.
            start: size_of::<u64>() + length,
        })
    }

    /// Returns the path of the file, as it was given.
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the metadata of the header (`__metadata__`), from names to string values.
    pub fn metadata(&self) -> &BTreeMap<String, String> {
        &self.metadata
    }

    /// Returns all tensors, in the order of their data in the file.
    pub fn tensors(&self) -> Vec<StoredTensor<'_>> {
        let names = self.header.offset_keys().into_iter();
        names
            .filter_map(|name| Some(self.stored(self.header.info(&name)?, name)))
            .collect()
    }

    /// Returns the tensor `name`.
    ///
    /// # Errors
    /// [`Error::NoTensor`] if the file has no tensor of this name.
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
            // `open` has checked that every dimension fits.
            shape: info.shape.iter().map(|&n| n as i64).collect(),
            data: &self.map[self.start + from..self.start + to],
        }
    }
}

/// A tensor in a [`MappedFile`], or in a mapped file of another format; its elements have not been read yet.
#[derive(Debug, Clone)]
pub struct StoredTensor<'a> {
    name: String,
    dtype: Dtype,
    shape: Vec<i64>,
    data: &'a [u8],
}

impl<'a> StoredTensor<'a> {
    /// Returns a tensor over `data`, its contiguous, little-endian elements, for readers of other formats.
    ///
    /// # Errors
    /// [`Error::UnwritableKind`] for a kind that safetensors files do not support, [`Error::Common`] if `data` does not
    /// have the size of `shape`.
    pub fn new(name: &str, kind: Kind, shape: &[i64], data: &'a [u8]) -> Result<StoredTensor<'a>> {
        let dtype = dtype_of(kind).ok_or_else(|| Error::UnwritableKind {
            name: name.to_owned(),
            kind,
        })?;
        let bytes = shape
            .iter()
            .try_fold(kind.elt_size_in_bytes(), |bytes, &n| {
                bytes.checked_mul(usize::try_from(n).ok()?)
            });
        if bytes != Some(data.len()) {
            let expected = format!("that of {} bytes", data.len());
            return Err(CommonError::shape(name.to_owned(), shape, expected).into());
        }
        Ok(StoredTensor {
            name: name.to_owned(),
            dtype,
            shape: shape.to_vec(),
            data,
        })
    }

    /// Returns the name of the tensor.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Returns the shape of the tensor.
    pub fn shape(&self) -> &[i64] {
        &self.shape
    }

    /// Returns the kind of the elements in the file; `None` if tch does not support their dtype.
    pub fn kind(&self) -> Option<Kind> {
        kind_of(self.dtype)
    }

    /// Returns the name of the elements' dtype in the file: `F32`, `BF16`, `I64`, …
    pub fn format(&self) -> String {
        self.dtype.to_string()
    }

    /// Returns the elements' bytes, little-endian as in the file and with no guaranteed alignment.
    pub fn data(&self) -> &'a [u8] {
        self.data
    }

    /// Returns the slices along the first dimension, each under the name that `name` gives to its index. A tensor without
    /// elements or dimensions has none.
    ///
    /// ```
    /// use overdrive_safetensors::StoredTensor;
    /// use tch::Kind;
    ///
    /// let data = [1, 2, 3, 4, 5, 6];
    /// let stack = StoredTensor::new("experts", Kind::Uint8, &[2, 3], &data)?;
    /// let each = stack.unstacked(|index| format!("experts.{index}"));
    /// assert_eq!((each[1].name(), each[1].shape(), each[1].data()), ("experts.1", &[3][..], &data[3..]));
    /// # Ok::<(), overdrive_safetensors::Error>(())
    /// ```
    pub fn unstacked(&self, name: impl Fn(usize) -> String) -> Vec<StoredTensor<'a>> {
        let count = self.shape.first().map_or(0, |&count| count.unsigned_abs());
        let count = usize::try_from(count).unwrap_or(0);
        let Some(bytes) = self
            .data
            .len()
            .checked_div(count)
            .filter(|&bytes| bytes > 0)
        else {
            return Vec::new();
        };
        let slices = self.data.chunks_exact(bytes).take(count).enumerate();
        slices
            .map(|(index, data)| StoredTensor {
                name: name(index),
                dtype: self.dtype,
                shape: self.shape[1..].to_vec(),
                data,
            })
            .collect()
    }

    /// Returns a new tensor with the elements, of `kind` (`None`: as in the file) on `device`. It takes one
    /// pass over the bytes, without an intermediate copy if `device` is the CPU.
    ///
    /// # Errors
    /// [`Error::UnreadableFormat`] for a dtype without a kind, and errors of libtorch.
    pub fn copy_to_tensor(&self, kind: Option<Kind>, device: Device) -> Result<Tensor> {
        let kind = kind.unwrap_or(self.readable_kind()?);
        let target = Tensor::f_empty(&self.shape, (kind, device));
        let target = on_device(device, target.map_err(Error::from))?;
        self.copy_into(&target)?;
        Ok(target)
    }

    /// Returns `true` if both tensors have the same shape, and the same bytes after conversion to the dtype of `other`.
    /// Reads both.
    ///
    /// # Errors
    /// An error of libtorch if memory runs out; tensors of different dtypes are both copied.
    pub fn has_same_values(&self, other: &StoredTensor<'_>) -> Result<bool> {
        if self.shape() != other.shape() {
            return Ok(false);
        }
        if self.format() == other.format() {
            return Ok(self.data() == other.data());
        }
        let (Some(_), Some(kind)) = (self.kind(), other.kind()) else {
            return Ok(false);
        };
        let own = self.copy_to_tensor(Some(kind), Device::Cpu)?;
        let other = other.copy_to_tensor(Some(kind), Device::Cpu)?;
        Ok(own.f_equal(&other)?)
    }

    /// Copies the elements into `target`, which must have the same shape and may have any kind, device and
    /// strides. Gradients are not tracked.
    ///
    /// # Errors
    /// [`Error::Common`] for another shape, [`Error::UnreadableFormat`], and errors of libtorch.
    pub fn copy_into(&self, target: &Tensor) -> Result<()> {
        let from = self.readable_kind()?;
        // The detached tensor shares the memory: writing to a parameter must not be recorded by autograd.
        let mut target = target.f_detach()?;
        if target.size() != self.shape {
            let expected = format!("{:?}, the shape of the stored tensor", self.shape);
            return Err(CommonError::shape(self.name.clone(), target.size(), expected).into());
        }
        if self.data.is_empty() {
            return Ok(());
        }
        if from == Kind::Bool {
            // A damaged file may hold bools other than 0 and 1, which libtorch must not read.
            let bytes = Tensor::f_from_data_size(self.data, &self.shape, Kind::Uint8)?;
            target.f_copy_(&bytes.f_ne(0)?)?;
            return Ok(());
        }
        if self.data.as_ptr().align_offset(from.elt_size_in_bytes()) != 0 {
            // Some writers do not pad the header. libtorch needs aligned elements, so they are copied to an aligned
            // buffer.
            target.f_copy_(&Tensor::f_from_data_size(self.data, &self.shape, from)?)?;
            return Ok(());
        }
        // Dispatch modes would see a tensor over the mapped bytes, and might keep it for longer than the map.
        Ok(copy_bytes(self.data, from, &target)?)
    }

    fn readable_kind(&self) -> Result<Kind> {
        self.kind().ok_or_else(|| Error::UnreadableFormat {
            name: self.name.clone(),
            format: self.format(),
        })
    }
}
