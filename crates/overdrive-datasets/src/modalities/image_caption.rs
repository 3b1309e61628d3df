//! A dataset of images and captions.

use std::fmt::Display;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use image::imageops::FilterType;
use image::{DynamicImage, RgbImage};
use serde_json::Value;

use super::augment::ImageAugmentation;
use super::image_file::decode;
use crate::read_failure::is_of_path;
use crate::{Dataset, Error, JsonOptions, JsonRecords, RecordNumber, Result};
use overdrive_core::{Error as CommonError, check_option, check_positive};

/// The way in which an image is resized.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageResize {
    /// The shorter side is scaled to the size and the middle of the longer one is kept: `Resize` and `CenterCrop`
    /// of torchvision. The default.
    #[default]
    Crop,
    /// Both sides are scaled to the size, which changes the aspect ratio.
    Stretch,
}

/// The options of [`ImageCaptionDataset`].
#[derive(Debug, Clone, PartialEq)]
pub struct ImageOptions {
    /// The field with the image's path. Default: `image`.
    pub image_field: String,
    /// The field with the caption. Default: `text`.
    pub text_field: String,
    /// The folder that paths are relative to. Default: `None`, the folder of the file with the records.
    pub folder: Option<PathBuf>,
    /// The height of the decoded image in pixels. Default: 224.
    pub height: u32,
    /// The width of the decoded image in pixels. Default: 224.
    pub width: u32,
    /// The way in which it is resized. Default: [`ImageResize::Crop`].
    pub resize: ImageResize,
    /// The means of red, green and blue (from 0 to 1), which are subtracted. Default: ImageNet's.
    pub mean: [f32; 3],
    /// The standard deviations by which red, green and blue are divided. Default: ImageNet's.
    pub std: [f32; 3],
    /// Random crops and flips in place of `resize`, for training. Default: `None`.
    pub augmentation: Option<ImageAugmentation>,
    /// The options of the files with the records.
    pub json: JsonOptions,
}

impl Default for ImageOptions {
    fn default() -> Self {
        Self {
            image_field: "image".to_owned(),
            text_field: "text".to_owned(),
            folder: None,
            height: 224,
            width: 224,
            resize: ImageResize::Crop,
            mean: [0.485, 0.456, 0.406],
            std: [0.229, 0.224, 0.225],
            augmentation: None,
            json: JsonOptions::default(),
        }
    }
}

/// An image and its caption.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageCaption {
    /// The normalized values of red, green and blue, (3, height, width) in row-major order.
    pub pixels: Vec<f32>,
    /// The height in pixels.
    pub height: u32,
    /// The width in pixels.
    pub width: u32,
    /// The caption.
    pub caption: String,
    /// The path of the image file.
    pub path: PathBuf,
}

#[cfg(feature = "tch")]
impl ImageCaption {
    /// Returns the image as a tensor of shape (3, height, width), Float, on the CPU.
    ///
    /// # Errors
    /// An error of libtorch if there is no memory for the tensor.
    pub fn to_tensor(&self) -> Result<tch::Tensor> {
        let shape = [3, i64::from(self.height), i64::from(self.width)];
        Ok(tch::Tensor::f_from_slice(&self.pixels)?.f_view(shape)?)
    }
}

/// The images (PNG, JPEG, WebP) that JSON records name, decoded, resized and normalized on demand. They are upright:
/// an orientation in the EXIF data of a photo is applied, as Hugging Face's `datasets` does. A missing or damaged image
/// is an error of its record, with the record's location.
///
/// ```no_run
/// // Needs images on disk.
/// use overdrive_datasets::{DataLoader, DataLoaderOptions, ImageCaptionDataset, ImageOptions};
/// // {"image": "images/0001.jpg", "text": "A dog on a beach."}
/// let images = ImageCaptionDataset::open(["captions.jsonl"], ImageOptions::default())?;
/// let options = DataLoaderOptions { batch_size: 32, shuffle: true, num_workers: 8, ..Default::default() };
/// let loader = DataLoader::new(images, options)?;
/// # Ok::<(), overdrive_datasets::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct ImageCaptionDataset {
    rows: Arc<JsonRecords<Value>>,
    options: ImageOptions,
}

impl ImageCaptionDataset {
    /// Opens JSON or JSON Lines files, folders and patterns (see [`crate::find_files`]).
    ///
    /// # Errors
    /// Those of [`JsonRecords::open`]; returns an error if a size is 0 or a standard deviation is not above 0.
    pub fn open<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        options: ImageOptions,
    ) -> Result<Self> {
        check_positive("height", options.height)?;
        check_positive("width", options.width)?;
        check_option(
            options.std.iter().all(|std| std.is_finite() && *std > 0.0),
            "std",
            format!("{:?}", options.std),
            "three finite numbers above 0",
        )?;
        if let Some(augmentation) = &options.augmentation {
            augmentation.check()?;
        }
        Ok(Self {
            rows: Arc::new(JsonRecords::open(paths, &options.json)?),
            options,
        })
    }

    /// Returns the same images with another augmentation seed, such as the sum of a seed and the number of the epoch.
    /// Without augmentation nothing changes.
    #[must_use]
    pub fn with_seed(&self, seed: u64) -> Self {
        let mut changed = self.clone();
        if let Some(augmentation) = &mut changed.options.augmentation {
            augmentation.seed = seed;
        }
        changed
    }

    /// Returns the records that name the images.
    pub fn rows(&self) -> &JsonRecords<Value> {
        &self.rows
    }

    /// Reads record `index`, and makes an item of its decoded image, its caption and the path of the image.
    pub(super) fn read<T>(
        &self,
        index: usize,
        item: impl FnOnce(DynamicImage, String, PathBuf) -> std::result::Result<T, String>,
    ) -> Result<T> {
        let row = self.rows.get(index)?;
        let location = self.rows.records().location(index)?;
        let base = match &self.options.folder {
            Some(folder) => folder,
            None => location.path.parent().unwrap_or(Path::new("")),
        };
        let text = |field: &str| {
            let value = row.get(field).and_then(Value::as_str);
            value.ok_or_else(|| Error::other(format!("it has no text in the field {field:?}")))
        };
        let read = || {
            let caption = text(&self.options.text_field)?.to_owned();
            let path = base.join(text(&self.options.image_field)?);
            let failed = |problem: &dyn Display| {
                Error::other(format!("the image {}: {problem}", path.display()))
            };
            let bytes = std::fs::read(&path).map_err(|error| match is_of_path(&error) {
                true => failed(&error),
                false => CommonError::io("read", &path)(error).into(),
            })?;
            let image = decode(&bytes).map_err(|error| failed(&error))?;
            item(image, caption, path).map_err(Error::other)
        };
        read().map_err(|error| match error.is_about_record() {
            true => Error::InvalidRecord {
                number: RecordNumber::Record(location.record),
                offset: location.offset,
                problem: error.to_string(),
                path: location.path.clone(),
            },
            false => error,
        })
    }

    /// Resizes with a triangle filter as wide as the ratio of the sizes: bilinear with antialiasing, as Pillow does.
    fn resized(&self, image: DynamicImage) -> RgbImage {
        let ImageOptions { height, width, .. } = self.options;
        let image = image.into_rgb8();
        if image.dimensions() == (width, height) {
            return image;
        }
        let image = match self.options.resize {
            ImageResize::Stretch => {
                DynamicImage::ImageRgb8(image).resize_exact(width, height, FilterType::Triangle)
            }
            ImageResize::Crop => {
                DynamicImage::ImageRgb8(image).resize_to_fill(width, height, FilterType::Triangle)
            }
        };
        image.into_rgb8()
    }

    fn normalized(&self, image: &RgbImage) -> Vec<f32> {
        let plane = (image.width() * image.height()) as usize;
        let mut pixels = vec![0.0; 3 * plane];
        for (location, pixel) in image.pixels().enumerate() {
            for (channel, &value) in pixel.0.iter().enumerate() {
                let value = f32::from(value) / 255.0 - self.options.mean[channel];
                pixels[channel * plane + location] = value / self.options.std[channel];
            }
        }
        pixels
    }
}

impl Dataset for ImageCaptionDataset {
    type Item = ImageCaption;

    fn len(&self) -> usize {
        self.rows.len()
    }

    fn get(&self, index: usize) -> Result<ImageCaption> {
        self.read(index, |image, caption, path| {
            let image = match &self.options.augmentation {
                Some(augmentation) => {
                    let ImageOptions { height, width, .. } = self.options;
                    augmentation.apply(&image.into_rgb8(), index, width, height)
                }
                None => self.resized(image),
            };
            Ok(ImageCaption {
                pixels: self.normalized(&image),
                height: image.height(),
                width: image.width(),
                caption,
                path,
            })
        })
    }

    fn prefetch(&self, indices: &[usize]) {
        self.rows.prefetch(indices);
    }

    fn check_unchanged(&self) -> Result<()> {
        self.rows.check_unchanged()
    }
}
