//! Runs packages of `torch.export` and AOTInductor (`.pt2`) from Rust.
//!
//! `torch.export` and AOTInductor compile a PyTorch model ahead of time into a package of native code and weights.
//! [`CompiledModel`] loads one through libtorch and runs it from any number of threads, with neither Python nor a
//! compiler at run time. The script `python/compile_package.py` of this crate compiles a Hugging Face folder, such as
//! `CausalLm::save_pretrained` and the trainer write:
//!
//! ```text
//! python3 compile_package.py --model runs/tiny/model --output tiny.pt2 --models logits,prefill,decode
//! ```
//!
//! * [`PackageInfo`] reads and verifies a package and lists its models, without loading their code;
//! * [`CompiledModel::run`] and [`run_named`](CompiledModel::run_named) run inference; inputs are checked against the
//!   dtypes, shapes and bounds of dynamic sizes that the code was compiled for;
//! * [`CompiledModel::replace_constants`] replaces weights between two runs, without recompiling;
//! * [`CompiledDecoder`] prefills and decodes over overdrive-kv-cache's `StaticCache`.
//!
//! ```
//! use overdrive_packages::{CompiledModel, Error, LoadOptions};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let file = std::env::temp_dir().join(format!("overdrive-doc-{}.pt2", std::process::id()));
//! # std::fs::write(&file, b"half a package")?;
//! match CompiledModel::load(&file, &LoadOptions::for_model("logits")) {
//!     Ok(model) => println!("{:?} -> {:?}", model.input_names(), model.output_names()),
//!     Err(Error::Damaged { problem, .. }) => println!("copy it again: {problem}"),
//!     Err(other) => return Err(other.into()),
//! }
//! # std::fs::remove_file(file)?;
//! # Ok(())
//! # }
//! ```
//!
//! Source: [AOTInductor](https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html).
#![deny(missing_docs)]
#![forbid(unsafe_code)]

mod archive;
mod compatibility;
mod constants;
mod decoder;
mod error;
mod manifest;
mod model;
mod semaphore;
mod tree_spec;

pub use archive::{ModelInfo, PackageInfo};
pub use constants::ReplaceOptions;
pub use decoder::CompiledDecoder;
pub use error::{Error, Result};
pub use manifest::{Manifest, Size, TensorSpec};
pub use model::{CompiledModel, LoadOptions};
pub use overdrive_sys::compiled::Constant;
