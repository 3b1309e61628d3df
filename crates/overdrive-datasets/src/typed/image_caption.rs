//! Images and what is written about them.

use std::path::{Path, PathBuf};

use image::imageops::FilterType;
use image::{DynamicImage, ImageReader, RgbImage};
use serde_json::Value;

use crate::{Dataset, Error, JsonOptions, JsonRecords, Result};

/// How an image gets its size.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ImageResize {
    /// The shorter side is brought to the size, and the middle of the longer one kept: `Resize` and
    /// `CenterCrop` of torchvision.
    #[default]
    Crop,
    /// Both sides are brought to the size, whatever becomes of the proportions.
    Stretch,
}

/// How images are read.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageOptions {
    /// The field with the image's path. Default: `image`.
    pub image_field: String,
    /// The field with the caption. Default: `text`.
    pub text_field: String,
    /// The folder that paths are relative to. Default: that of the file that names them.
    pub folder: Option<PathBuf>,
    /// Rows of the decoded image. Default: 224.
    pub height: u32,
    /// Columns. Default: 224.
    pub width: u32,
    /// How it gets this size. Default: the middle is cut out.
    pub resize: ImageResize,
    /// Subtracted from each of red, green and blue, which go from 0 to 1. Default: ImageNet's.
    pub mean: [f32; 3],
    /// What each is divided by then. Default: ImageNet's.
    pub std: [f32; 3],
    /// How the file of records is read.
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
            json: JsonOptions::default(),
        }
    }
}

/// An image and its caption.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageCaption {
    /// (3, height, width): red, green and blue, normalised, row by row.
    pub pixels: Vec<f32>,
    /// Rows.
    pub height: u32,
    /// Columns.
    pub width: u32,
    /// What is written about it.
    pub caption: String,
    /// Where the image is.
    pub path: PathBuf,
}

#[cfg(feature = "tch")]
impl ImageCaption {
    /// The image as a tensor of (3, height, width), Float.
    ///
    /// # Errors
    /// When libtorch has no memory for it.
    pub fn to_tensor(&self) -> Result<tch::Tensor> {
        let shape = [3, i64::from(self.height), i64::from(self.width)];
        Ok(tch::Tensor::f_from_slice(&self.pixels)?.f_view(shape)?)
    }
}

/// Images (PNG, JPEG, WebP) named by JSON records, decoded, resized and normalised when they are asked
/// for. An image that is missing or damaged is an error of its record, with its place.
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
#[derive(Debug)]
pub struct ImageCaptionDataset {
    rows: JsonRecords<Value>,
    options: ImageOptions,
}

impl ImageCaptionDataset {
    /// Opens JSON or JSON Lines files, folders and patterns (see [`crate::find_files`]).
    ///
    /// # Errors
    /// As [`JsonRecords::open`], and when a size is 0 or a deviation is not above 0.
    pub fn open<P: AsRef<Path>>(
        paths: impl IntoIterator<Item = P>,
        options: ImageOptions,
    ) -> Result<Self> {
        let invalid = |option, value: String, expected| {
            Err(Error::InvalidOption {
                option,
                value,
                expected,
            })
        };
        if options.height == 0 || options.width == 0 {
            let value = format!("{} x {}", options.height, options.width);
            return invalid("height, width", value, "at least one pixel");
        }
        if !options.std.iter().all(|std| std.is_finite() && *std > 0.0) {
            let value = format!("{:?}", options.std);
            return invalid("std", value, "three finite numbers above 0");
        }
        Ok(Self {
            rows: JsonRecords::open(paths, &options.json)?,
            options,
        })
    }

    /// The records that name the images.
    pub fn rows(&self) -> &JsonRecords<Value> {
        &self.rows
    }

    fn read(&self, row: &Value, base: &Path) -> std::result::Result<ImageCaption, String> {
        let text = |field: &str| {
            let value = row.get(field).and_then(Value::as_str);
            value.ok_or_else(|| format!("it has no text in the field {field:?}"))
        };
        let caption = text(&self.options.text_field)?.to_owned();
        let path = base.join(text(&self.options.image_field)?);
        let failed = |problem: String| format!("the image {}: {problem}", path.display());
        let image = ImageReader::open(&path)
            .and_then(ImageReader::with_guessed_format)
            .map_err(|error| failed(error.to_string()))?
            .decode()
            .map_err(|error| failed(error.to_string()))?;
        let image = self.resized(image);
        Ok(ImageCaption {
            pixels: self.normalised(&image),
            height: image.height(),
            width: image.width(),
            caption,
            path,
        })
    }

    /// With a triangle as wide as the ratio of the sizes: bilinear with antialiasing, as Pillow does.
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

    fn normalised(&self, image: &RgbImage) -> Vec<f32> {
        let plane = (image.width() * image.height()) as usize;
        let mut pixels = vec![0.0; 3 * plane];
        for (place, pixel) in image.pixels().enumerate() {
            for (channel, &value) in pixel.0.iter().enumerate() {
                let value = f32::from(value) / 255.0 - self.options.mean[channel];
                pixels[channel * plane + place] = value / self.options.std[channel];
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
        let row = self.rows.get(index)?;
        let place = self.rows.records().place(index)?;
        let base = match &self.options.folder {
            Some(folder) => folder,
            None => place.path.parent().unwrap_or(Path::new("")),
        };
        self.read(&row, base)
            .map_err(|problem| Error::UnreadableRecord {
                record: place.record,
                offset: place.offset,
                problem,
                path: place.path.clone(),
            })
    }
}
