//! Quantization of whole Hugging Face folders.

mod migrate;
mod options;
mod quantize;
mod report;
mod shard_writer;
mod source;
mod tensor_role;

pub use options::{CheckpointOptions, Filter, Progress};
pub use quantize::{check_checkpoint, quantize_checkpoint};
pub use report::{CheckpointReport, TensorReport};
