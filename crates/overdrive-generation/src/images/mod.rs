//! The images of prompts.

mod padded;
mod prompt;

pub(crate) use padded::PaddedImages;
pub(crate) use prompt::PromptImages;

use overdrive_datasets::ImagePatches;
use overdrive_transformer::{ImageFeatures, VisionConfig};
use tch::Tensor;

use crate::Result;

/// The number of patches that are encoded together, more only for a single image: those of the largest images of
/// published models, whose values are 400 MB in f32.
const MOST_PATCHES: usize = 1 << 16;

/// Returns the grid of each image in patches.
///
/// # Errors
/// An error for an image whose patches are not those of the model.
pub(crate) fn grids_of(images: &[ImagePatches], vision: &VisionConfig) -> Result<Vec<[i64; 2]>> {
    let own = [vision.patch_width(), vision.spatial_merge_size];
    let grid = |image: &ImagePatches| {
        let given = [image.patch_width, image.merge_size].map(|size| size as i64);
        if given != own {
            let found = format!("of patch_width {} and merge_size {}", given[0], given[1]);
            let expected = format!(
                "of patch_width {} and merge_size {}: use the processor of the model",
                own[0], own[1]
            );
            return Err(overdrive_core::Error::option("an image", found, expected).into());
        }
        Ok(grid_of(image))
    };
    images.iter().map(grid).collect()
}

fn grid_of(image: &ImagePatches) -> [i64; 2] {
    image.grid.map(|side| side as i64)
}

/// Computes the image tokens of `images` by `tower`, which takes the patches `(N, W)` and the grids of some of them.
fn encode(
    images: &[ImagePatches],
    tower: impl Fn(&Tensor, &[[i64; 2]]) -> Result<ImageFeatures>,
) -> Result<ImageFeatures> {
    let (mut features, mut rest) = (Vec::new(), images);
    while !rest.is_empty() {
        let mut patches = 0;
        let fits = |image: &&ImagePatches| {
            patches += image.patches();
            patches <= MOST_PATCHES
        };
        let count = rest.iter().take_while(fits).count().max(1);
        let group;
        (group, rest) = rest.split_at(count);
        let grids: Vec<[i64; 2]> = group.iter().map(grid_of).collect();
        features.push(tower(&pixels_of(group)?, &grids)?);
    }
    Ok(ImageFeatures::cat(&features)?)
}

/// Returns the patches of some images as a tensor `(N, W)`.
fn pixels_of(images: &[ImagePatches]) -> Result<Tensor> {
    let rows = images.iter().map(|image| {
        let width = image.patch_width as i64;
        Tensor::f_from_slice(&image.values())?.f_view([-1, width])
    });
    let rows = rows.collect::<std::result::Result<Vec<_>, _>>()?;
    Ok(Tensor::f_cat(&rows, 0)?)
}
