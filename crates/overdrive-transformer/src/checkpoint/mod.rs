//! Hugging Face folders: reading and writing.

mod packed;
mod problems;
mod progress;
mod read;
mod shards;
mod write;

pub use problems::{CheckpointProblems, Misshapen};
pub use progress::LoadProgress;
pub use read::LoadOptions;
pub use write::SaveOptions;

pub(crate) use read::{read, read_generation_config};
pub(crate) use write::write;

/// The only weight file of a folder.
const SINGLE: &str = "model.safetensors";
/// Which shard holds which tensor.
const INDEX: &str = "model.safetensors.index.json";
