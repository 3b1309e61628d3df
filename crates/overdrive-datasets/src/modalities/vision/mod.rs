//! Images as the patches that a vision model reads.

mod bicubic;
#[cfg(feature = "image")]
mod captioned;
mod patches;
mod processor;

#[cfg(feature = "image")]
pub use captioned::{CaptionedPatches, PatchCaptionDataset};
pub use patches::ImagePatches;
pub use processor::ImageProcessor;
