//! Weights that `torch.save` wrote, such as `pytorch_model.bin`, read as `torch.load(weights_only=True)` reads them:
//! the file is data, and nothing that it asks for is run.
//!
//! Python's pickle is a program for a small machine, which may call any function. [`PickledFile`] runs the opcodes that
//! tensors need, knows the functions that rebuild tensors, and refuses a file that names any other, by its name. The
//! tensors are views of the mapped file, checked against its length; those that are stored with gaps or transposed are
//! copied.
//!
//! Both formats are read: the zip archives that PyTorch writes since 1.6, and the older ones. The values come as
//! [`StoredTensor`](overdrive_safetensors::StoredTensor)s, as those of safetensors files do.
//!
//! ```no_run
//! // Needs a file, which only Python can make.
//! use overdrive_pickle::PickledFile;
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let file = PickledFile::open("pytorch_model.bin")?;
//! for stored in file.tensors() {
//!     println!("{} {:?}", stored.name(), stored.shape());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! Sources: Python's `pickletools`, PyTorch's `torch/serialization.py` and `torch/_weights_only_unpickler.py`.
#![deny(missing_docs)]

mod error;
mod file;
mod globals;
mod machine;
mod reader;
mod storages;
mod tensor;

pub use error::{Error, Result};
pub use file::PickledFile;
