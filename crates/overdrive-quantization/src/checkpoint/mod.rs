//! Whole Hugging Face folders.

mod migrate;
mod options;
mod quantize;
mod report;
mod role;
mod source;
mod spool;

pub use options::{CheckpointOptions, Filter, Progress};
pub use quantize::quantize_checkpoint;
pub use report::{CheckpointReport, TensorReport};
