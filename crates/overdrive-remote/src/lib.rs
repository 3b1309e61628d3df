//! Training data where it lies: files at `https://`, `s3://` and `gs://`, whose records are read by range.
//!
//! [`data_paths`] takes the values of a `--data` option, opens those that are URLs, and returns names that every dataset of
//! `overdrive-datasets` takes as paths: records are found by the same index of one byte each, in the same order and with
//! the same bytes as those of a local copy, so that a shuffle over all records and the exact resume of a run are the same
//! too, with any number of workers and processes.
//!
//! ```no_run
//! use overdrive_datasets::prelude::*;
//! use overdrive_datasets::{JsonOptions, JsonRecords};
//! use overdrive_remote::{RemoteOptions, open};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let path = open("https://example.org/train.jsonl", &RemoteOptions::from_env()?)?;
//! let records = JsonRecords::<serde_json::Value>::open([path], &JsonOptions::default())?;
//! let options = DataLoaderOptions { batch_size: 32, shuffle: true, num_workers: 4, ..Default::default() };
//! let mut loader = DataLoader::new(records, options)?;
//! for batch in loader.epoch() {
//!     println!("{} records", batch?.len());
//! }
//! # Ok(())
//! # }
//! ```
//!
//! A file that changes is the error [`FileChanged`](overdrive_datasets::Error::FileChanged) with its name. User,
//! password and query of a URL are no part of a name, so that no error, log or key of a cache contains them; credentials
//! come from the environment variables of each store ([`RemoteOptions::from_env`]) and are not logged.
//!
//! The guide (`docs/src/crates/remote.md`) describes the formats, the requests, the cache and the failures.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod block_cache;
mod data;
mod error;
mod location;
mod object;
mod options;
mod remote_file;
mod runtime;

pub use data::{data_paths, open};
pub use error::{Error, Result};
pub use options::RemoteOptions;
