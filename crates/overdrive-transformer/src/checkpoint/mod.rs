//! Hugging Face folders: reading and writing.

mod contents;
mod multimodal;
mod packed_experts;
mod problems;
mod progress;
mod quantized;
mod read;
mod shards;
mod unused_tensors;
mod write;

pub use problems::{CheckpointProblems, Misshapen};
pub use progress::LoadProgress;
pub use read::LoadOptions;
pub use write::SaveOptions;

pub(crate) use contents::{CheckpointConfig, Contents};
pub(crate) use read::{read, read_generation_config};
pub(crate) use write::write;

/// The name of the weight file of a folder with one.
const SINGLE: &str = "model.safetensors";
/// The name of the index of shards.
const INDEX: &str = "model.safetensors.index.json";
/// The corresponding names in folders in PyTorch's own format.
const SINGLE_PICKLE: &str = "pytorch_model.bin";
const INDEX_PICKLE: &str = "pytorch_model.bin.index.json";
