//! Reads weights that `torch.save` wrote, such as `pytorch_model.bin`, as `torch.load(weights_only=True)` does: the
//! file is treated as data, and no code that it names is run.
//!
//! A Python pickle is a program for a small virtual machine and may call any function. [`PickledFile`] runs only the
//! opcodes that tensors need and knows only the functions that rebuild tensors and those of the plain values beside them,
//! which it skips; it refuses a file that names another function, with an error that names it. The tensors are views of the
//! mapped file, checked against its length; those stored transposed or with gaps are copied.
//!
//! Both formats are supported: the zip archives of PyTorch 1.6 and later, and the format of earlier versions. As with
//! safetensors files, the tensors are returned as [`StoredTensor`](overdrive_safetensors::StoredTensor)s.
//!
//! ```no_run
//! // Needs a file written by Python.
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
