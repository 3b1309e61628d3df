//! Optimizer states in safetensors files.

use std::collections::BTreeMap;
use std::path::Path;

use overdrive_core::Error as Common;
use overdrive_safetensors::MappedFile;
use tch::{Device, Kind, Tensor};

use crate::{Error, Result, StateDict};

/// The key of the metadata in the file's header. Its value is JSON.
const METADATA: &str = "overdrive_optimizer";

/// The dtypes of the tensors of a state. Other dtypes are not written, so a file that has one is not ours.
const KINDS: [Kind; 6] = [
    Kind::Float,
    Kind::Double,
    Kind::Half,
    Kind::BFloat16,
    Kind::Uint8,
    Kind::Int64,
];

impl StateDict {
    /// Writes the state into one safetensors file, with the metadata in its header.
    ///
    /// The file is written under another name in the same folder, flushed to the disk and renamed, so a
    /// reader finds the old state or the new one, and never an incomplete one. Tensors are copied chunk
    /// by chunk.
    ///
    /// # Errors
    /// [`Error::Common`] if the file cannot be written (the file at `path` is unchanged then),
    /// [`Error::StateMismatch`] for a tensor of a dtype that no optimizer state has.
    pub fn save(&self, path: impl AsRef<Path>) -> Result<()> {
        let path = path.as_ref();
        // `load` rejects other dtypes, so they must not be written.
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
            .map_err(|error| file_error(path, error))
    }

    /// Reads a state that [`save`](Self::save) wrote, onto the CPU. Loading it into an optimizer copies
    /// it to the devices of the parameters.
    ///
    /// # Errors
    /// [`Error::Common`] if the file cannot be read, is damaged, or does not contain an optimizer state.
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let file = MappedFile::open(path).map_err(|error| file_error(path, error))?;
        let metadata = file.metadata().get(METADATA).ok_or_else(|| {
            not_a_state(
                path,
                "its header has no `overdrive_optimizer`; pass a file that save_state wrote",
            )
        })?;
        let metadata = serde_json::from_str(metadata).map_err(|error| not_a_state(path, error))?;
        let mut tensors = BTreeMap::new();
        for stored in file.tensors() {
            if !stored.kind().is_some_and(|kind| KINDS.contains(&kind)) {
                let (name, format) = (stored.name(), stored.format());
                return Err(not_a_state(path, format!("tensor `{name}` is {format}")));
            }
            let tensor = stored
                .copy_to_tensor(None, Device::Cpu)
                .map_err(|error| file_error(path, error))?;
            tensors.insert(stored.name().to_owned(), tensor);
        }
        Ok(StateDict { tensors, metadata })
    }
}

fn not_a_state(path: &Path, reason: impl Into<Box<dyn std::error::Error + Send + Sync>>) -> Error {
    Common::parse("optimizer state", path)(reason).into()
}

fn file_error(path: &Path, error: overdrive_safetensors::Error) -> Error {
    match error {
        overdrive_safetensors::Error::Common(error) => error.into(),
        overdrive_safetensors::Error::Tch(error) => error.into(),
        // The message of a bad file already names the path.
        overdrive_safetensors::Error::BadFile { reason, .. } => {
            Common::parse("safetensors", path)(reason).into()
        }
        other => Common::parse("safetensors", path)(other).into(),
    }
}
