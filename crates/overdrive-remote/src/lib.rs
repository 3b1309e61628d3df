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
//! | format | how it is read |
//! |---|---|
//! | JSON Lines, text, CSV, tar (WebDataset) | one pass over the file finds the records; the index is cached under the version of the file |
//! | JSON arrays, text with one document a file | the same, with a temporary copy during the pass |
//! | Parquet | the footer, then the column chunks of the rows |
//! | any of these but Parquet as gzip or zstd | unpacked once into `overdrive/unpacked` of the user's cache folder, which has no limit |
//! | Arrow, files of tokens, images, speech | not from a server: the error says to download them |
//!
//! **Requests.** A file is read in blocks of 1 MiB. Neighbouring blocks are one request of up to 8 MiB, up to 16 requests of
//! a file run at once, a reader that goes through a file has the next blocks requested ahead, and a
//! [`DataLoader`](overdrive_datasets::DataLoader) announces the records of each batch before it reads the first. Blocks are
//! cached on disk within [`RemoteOptions::cache_bytes`]; those used longest ago are removed. Up to 256 MiB of blocks are in
//! memory, over all files of a process. The pass that builds an index fills the cache, so that a file smaller than the cache is downloaded once. Of a larger file, a shuffled epoch requests a
//! block for nearly every record: make [`RemoteOptions::block_bytes`] smaller, or the cache larger.
//!
//! **Failures.** Dropped connections, truncated answers and the statuses 408, 429 and 5xx are retried with growing pauses. Each
//! request has the condition that the file is still the one that was opened (`If-Match`), and each answer is compared with its
//! ETag (or time) and length: a changed file is the error [`FileChanged`](overdrive_datasets::Error::FileChanged) with its name.
//! A server that ignores ranges, or has neither ETags nor times, is an error with the way out.
//!
//! **Secrets.** User, password and query of a URL are no part of a name, so that no error, log or key of a cache contains them;
//! credentials come from the environment variables of each store ([`RemoteOptions::from_env`]) and are not logged.
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
