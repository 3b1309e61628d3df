use std::path::PathBuf;

use super::{ImagePatches, ImageProcessor};
use crate::{Dataset, ImageCaptionDataset, Result};

/// An image as patches, and its caption.
#[derive(Debug, Clone, PartialEq)]
pub struct CaptionedPatches {
    /// The image.
    pub image: ImagePatches,
    /// The caption.
    pub caption: String,
    /// The path of the image file.
    pub path: PathBuf,
}

/// The images of an [`ImageCaptionDataset`] as the patches of a vision model, decoded and cut on demand; made by
/// [`ImageCaptionDataset::with_processor`].
#[derive(Debug, Clone)]
pub struct PatchCaptionDataset {
    images: ImageCaptionDataset,
    processor: ImageProcessor,
}

impl ImageCaptionDataset {
    /// Returns the same images and captions as patches for a vision model. The processor determines size and
    /// normalization; the options of this dataset for them are not used.
    pub fn with_processor(self, processor: ImageProcessor) -> PatchCaptionDataset {
        PatchCaptionDataset {
            images: self,
            processor,
        }
    }
}

impl Dataset for PatchCaptionDataset {
    type Item = CaptionedPatches;

    fn len(&self) -> usize {
        self.images.len()
    }

    fn get(&self, index: usize) -> Result<CaptionedPatches> {
        self.images.read(index, |image, caption, path| {
            let image = self.processor.process_rgb(image.into_rgb8());
            let image = image.map_err(|error| format!("the image {}: {error}", path.display()))?;
            Ok(CaptionedPatches {
                image,
                caption,
                path,
            })
        })
    }

    fn prefetch(&self, indices: &[usize]) {
        self.images.prefetch(indices);
    }

    fn check_unchanged(&self) -> Result<()> {
        self.images.check_unchanged()
    }
}
