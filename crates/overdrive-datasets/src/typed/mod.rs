//! Datasets of one kind of thing, decoded when it is asked for.

mod image_caption;

pub use image_caption::{ImageCaption, ImageCaptionDataset, ImageOptions, ImageResize};
