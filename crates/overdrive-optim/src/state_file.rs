//! Optimizer states in safetensors files. The only unsafe code here maps the file to read.
#![allow(unsafe_code)]

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};

use memmap2::Mmap;
use safetensors::{Dtype, SafeTensors, View};
use tch::{Device, Kind, Tensor};

use crate::{Error, Result, StateDict};

/// Key of the metadata in the file's header, as JSON.
const METADATA: &str = "overdrive_optimizer";

impl StateDict {
    /// Writes the state into one safetensors file; the metadata goes into its header.
    ///
    /// The file is written under another name in the same folder, flushed to the disk and renamed: a
    /// reader finds the old state or the new one, never a half of one. The bytes of
    /// tensors are copied one tensor at a time.
    ///
    /// # Errors
    /// [`Error::StateFile`] if the file cannot be written (the file at `path` is then as it was),
    /// [`Error::StateMismatch`] for a tensor of a kind that an optimizer's state never has.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        let tensors: BTreeMap<&String, HostTensor> = self
            .tensors
            .iter()
            .map(|(name, tensor)| Ok((name, HostTensor::new(name, tensor)?)))
            .collect::<Result<_>>()?;
        let header = HashMap::from([(METADATA.to_owned(), self.metadata.to_string())]);
        let mut temporary = path.as_os_str().to_owned();
        temporary.push(format!(".{}.tmp", std::process::id()));
        let temporary = PathBuf::from(temporary);
        let written = safetensors::serialize_to_file(tensors, Some(header), &temporary)
            .map_err(io::Error::other)
            .and_then(|()| File::open(&temporary)?.sync_all())
            .and_then(|()| fs::rename(&temporary, path))
            .and_then(|()| flush_folder(path));
        if written.is_err() {
            // The error to tell is the one that came first; the file may not even exist.
            let _ = fs::remove_file(&temporary);
        }
        written.map_err(|source| file_error("write", path, source))
    }

    /// Reads what [`save`](Self::save) wrote, onto the CPU; loading it copies to where the parameters
    /// are.
    ///
    /// # Errors
    /// [`Error::StateFile`] if the file cannot be read, is damaged, or holds no optimizer state.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = File::open(path).map_err(|source| file_error("read", path, source))?;
        // SAFETY: the map is read-only and private. If another process cuts the file short while it is
        // mapped, touching the lost pages ends this process: the known limit of mapping a file.
        let map = unsafe { Mmap::map(&file) }.map_err(|source| file_error("map", path, source))?;
        let damaged = |reason: String| {
            file_error(
                "read",
                path,
                io::Error::new(io::ErrorKind::InvalidData, reason),
            )
        };
        let (_, header) =
            SafeTensors::read_metadata(&map).map_err(|error| damaged(error.to_string()))?;
        let metadata = header.metadata().as_ref().and_then(|m| m.get(METADATA));
        let metadata = metadata.ok_or_else(|| {
            damaged("the file holds no optimizer state (its header has no `overdrive_optimizer`); give one that save_state wrote".into())
        })?;
        let metadata =
            serde_json::from_str(metadata).map_err(|error| damaged(error.to_string()))?;
        let views = SafeTensors::deserialize(&map).map_err(|error| damaged(error.to_string()))?;
        let mut tensors = BTreeMap::new();
        for (name, view) in views.iter() {
            let kind = kind(view.dtype())
                .ok_or_else(|| damaged(format!("tensor `{name}` is {:?}", view.dtype())))?;
            let shape: Vec<i64> = view.shape().iter().map(|&n| n as i64).collect();
            let tensor = Tensor::f_from_data_size(view.data(), &shape, kind)?;
            tensors.insert(name.to_owned(), tensor);
        }
        Ok(StateDict { tensors, metadata })
    }
}

/// Makes the rename last through a crash of the machine.
fn flush_folder(path: &Path) -> io::Result<()> {
    if !cfg!(unix) {
        return Ok(());
    }
    let folder = path
        .parent()
        .filter(|folder| !folder.as_os_str().is_empty());
    File::open(folder.unwrap_or(Path::new(".")))?.sync_all()
}

fn file_error(action: &'static str, path: &Path, source: io::Error) -> Error {
    Error::StateFile {
        action,
        path: path.to_path_buf(),
        source,
    }
}

const KINDS: [(Kind, Dtype); 6] = [
    (Kind::Float, Dtype::F32),
    (Kind::Double, Dtype::F64),
    (Kind::Half, Dtype::F16),
    (Kind::BFloat16, Dtype::BF16),
    (Kind::Uint8, Dtype::U8),
    (Kind::Int64, Dtype::I64),
];

fn kind(dtype: Dtype) -> Option<Kind> {
    let found = KINDS.iter().find(|(_, d)| *d == dtype);
    found.map(|(kind, _)| *kind)
}

/// A tensor whose bytes are copied only while they are written.
struct HostTensor {
    /// Detached, contiguous, on the CPU.
    tensor: Tensor,
    dtype: Dtype,
    shape: Vec<usize>,
}

impl HostTensor {
    fn new(name: &str, tensor: &Tensor) -> Result<Self> {
        let found = KINDS.iter().find(|(kind, _)| *kind == tensor.kind());
        let (_, dtype) = found.ok_or_else(|| Error::StateMismatch {
            problem: format!(
                "tensor `{name}` is {:?}, which cannot be stored",
                tensor.kind()
            ),
        })?;
        Ok(Self {
            tensor: tensor
                .f_detach()?
                .f_to_device(Device::Cpu)?
                .f_contiguous()?,
            dtype: *dtype,
            shape: tensor.size().iter().map(|&n| n as usize).collect(),
        })
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
