//! The images of prompts.

mod padded;
mod prompt;

pub(crate) use padded::PaddedImages;
pub(crate) use prompt::PromptImages;

use overdrive_datasets::ImagePatches;
use tch::Tensor;

use crate::Result;

/// Returns the grid of an image in patches.
pub(crate) fn grid_of(image: &ImagePatches) -> [i64; 2] {
    image.grid.map(|side| side as i64)
}

/// Returns the patches of some images as a tensor `(N, W)`.
fn pixels_of(images: &[ImagePatches]) -> Result<Tensor> {
    let rows = images.iter().map(|image| {
        let width = image.patch_width as i64;
        Tensor::f_from_slice(&image.pixels)?.f_view([-1, width])
    });
    let rows = rows.collect::<std::result::Result<Vec<_>, _>>()?;
    Ok(Tensor::f_cat(&rows, 0)?)
}
