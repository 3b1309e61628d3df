use std::path::Path;

use overdrive_core::{Error as Common, check_option, check_positive, text};
use serde_json::{Map, Value};

use super::bicubic::{Rgb, resize};
use super::patches::ImagePatches;
#[cfg(feature = "image")]
use crate::modalities::image_file;
use crate::{Error, Result};

/// The largest ratio of an image's sides, as in transformers.
const MOST_RATIO: f64 = 200.0;
/// The number of `resample` that stands for bicubic in Pillow.
const BICUBIC: u64 = 3;

/// Resizes, normalizes and cuts images for Qwen2-VL and later models: `Qwen2VLImageProcessor` of transformers.
///
/// Its values equal those of transformers' default backend (torchvision) bit for bit: the sides are rounded to whole
/// tokens within the bounds of the number of pixels, the image is resized in 8-bit integers with a bicubic filter, and
/// mean and deviation are scaled to 0..255 before they are applied.
#[derive(Debug, Clone, PartialEq)]
pub struct ImageProcessor {
    /// The least number of pixels of a resized image (`size.shortest_edge`). Default: 3,136.
    pub min_pixels: usize,
    /// The largest number of pixels of a resized image (`size.longest_edge`). Default: 1,003,520.
    pub max_pixels: usize,
    /// The width and height of a patch in pixels. Default: 14.
    pub patch_size: usize,
    /// The number of frames of a patch; an image is repeated in each. Default: 2.
    pub temporal_patch_size: usize,
    /// The number of patches along each side of those that become one token. Default: 2.
    pub merge_size: usize,
    /// The means of red, green and blue (from 0 to 1), which are subtracted. Default: CLIP's.
    pub image_mean: [f32; 3],
    /// The standard deviations by which red, green and blue are divided. Default: CLIP's.
    pub image_std: [f32; 3],
}

impl Default for ImageProcessor {
    fn default() -> Self {
        ImageProcessor {
            min_pixels: 56 * 56,
            max_pixels: 28 * 28 * 1280,
            patch_size: 14,
            temporal_patch_size: 2,
            merge_size: 2,
            image_mean: [0.481_454_66, 0.457_827_5, 0.408_210_73],
            image_std: [0.268_629_54, 0.261_302_6, 0.275_777_1],
        }
    }
}

impl ImageProcessor {
    /// Reads the processor of a Hugging Face folder: `image_processor` in `processor_config.json`, or
    /// `preprocessor_config.json`. Returns `None` if the folder has neither.
    ///
    /// # Errors
    /// As [`from_json`](ImageProcessor::from_json); an error if a file cannot be read.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Option<ImageProcessor>> {
        let object = |name: &str| -> Result<Option<Value>> {
            let path = dir.as_ref().join(name);
            let text = text::read_optional(&path)?;
            let value = text.map(|text| serde_json::from_str(&text));
            Ok(value.transpose().map_err(Common::parse("JSON", &path))?)
        };
        let mut of_both = object("processor_config.json")?.unwrap_or_default();
        let own = match of_both.get_mut("image_processor").map(Value::take) {
            Some(own) => Some(own),
            None => object("preprocessor_config.json")?,
        };
        own.as_ref().map(ImageProcessor::from_json).transpose()
    }

    /// Reads the object of a `preprocessor_config.json`.
    ///
    /// # Errors
    /// [`Error::Common`] with the key whose value is out of its range or is not supported.
    pub fn from_json(value: &Value) -> Result<ImageProcessor> {
        let Value::Object(map) = value else {
            return Err(Common::option("preprocessor_config.json", value, "an object").into());
        };
        refuse_others(map)?;
        let mut processor = ImageProcessor::default();
        let size = map.get("size").and_then(Value::as_object);
        let edges = [
            ("shortest_edge", &mut processor.min_pixels),
            ("longest_edge", &mut processor.max_pixels),
        ];
        for (key, slot) in edges {
            if let Some(map) = size {
                read_positive(map, key, slot)?;
            }
        }
        for (key, slot) in [
            ("min_pixels", &mut processor.min_pixels),
            ("max_pixels", &mut processor.max_pixels),
            ("patch_size", &mut processor.patch_size),
            ("temporal_patch_size", &mut processor.temporal_patch_size),
            ("merge_size", &mut processor.merge_size),
        ] {
            read_positive(map, key, slot)?;
        }
        read_channels(map, "image_mean", &mut processor.image_mean)?;
        read_channels(map, "image_std", &mut processor.image_std)?;
        processor.validate()?;
        Ok(processor)
    }

    fn validate(&self) -> Result<()> {
        check_positive("patch_size", self.patch_size)?;
        check_positive("temporal_patch_size", self.temporal_patch_size)?;
        check_positive("merge_size", self.merge_size)?;
        check_option(
            self.min_pixels <= self.max_pixels,
            "size.shortest_edge",
            self.min_pixels,
            format!("at most `size.longest_edge`, {}", self.max_pixels),
        )?;
        check_option(
            self.image_std
                .iter()
                .all(|std| std.is_finite() && *std > 0.0),
            "image_std",
            format!("{:?}", self.image_std),
            "three finite numbers above 0",
        )?;
        Ok(())
    }

    /// Returns the height and width to which an image of `height` times `width` pixels is resized.
    ///
    /// # Errors
    /// [`Error::Common`] if a field is outside its range, a side is 0, or one is more than 200 times the other.
    pub fn resized(&self, height: usize, width: usize) -> Result<[usize; 2]> {
        self.validate()?;
        let sides = [height, width].map(|side| side as f64);
        let ratio = sides[0].max(sides[1]) / sides[0].min(sides[1]);
        check_option(
            ratio <= MOST_RATIO,
            "the size of an image",
            format!("{height} x {width}"),
            "two positive sides, of which none is more than 200 times the other",
        )?;
        let factor = self.patch_size as f64 * self.merge_size as f64;
        let (least, most) = (self.min_pixels as f64, self.max_pixels as f64);
        // Python rounds halves to even numbers.
        let mut new = sides.map(|side| (side / factor).round_ties_even() * factor);
        let pixels = sides[0] * sides[1];
        if new[0] * new[1] > most {
            let beta = (pixels / most).sqrt();
            new = sides.map(|side| ((side / beta / factor).floor() * factor).max(factor));
        } else if new[0] * new[1] < least {
            let beta = (least / pixels).sqrt();
            new = sides.map(|side| (side * beta / factor).ceil() * factor);
        }
        Ok(new.map(|side| side as usize))
    }

    /// Makes the patches of an image of `height` times `width` pixels, whose `values` are rows of red, green and blue.
    ///
    /// # Errors
    /// As [`resized`](ImageProcessor::resized); [`Error::Common`] if the number of values does not fit.
    pub fn process(
        &self,
        values: impl Into<Vec<u8>>,
        height: usize,
        width: usize,
    ) -> Result<ImagePatches> {
        let [new_height, new_width] = self.resized(height, width)?;
        let values = values.into();
        check_option(
            height
                .checked_mul(width)
                .and_then(|pixels| pixels.checked_mul(3))
                == Some(values.len()),
            "the values of an image",
            values.len(),
            format!("3 x {height} x {width}"),
        )?;
        let image = Rgb {
            width,
            height,
            values,
        };
        let image = resize(image, new_width, new_height);
        Ok(ImagePatches::of_image(image, self))
    }

    /// Decodes a PNG, JPEG or WebP, applies its EXIF orientation, drops its transparency and makes its patches.
    ///
    /// # Errors
    /// [`Error::Common`] if it cannot be decoded; as [`process`](ImageProcessor::process).
    #[cfg(feature = "image")]
    pub fn decode(&self, bytes: &[u8]) -> Result<ImagePatches> {
        let image = image_file::decode(bytes).map_err(unreadable)?;
        self.process_rgb(image.into_rgb8())
    }

    /// Returns the grid of the patches that [`decode`](ImageProcessor::decode) makes of a file, by its header alone: the
    /// pixels of a small file may take much memory.
    ///
    /// # Errors
    /// As [`decode`](ImageProcessor::decode), but for pixels that cannot be decoded.
    #[cfg(feature = "image")]
    pub fn grid(&self, bytes: &[u8]) -> Result<[usize; 2]> {
        let (width, height) = image_file::upright_size(bytes).map_err(unreadable)?;
        let sides = self.resized(height as usize, width as usize)?;
        Ok(sides.map(|side| side / self.patch_size))
    }

    /// Makes the patches of a decoded image.
    #[cfg(feature = "image")]
    pub(super) fn process_rgb(&self, image: image::RgbImage) -> Result<ImagePatches> {
        let (width, height) = image.dimensions();
        self.process(image.into_raw(), height as usize, width as usize)
    }

    /// Returns the values of the patches of a resized image.
    pub(super) fn patches(&self, image: &Rgb) -> Vec<f32> {
        let (patch, merge) = (self.patch_size, self.merge_size);
        let tables: [Vec<f32>; 3] = std::array::from_fn(|channel| self.normalized(channel));
        let mut values = Vec::with_capacity(image.values.len() * self.temporal_patch_size);
        let merged = [image.height, image.width].map(|side| side / (patch * merge));
        for (block_row, block_column) in pairs(merged[0], merged[1]) {
            for (row, column) in pairs(merge, merge) {
                let top = (block_row * merge + row) * patch;
                let left = (block_column * merge + column) * patch;
                for (channel, table) in tables.iter().enumerate() {
                    for _ in 0..self.temporal_patch_size {
                        for (y, x) in pairs(patch, patch) {
                            let pixel = (top + y) * image.width + left + x;
                            values.push(table[usize::from(image.values[3 * pixel + channel])]);
                        }
                    }
                }
            }
        }
        values
    }

    /// Returns the normalized values of 0 to 255 in a channel.
    fn normalized(&self, channel: usize) -> Vec<f32> {
        // transformers fuses the factor 1/255 into both, in fp32.
        let mean = self.image_mean[channel] * 255.0;
        let std = self.image_std[channel] * 255.0;
        (0..=255_u8)
            .map(|value| (f32::from(value) - mean) / std)
            .collect()
    }
}

#[cfg(feature = "image")]
fn unreadable(error: image::ImageError) -> Error {
    Common::option("an image", error, "a PNG, a JPEG or a WebP").into()
}

/// Returns all pairs of numbers below two bounds, the second fastest.
fn pairs(first: usize, second: usize) -> impl Iterator<Item = (usize, usize)> {
    (0..first).flat_map(move |a| (0..second).map(move |b| (a, b)))
}

fn bad(key: &str, value: &Value, expected: &str) -> Error {
    Common::option(key.to_owned(), value, expected.to_owned()).into()
}

fn read_positive(map: &Map<String, Value>, key: &str, slot: &mut usize) -> Result<()> {
    let Some(value) = map.get(key).filter(|value| !value.is_null()) else {
        return Ok(());
    };
    let number = value
        .as_u64()
        .filter(|number| (1..1 << 31).contains(number));
    *slot = number.ok_or_else(|| bad(key, value, "a positive integer below 2^31"))? as usize;
    Ok(())
}

fn read_channels(map: &Map<String, Value>, key: &str, slot: &mut [f32; 3]) -> Result<()> {
    let Some(value) = map.get(key).filter(|value| !value.is_null()) else {
        return Ok(());
    };
    let numbers = value.as_array().into_iter().flatten();
    let numbers: Vec<f32> = numbers.filter_map(|n| Some(n.as_f64()? as f32)).collect();
    *slot = numbers
        .try_into()
        .map_err(|_| bad(key, value, "a list of three numbers"))?;
    Ok(())
}

/// Refuses a processor of another kind, and steps of this one that are switched off.
fn refuse_others(map: &Map<String, Value>) -> Result<()> {
    if let Some(value) = map.get("image_processor_type") {
        let name = value.as_str().unwrap_or_default();
        let name = name.trim_end_matches("Fast").trim_end_matches("Pil");
        if !["Qwen2VLImageProcessor", "Qwen3VLImageProcessor"].contains(&name) {
            return Err(bad("image_processor_type", value, "Qwen2VLImageProcessor"));
        }
    }
    for key in ["do_resize", "do_rescale", "do_normalize", "do_convert_rgb"] {
        if let Some(value) = map.get(key)
            && value.as_bool() == Some(false)
        {
            return Err(bad(key, value, "true"));
        }
    }
    if let Some(value) = map.get("resample").filter(|value| !value.is_null())
        && value.as_u64() != Some(BICUBIC)
    {
        return Err(bad("resample", value, "3, bicubic"));
    }
    if let Some(value) = map.get("rescale_factor").and_then(Value::as_f64)
        && (value * 255.0 - 1.0).abs() > 1e-9
    {
        return Err(bad("rescale_factor", &value.into(), "1/255"));
    }
    Ok(())
}
