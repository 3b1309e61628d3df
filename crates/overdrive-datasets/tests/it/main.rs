//! Files, indexes, tokens, batches and loaders. Tests that change the environment, start processes or measure
//! the memory of the process are targets of their own.
#![allow(
    clippy::unwrap_used,
    reason = "tests and their helpers fail by panicking"
)]

#[path = "../common/mod.rs"]
mod common;

mod bpe;
mod build_tokens;
mod changed_files;
mod compressed_files;
mod corpus;
mod data_loader;
mod dataset_tokens;
#[cfg(feature = "tch")]
mod device_loader;
mod example_cache;
#[cfg(feature = "image")]
mod image_captions;
#[cfg(feature = "image")]
mod image_patches;
mod index_files;
mod instruction;
#[cfg(feature = "tch")]
mod instruction_batches;
#[cfg(feature = "tch")]
mod log_mel;
mod mixture;
mod packing;
mod record_files;
mod sampling;
#[cfg(feature = "speech")]
mod speech;
#[cfg(feature = "parquet")]
mod tables;
mod text_dataset;
mod transforms;
mod web_dataset;
mod windows;
