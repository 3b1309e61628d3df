//! Optimizer states in safetensors files.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use overdrive_safetensors::MappedFile;
use tch::{Device, Kind, Tensor};

use crate::{Error, Result, StateDict};

/// Key of the metadata in the file's header, as JSON.
const METADATA: &str = "overdrive_optimizer";

/// What an optimizer's state consists of.
const KINDS: [Kind; 6] = [
    Kind::Float,
    Kind::Double,
    Kind::Half,
    Kind::BFloat16,
    Kind::Uint8,
    Kind::Int64,
];

impl StateDict {
    /// Writes the state into one safetensors file; the metadata goes into its header.
    ///
    /// The file is written under another name in the same folder, flushed to the disk and renamed: a
    /// reader finds the old state or the new one, never a half of one. The bytes of
    /// tensors are copied a part at a time.
    ///
    /// # Errors
    /// [`Error::StateFile`] if the file cannot be written (the file at `path` is then as it was),
    /// [`Error::StateMismatch`] for a tensor of a kind that an optimizer's state never has.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        for (name, tensor) in &self.tensors {
            if !KINDS.contains(&tensor.kind()) {
                let problem = format!(
                    "tensor `{name}` is {:?}, which cannot be stored",
                    tensor.kind()
                );
                return Err(Error::StateMismatch { problem });
            }
        }
        let tensors = self.tensors.iter();
        let tensors: Vec<(String, Tensor)> = tensors
            .map(|(name, tensor)| (name.clone(), tensor.shallow_clone()))
            .collect();
        let header = BTreeMap::from([(METADATA.to_owned(), self.metadata.to_string())]);
        overdrive_safetensors::write(path, &tensors, &header)
            .map_err(|error| file_error("write", path, error))
    }

    /// Reads what [`save`](Self::save) wrote, onto the CPU; loading it copies to where the parameters
    /// are.
    ///
    /// # Errors
    /// [`Error::StateFile`] if the file cannot be read, is damaged, or holds no optimizer state.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let failed = |error| file_error("read", path, error);
        let damaged = |reason: String| Error::StateFile {
            action: "read",
            path: path.to_path_buf(),
            source: io::Error::new(io::ErrorKind::InvalidData, reason),
        };
        let file = MappedFile::open(path).map_err(failed)?;
        let metadata = file.metadata().get(METADATA).ok_or_else(|| {
            damaged("the file holds no optimizer state (its header has no `overdrive_optimizer`); give one that save_state wrote".into())
        })?;
        let metadata =
            serde_json::from_str(metadata).map_err(|error| damaged(error.to_string()))?;
        let mut tensors = BTreeMap::new();
        for stored in file.tensors() {
            if !stored.kind().is_some_and(|kind| KINDS.contains(&kind)) {
                let (name, format) = (stored.name(), stored.format());
                return Err(damaged(format!("tensor `{name}` is {format}")));
            }
            let tensor = stored.copy_to_tensor(None, Device::Cpu).map_err(failed)?;
            tensors.insert(stored.name().to_owned(), tensor);
        }
        Ok(StateDict { tensors, metadata })
    }
}

fn file_error(action: &'static str, path: &Path, error: overdrive_safetensors::Error) -> Error {
    let source = match error {
        overdrive_safetensors::Error::Torch(error) => return error.into(),
        overdrive_safetensors::Error::Io { source, .. } => source,
        overdrive_safetensors::Error::BadFile { reason, .. } => {
            let reason = format!("it is not a complete safetensors file ({reason})");
            io::Error::new(io::ErrorKind::InvalidData, reason)
        }
        other => io::Error::new(io::ErrorKind::InvalidData, other),
    };
    Error::StateFile {
        action,
        path: path.to_path_buf(),
        source,
    }
}
