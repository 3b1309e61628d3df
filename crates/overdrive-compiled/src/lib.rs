//! Models that were compiled ahead of time, and GPU work that was captured.
//!
//! **Packages.** `torch.export` and AOTInductor turn a PyTorch model into a package (`.pt2`) of native
//! code and weights. [`CompiledModel`] loads one through libtorch and runs it from any number of threads:
//! neither Python nor a compiler at run time. The script `python/compile_package.py` of this crate makes
//! one from a Hugging Face folder, such as `CausalLm::save_pretrained` and the trainer write:
//!
//! ```text
//! python3 compile_package.py --model runs/tiny/model --output tiny.pt2 --models logits,prefill,decode
//! ```
//!
//! * [`PackageInfo`] – what a package holds, read and checked without loading code of it;
//! * [`CompiledModel::run`], [`run_named`](CompiledModel::run_named) – inputs held against what the code
//!   was compiled for, dynamic sizes within their bounds;
//! * [`CompiledModel::replace_constants`] – other weights without a new compilation, between two runs;
//! * [`CompiledDecoder`] – prefill and decode of a package over overdrive-kv-cache's `StaticCache`.
//!
//! **CUDA graphs.** [`CudaGraph`] captures any work on a GPU and replays it with one call;
//! [`DecodeGraph`] does so for a decoding step over a static cache, [`TrainGraph`] for a whole training
//! step with gradient accumulation, clipping and AdamW. On a CPU the same steps run without a graph
//! ([`DecodeStep`], [`TrainStep`]), and a capture is an error that says so. No CUDA header is needed to
//! build this; the feature `cuda` holds its assumptions about libtorch against them.
//!
//! ```
//! use overdrive_compiled::{CompiledModel, Error, LoadOptions};
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
//! Sources: [AOTInductor](https://docs.pytorch.org/docs/stable/torch.compiler_aot_inductor.html),
//! [CUDA graphs in PyTorch](https://docs.pytorch.org/docs/stable/notes/cuda.html#cuda-graphs).
#![deny(missing_docs)]

mod adamw;
mod archive;
mod constants;
mod decode;
mod decoder;
mod error;
mod gate;
mod graph;
mod host;
mod manifest;
mod model;
mod train;
mod tree_spec;

pub use adamw::CapturableAdamW;
pub use archive::{ModelInfo, PackageInfo};
pub use constants::ReplaceOptions;
pub use decode::{DecodeGraph, DecodeStep, static_cache_of};
pub use decoder::CompiledDecoder;
pub use error::{Error, Result};
pub use graph::{CaptureOptions, CudaGraph, WorkError};
pub use manifest::{Manifest, Size, TensorSpec};
pub use model::{CompiledModel, LoadOptions};
pub use overdrive_sys::compiled::Constant;
pub use train::{StepOutput, TrainGraph, TrainStep, TrainStepConfig, WeightedLoss};
