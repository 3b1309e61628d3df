//! Writes [`tch`] tensors to safetensors files atomically, and reads them through a memory map directly into the
//! requested dtype and device.
//!
//! tch's own `write_safetensors` and `read_safetensors` hold a second copy of all tensors in memory, support
//! only tensors on the CPU, and leave a partial file when a write fails. In this crate,
//!
//! * [`write()`] streams tensors with any device and strides in chunks of 16 MiB into a temporary file in the
//!   same folder, flushes it to disk and renames it: a reader finds the old file or the new one, and an
//!   error leaves nothing behind;
//! * [`MappedFile`] checks the header against the file and reads only the requested tensors: one pass over the
//!   bytes converts them to a dtype and device, into a new tensor ([`StoredTensor::copy_to_tensor`]) or an
//!   existing one ([`StoredTensor::copy_into`]).
//!
//! ```
//! use overdrive_safetensors::{MappedFile, write};
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let path = std::env::temp_dir().join(format!("overdrive-doc-{}.safetensors", std::process::id()));
//! let weight = Tensor::randn([3, 4], (Kind::Float, Device::Cpu));
//! let metadata = [("format".to_owned(), "pt".to_owned())].into();
//! write(&path, &[("weight".to_owned(), weight.tr())], &metadata)?;
//!
//! let file = MappedFile::open(&path)?;
//! assert_eq!(file.metadata()["format"], "pt");
//! let stored = file.tensor("weight")?;
//! assert_eq!(stored.shape(), [4, 3]);
//! let half = stored.copy_to_tensor(Some(Kind::Half), Device::Cpu)?;
//! assert_eq!(half, weight.tr().to_kind(Kind::Half));
//! # std::fs::remove_file(path)?;
//! # Ok(())
//! # }
//! ```
//!
//! The format: <https://huggingface.co/docs/safetensors>.
#![deny(missing_docs)]

mod error;
mod folder;
mod kinds;
mod mapped;
mod write;

pub use error::{Error, Result};
pub use folder::{WeightFiles, file_in, weight_files};
pub use kinds::dtype_name;
pub use mapped::{MappedFile, StoredTensor};
pub use write::write;
