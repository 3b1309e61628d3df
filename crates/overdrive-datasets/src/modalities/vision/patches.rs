use std::borrow::Cow;

use overdrive_core::check_option;

use super::ImageProcessor;
use super::bicubic::Rgb;
use crate::{Result, Sha256Digest};

/// An image as the normalized patches that a vision model reads; made by [`ImageProcessor`].
///
/// It holds the resized image in 8 bits, from which [`values`](ImagePatches::values) computes the patches: they are eight
/// times as large.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct ImagePatches {
    /// The number of values of a patch.
    pub patch_width: usize,
    /// The number of patches along the height and along the width.
    pub grid: [usize; 2],
    /// The number of patches along each side of those that become one token.
    pub merge_size: usize,
    source: Source,
}

#[derive(Debug, Clone, PartialEq)]
enum Source {
    /// A resized image, and the processor that cuts it.
    Image(Rgb, ImageProcessor),
    Values(Vec<f32>),
}

impl ImagePatches {
    /// Makes an image from the `values` of its patches, (patches, `patch_width`) in row-major order; see
    /// [`values`](ImagePatches::values).
    ///
    /// # Errors
    /// An [option](overdrive_core::Error::InvalidOption) if the number of values does not fit, or `merge_size` does not
    /// divide the sides of `grid`.
    pub fn new(
        values: Vec<f32>,
        patch_width: usize,
        grid: [usize; 2],
        merge_size: usize,
    ) -> Result<ImagePatches> {
        let divides = |side: &usize| *side > 0 && side.checked_rem(merge_size) == Some(0);
        let expected = format!("two positive multiples of `merge_size`, {merge_size}");
        let is_whole = grid.iter().all(divides);
        check_option(is_whole, "grid", format!("{grid:?}"), expected)?;
        let patches = grid[0].checked_mul(grid[1]);
        let fits =
            patches.and_then(|patches| patches.checked_mul(patch_width)) == Some(values.len());
        let expected = format!("{} x {} patches of {patch_width} values", grid[0], grid[1]);
        check_option(fits, "values", values.len(), expected)?;
        Ok(ImagePatches {
            patch_width,
            grid,
            merge_size,
            source: Source::Values(values),
        })
    }

    /// Makes the patches of a resized image.
    pub(super) fn of_image(image: Rgb, processor: &ImageProcessor) -> ImagePatches {
        let patch = processor.patch_size;
        ImagePatches {
            patch_width: 3 * processor.temporal_patch_size * patch * patch,
            grid: [image.height / patch, image.width / patch],
            merge_size: processor.merge_size,
            source: Source::Image(image, processor.clone()),
        }
    }

    /// Returns the values of all patches, (patches, `patch_width`) in row-major order. The patches of a merged token are
    /// adjacent. A patch has its red values first, once for each of the model's frames.
    pub fn values(&self) -> Cow<'_, [f32]> {
        match &self.source {
            Source::Image(image, processor) => processor.patches(image).into(),
            Source::Values(values) => values.into(),
        }
    }

    /// Returns the number of patches.
    pub fn patches(&self) -> usize {
        self.grid.iter().product()
    }

    /// Returns the number of tokens that stand for the image in a prompt.
    pub fn tokens(&self) -> usize {
        let sides = self.grid.iter().map(|side| side / self.merge_size);
        sides.product()
    }

    /// Returns a digest of the patches, by which a cache distinguishes images.
    pub fn digest(&self) -> Sha256Digest {
        let sizes = [self.grid[0], self.grid[1], self.patch_width];
        let mut bytes: Vec<u8> = sizes
            .iter()
            .flat_map(|size| (*size as u64).to_le_bytes())
            .collect();
        let mut push = |values: &[f32]| bytes.extend(values.iter().flat_map(|x| x.to_le_bytes()));
        match &self.source {
            Source::Image(image, processor) => {
                push(&[processor.image_mean, processor.image_std].concat());
                bytes.extend_from_slice(&image.values);
            }
            Source::Values(values) => push(values),
        }
        Sha256Digest::of(&bytes)
    }
}
