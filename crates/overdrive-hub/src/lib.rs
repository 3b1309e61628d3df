//! Models by name: files of the [Hugging Face hub](https://huggingface.co), downloaded once into the cache that
//! Python's `huggingface_hub` uses, and found there again.
//!
//! [`model_path`] takes the value of a `--model` option and returns a path on this machine: the value itself if it is
//! an existing file or folder, else the path of the downloaded files. Everything that loads a model takes such a path.
//!
//! ```no_run
//! use overdrive_hub::{HubOptions, model_path};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let folder = model_path("HuggingFaceTB/SmolLM2-135M-Instruct@main", &HubOptions::from_env()?)?;
//! println!("{}", folder.join("model.safetensors").display());
//! # Ok(())
//! # }
//! ```
//!
//! | name | result |
//! |---|---|
//! | `org/name`, or `name` for a few old models | the folder of the snapshot |
//! | `org/name@REVISION` | the snapshot of a branch, a tag or a commit |
//! | `org/name:Q4_K_M` | the GGUF file of this quantization, as in llama.cpp |
//! | `org/name/file.gguf` | this file; for a split model, the first file |
//!
//! [`dataset_paths`] does the same for the files of a dataset: `org/name`, `org/name/CONFIG`, `org/name:SPLIT`.
//!
//! Only the files that a model needs are downloaded: configurations, tokenizer and chat templates, and the weights in
//! one format, preferably safetensors. A download is verified against the length and the checksum that the hub states,
//! resumed after an interruption, and renamed when it is complete; processes that need the same file wait for each
//! other.
//!
//! The layout of the cache: <https://huggingface.co/docs/huggingface_hub/guides/manage-cache>.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod cache;
mod client;
mod dataset;
mod dataset_files;
mod download;
mod error;
mod hash;
mod locate;
mod name;
mod options;
mod progress;
mod resolve;
mod select;

pub use dataset::{data_paths, dataset_paths};
pub use error::{Error, Result};
pub use options::HubOptions;
pub use progress::DownloadProgress;
pub use resolve::{adapter_path, model_path, name_of_snapshot, tokenizer_path};
