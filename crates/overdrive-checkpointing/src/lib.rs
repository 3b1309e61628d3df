//! Activation checkpointing.
#![forbid(unsafe_code)]
#![deny(missing_docs)]

mod ambient;
mod checkpoint;
mod determinism;
mod early_stop;
mod error;
mod frame;
mod options;
mod policy;
mod shared;

pub use checkpoint::{RegionResult, Scope, checkpoint, scope};
pub use error::{Error, Result};
pub use options::{CheckpointOptions, DeterminismCheck};
pub use policy::{PolicyCall, PolicyFn, SavePolicy};
pub use shared::Shared;
