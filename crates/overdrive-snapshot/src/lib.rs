//! Snapshots of training runs that survive killed processes and full disks.
//!
//! A snapshot is a folder of safetensors and JSON files, such as `checkpoint-120`, that is written atomically:
//! the files are written to a folder with a temporary name, flushed to disk and listed with lengths and SHA-256
//! checksums in `manifest.json`; then the folder is renamed. [`SnapshotManager`]
//!
//! * writes everything that a [`RunState`] registers while training continues:
//!   [`save_state`](SnapshotManager::save_state) copies the tensors and returns;
//! * keeps the newest snapshots and the best one ([`SnapshotOptions`]);
//! * finds the [`latest`](SnapshotManager::latest) complete snapshot by its checksums: damaged and incomplete
//!   ones are skipped with a warning;
//! * moves the snapshots of a branch that the run abandons by resuming from an earlier one to the folder
//!   `abandoned-<n>`, and deletes only snapshots whose names it has given, not `checkpoint-10-keep`;
//! * writes one folder from many ranks, which agree on the snapshot to resume from ([`Ranks`]).
//!
//! A full disk or a folder that cannot be written does not end a run:
//! [`outcomes`](SnapshotManager::outcomes) returns the error, and the last good snapshot is unchanged.
//!
//! ```
//! use overdrive_optim::{AdamW, AdamWConfig, Optimizer, decay_groups};
//! use overdrive_snapshot::{RunState, SnapshotManager, SnapshotOptions};
//! use tch::{Device, Kind, Tensor};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! # let dir = tempfile::tempdir()?;
//! # let folder = dir.path().join("run");
//! let weight = Tensor::ones([2, 3], (Kind::Float, Device::Cpu)).set_requires_grad(true);
//! let named = || vec![("weight".to_owned(), weight.shallow_clone())];
//! let mut optimizer = AdamW::new(decay_groups(named(), 0.1), AdamWConfig::default())?;
//!
//! let options = SnapshotOptions { total_limit: Some(2), ..Default::default() };
//! let mut snapshots = SnapshotManager::open(&folder, options)?;
//! for step in 1..=3 {
//!     (&weight * 2.0).sum(Kind::Float).backward();
//!     optimizer.step()?;
//!     let state = RunState::new().tensors("model", named()).register("optimizer", &mut optimizer);
//!     snapshots.save_state(step, None, state)?;
//! }
//! for outcome in snapshots.wait()? {
//!     outcome.result?;
//! }
//!
//! let latest = snapshots.latest()?.expect("three were written");
//! assert_eq!(latest.step(), 3);
//! let state = RunState::new().tensors("model", named()).register("optimizer", &mut optimizer);
//! snapshots.load_state(&latest, state)?;
//! # Ok(())
//! # }
//! ```
//!
//! Related: transformers' `Trainer` checkpoints, whose names are used where they exist; PyTorch's
//! `torch.distributed.checkpoint`, which also writes in the background and by rank.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod contents;
mod error;
mod folder;
mod folder_lock;
mod manager;
mod manifest;
mod options;
mod ranks;
mod rotation;
mod run_state;
mod save_job;
mod snapshot;
mod staging;
mod writer;

pub use contents::{Contents, Scope};
pub use error::{Error, Result};
pub use folder_lock::FolderLock;
pub use manager::SnapshotManager;
pub use options::{Best, SnapshotOptions};
pub use ranks::{Ranks, SingleProcess};
pub use run_state::RunState;
pub use snapshot::Snapshot;
pub use writer::{SaveOutcome, SaveReport};
