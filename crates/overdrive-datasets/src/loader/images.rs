//! Batches of images with captions.

use tch::Tensor;

use overdrive_core::check_option;

use super::device_loader::on_device_by_map;
use super::seq2seq::{mask_of, padded_rows};
use crate::{ImageCaption, Result};

/// Images and the tokens of their captions as tensors, made by [`collate_captions`]. B is the number of images.
#[derive(Debug)]
#[non_exhaustive]
pub struct ImageBatch {
    /// The images, (B, 3, height, width), Float.
    pub pixel_values: Tensor,
    /// The tokens of the captions, (B, longest), Int64, padded on the right.
    pub input_ids: Tensor,
    /// The attention mask of the captions, (B, longest), Int64: 1 for a token, 0 for padding. `None` if no caption is
    /// padded.
    pub attention_mask: Option<Tensor>,
}

impl ImageBatch {
    fn map_tensors(self, change: impl Fn(Tensor) -> Result<Tensor>) -> Result<Self> {
        Ok(Self {
            pixel_values: change(self.pixel_values)?,
            input_ids: change(self.input_ids)?,
            attention_mask: self.attention_mask.map(&change).transpose()?,
        })
    }
}

on_device_by_map!(ImageBatch);

/// Collates images into a tensor of shape (B, 3, height, width), Float, on the CPU.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if there is no image, or if their sizes differ; an error of libtorch if there
/// is no memory for the tensor.
pub fn collate_images(images: &[ImageCaption]) -> Result<Tensor> {
    let rows: Vec<&ImageCaption> = images.iter().collect();
    stack(&rows)
}

/// Collates images with the tokens of their captions into a batch, as CLIP's processor does; captions are padded to the
/// longest with `pad_token`.
///
/// # Errors
/// As [`collate_images`].
pub fn collate_captions(rows: &[(ImageCaption, Vec<i64>)], pad_token: i64) -> Result<ImageBatch> {
    let images: Vec<&ImageCaption> = rows.iter().map(|(image, _)| image).collect();
    let captions: Vec<&[i64]> = rows.iter().map(|(_, caption)| caption.as_slice()).collect();
    Ok(ImageBatch {
        pixel_values: stack(&images)?,
        input_ids: padded_rows(&captions, pad_token, 1)?,
        attention_mask: mask_of(captions.iter().map(|caption| caption.len()), 1)?,
    })
}

fn stack(images: &[&ImageCaption]) -> Result<Tensor> {
    check_option(!images.is_empty(), "rows", "empty", "at least one image")?;
    let (height, width) = (images[0].height, images[0].width);
    let mut pixels = Vec::with_capacity(images.len() * images[0].pixels.len());
    for (number, image) in images.iter().enumerate() {
        check_option(
            (image.height, image.width) == (height, width),
            "the size of an image",
            format!("{} x {} (row {number})", image.height, image.width),
            format!("{height} x {width}, as in the first row"),
        )?;
        pixels.extend_from_slice(&image.pixels);
    }
    let shape = [images.len() as i64, 3, i64::from(height), i64::from(width)];
    Ok(Tensor::f_from_slice(&pixels)?.f_view(shape)?)
}
