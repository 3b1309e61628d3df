//! Datasets of text, images and speech, which are decoded on demand.

#[cfg(feature = "speech")]
mod audio;
#[cfg(feature = "image")]
mod augment;
#[cfg(feature = "image")]
mod image_caption;
#[cfg(feature = "image")]
mod image_file;
#[cfg(feature = "tch")]
mod log_mel;
#[cfg(feature = "speech")]
mod resample;
#[cfg(feature = "speech")]
mod speech;
#[cfg(feature = "tokenizers")]
mod text;
mod vision;

#[cfg(feature = "image")]
pub use augment::ImageAugmentation;
#[cfg(feature = "image")]
pub use image_caption::{ImageCaption, ImageCaptionDataset, ImageOptions, ImageResize};
#[cfg(feature = "tch")]
pub use log_mel::{LogMel, LogMelOptions};
#[cfg(feature = "speech")]
pub use resample::Resampling;
#[cfg(feature = "speech")]
pub use speech::{Speech, SpeechDataset, SpeechOptions};
#[cfg(feature = "tokenizers")]
pub use text::{TextDataset, TextDatasetOptions, TruncationSide};
#[cfg(feature = "image")]
pub use vision::{CaptionedPatches, PatchCaptionDataset};
pub use vision::{ImagePatches, ImageProcessor};
