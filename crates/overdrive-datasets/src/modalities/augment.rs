//! Random crops and flips of images.

use image::imageops::FilterType;
use image::{DynamicImage, RgbImage};

use overdrive_core::check_option;
use overdrive_core::random::Generator;

use crate::Result;

/// The stream of random numbers that augmentations use (see [`overdrive_core::random::Generator`]).
const AUGMENT_STREAM: u32 = 0xA06;
/// The number of random crops that are tried before the image is cropped in the middle, as in torchvision.
const ATTEMPTS: usize = 10;

/// Random changes of training images: `RandomResizedCrop` and `RandomHorizontalFlip` of torchvision, with their
/// defaults.
///
/// They depend only on the seed and the index of the image, not on the thread that reads it or the order of reading.
/// A different seed for each epoch ([`crate::ImageCaptionDataset::with_seed`]) gives each epoch different crops.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ImageAugmentation {
    /// The seed. Default: 0.
    pub seed: u64,
    /// The range of the crop's share of the image's area. Default: 0.08 to 1.
    pub scale: (f64, f64),
    /// The range of the ratio of the crop's width to its height. Default: 3/4 to 4/3.
    pub ratio: (f64, f64),
    /// The probability that the image is mirrored. Default: 0.5.
    pub flip: f64,
}

impl Default for ImageAugmentation {
    fn default() -> Self {
        Self {
            seed: 0,
            scale: (0.08, 1.0),
            ratio: (3.0 / 4.0, 4.0 / 3.0),
            flip: 0.5,
        }
    }
}

/// A rectangle of an image, in pixels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Crop {
    left: u32,
    top: u32,
    width: u32,
    height: u32,
}

impl ImageAugmentation {
    pub(super) fn check(&self) -> Result<()> {
        let (low, high) = self.scale;
        check_option(
            low > 0.0 && low <= high && high <= 1.0,
            "scale",
            format!("{:?}", self.scale),
            "a range above 0 and at most 1",
        )?;
        let (low, high) = self.ratio;
        check_option(
            low > 0.0 && low <= high && high.is_finite(),
            "ratio",
            format!("{:?}", self.ratio),
            "a range above 0",
        )?;
        check_option(
            (0.0..=1.0).contains(&self.flip),
            "flip",
            self.flip,
            "a probability from 0 to 1",
        )?;
        Ok(())
    }

    /// Returns image number `index`, cropped, resized and perhaps mirrored.
    pub(super) fn apply(
        &self,
        image: &RgbImage,
        index: usize,
        width: u32,
        height: u32,
    ) -> RgbImage {
        let mut random = Generator::new(self.seed, AUGMENT_STREAM).split(index as u64);
        let crop = self.crop(image.width(), image.height(), &mut random);
        let view = image::imageops::crop_imm(image, crop.left, crop.top, crop.width, crop.height);
        let cropped = DynamicImage::ImageRgb8(view.to_image());
        let resized = cropped.resize_exact(width, height, FilterType::Triangle);
        match random.uniform() < self.flip {
            true => resized.fliph().into_rgb8(),
            false => resized.into_rgb8(),
        }
    }

    /// Draws a crop: area and aspect ratio first, then the position.
    fn crop(&self, width: u32, height: u32, random: &mut Generator) -> Crop {
        let area = f64::from(width) * f64::from(height);
        let mut between = |(low, high): (f64, f64)| low + (high - low) * random.uniform();
        for _ in 0..ATTEMPTS {
            let target = area * between(self.scale);
            // Uniform in the logarithm, so that wide and high crops are equally likely.
            let ratio = between((self.ratio.0.ln(), self.ratio.1.ln())).exp();
            let crop_width = (target * ratio).sqrt().round() as u32;
            let crop_height = (target / ratio).sqrt().round() as u32;
            if (1..=width).contains(&crop_width) && (1..=height).contains(&crop_height) {
                let below = |room: u32, at: f64| (f64::from(room + 1) * at) as u32;
                let (top, left) = (between((0.0, 1.0)), between((0.0, 1.0)));
                return Crop {
                    left: below(width - crop_width, left).min(width - crop_width),
                    top: below(height - crop_height, top).min(height - crop_height),
                    width: crop_width,
                    height: crop_height,
                };
            }
        }
        self.middle(width, height)
    }

    /// Returns the largest crop in the middle with an allowed ratio.
    fn middle(&self, width: u32, height: u32) -> Crop {
        let ratio = f64::from(width) / f64::from(height);
        let (mut crop_width, mut crop_height) = (width, height);
        if ratio < self.ratio.0 {
            crop_height = (f64::from(width) / self.ratio.0).round() as u32;
        } else if ratio > self.ratio.1 {
            crop_width = (f64::from(height) * self.ratio.1).round() as u32;
        }
        let (crop_width, crop_height) = (crop_width.clamp(1, width), crop_height.clamp(1, height));
        Crop {
            left: (width - crop_width) / 2,
            top: (height - crop_height) / 2,
            width: crop_width,
            height: crop_height,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn crops_lie_in_the_image_and_have_the_area_and_the_ratio_that_are_asked_for() {
        let augmentation = ImageAugmentation::default();
        let (mut least, mut largest) = (1.0_f64, 0.0_f64);
        for index in 0..2_000 {
            let mut random = Generator::new(1, AUGMENT_STREAM).split(index);
            let crop = augmentation.crop(300, 200, &mut random);
            assert!(crop.left + crop.width <= 300 && crop.top + crop.height <= 200);
            let share = f64::from(crop.width * crop.height) / 60_000.0;
            let ratio = f64::from(crop.width) / f64::from(crop.height);
            assert!(
                (0.07..=1.0).contains(&share) && (0.73..=1.37).contains(&ratio),
                "{crop:?}"
            );
            (least, largest) = (least.min(share), largest.max(share));
        }
        assert!(least < 0.1 && largest > 0.8, "{least} {largest}");
    }

    #[test]
    fn images_that_no_crop_fits_are_cropped_in_the_middle() {
        let augmentation = ImageAugmentation::default();
        let mut random = Generator::new(1, AUGMENT_STREAM);
        let crop = augmentation.crop(1_000, 3, &mut random);
        assert_eq!(
            crop,
            Crop {
                left: 498,
                top: 0,
                width: 4,
                height: 3
            }
        );
        let crop = augmentation.middle(3, 1_000);
        assert_eq!((crop.width, crop.height), (3, 4));
    }
}
