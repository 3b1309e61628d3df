//! The flag for the images of a prompt.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use overdrive::generation::{ImagePatches, ModelFiles};

/// The images of a prompt, for a model that sees images.
#[derive(Debug, Clone, Args)]
pub struct ImageFlags {
    /// Image of the prompt or of the first message, a PNG, JPEG or WebP file; may be given several times (needs the
    /// feature `image`)
    #[arg(long = "image", value_name = "FILE")]
    pub images: Vec<PathBuf>,
}

impl ImageFlags {
    /// Reads the images, with the processor of the model's folder.
    pub fn load(&self, files: &ModelFiles) -> Result<Vec<ImagePatches>> {
        if self.images.is_empty() {
            return Ok(Vec::new());
        }
        read(&self.images, files)
    }
}

/// Returns the number of patches along each side of every image.
pub fn grids(images: &[ImagePatches]) -> Vec<[i64; 2]> {
    let sides = images
        .iter()
        .map(|image| image.grid.map(|side| side as i64));
    sides.collect()
}

#[cfg(feature = "image")]
fn read(paths: &[PathBuf], files: &ModelFiles) -> Result<Vec<ImagePatches>> {
    use anyhow::Context;
    let processor = files.image_processor()?;
    let processor = processor
        .context("the model's folder has no preprocessor_config.json, so it sees no images")?;
    let image = |path: &PathBuf| {
        let bytes =
            std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
        processor
            .decode(&bytes)
            .with_context(|| path.display().to_string())
    };
    paths.iter().map(image).collect()
}

#[cfg(not(feature = "image"))]
fn read(_: &[PathBuf], _: &ModelFiles) -> Result<Vec<ImagePatches>> {
    anyhow::bail!("--image needs the feature `image`; run the example with --features image")
}
