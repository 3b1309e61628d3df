use std::ops::Range;
use std::sync::{Mutex, PoisonError};

use overdrive_datasets::ImagePatches;
use overdrive_transformer::{ImageFeatures, ImagePositions, VisionConfig};
use tch::{Device, Kind, Tensor};

use super::{encode, grids_of};
use crate::engine::EngineModel;
use crate::{Error, Result};

/// The images of a request, and what the steps of its sequences need of them.
#[derive(Debug)]
pub(crate) struct PromptImages {
    images: Vec<ImagePatches>,
    positions: ImagePositions,
    /// The ids by which a cache knows the tokens of the prompt: in place of image tokens, negative numbers that follow from
    /// the pixels, so that no other image's keys are taken for theirs.
    pub(crate) keys: Vec<i64>,
    /// The image tokens while the prompt is read. A lock, as the samples of a request share them.
    features: Mutex<Option<ImageFeatures>>,
}

impl PromptImages {
    pub(crate) fn new(
        prompt: &[i64],
        images: Vec<ImagePatches>,
        vision: &VisionConfig,
    ) -> Result<PromptImages> {
        let grids = grids_of(&images, vision)?;
        let positions = vision.positions(prompt, &grids)?;
        let mut keys = prompt.to_vec();
        let mut places = positions.image_tokens.iter();
        for (image, grid) in images.iter().zip(&grids) {
            let digest = image.digest().0;
            let count = vision.image_tokens(*grid).unsigned_abs() as usize;
            for (index, place) in places.by_ref().take(count).enumerate() {
                // Neighbouring tokens have different parts of the digest, so that a block has all of it.
                let part = 8 * (index % 4);
                let mut word = [0; 8];
                word.copy_from_slice(&digest[part..part + 8]);
                keys[*place] = i64::from_le_bytes(word) | i64::MIN;
            }
        }
        Ok(PromptImages {
            images,
            positions,
            keys,
            features: Mutex::new(None),
        })
    }

    /// Returns the difference between the position and the index of a token after the prompt.
    pub(crate) fn delta(&self) -> i64 {
        self.positions.delta
    }

    /// Returns the three positions of the token at `index` of the sequence.
    pub(crate) fn position(&self, index: usize) -> [i64; 3] {
        let given = self.positions.positions.get(index).copied();
        given.unwrap_or([index as i64 + self.positions.delta; 3])
    }

    /// Returns the numbers, among all image tokens, of those in the tokens `range` of the sequence.
    fn within(&self, range: &Range<usize>) -> Range<usize> {
        let before = |end: usize| {
            let all = &self.positions.image_tokens;
            all.partition_point(|place| *place < end)
        };
        before(range.start)..before(range.end)
    }

    /// Computes the image tokens if the tokens `range` of the sequence have any, and they are not known.
    pub(crate) fn encode<M: EngineModel + ?Sized>(
        &self,
        range: &Range<usize>,
        model: &M,
    ) -> Result<()> {
        let mut features = self.features.lock().unwrap_or_else(PoisonError::into_inner);
        if features.is_none() && !self.within(range).is_empty() {
            let tower = |pixels: &Tensor, grids: &[[i64; 2]]| model.encode_images(pixels, grids);
            *features = Some(encode(&self.images, tower)?);
        }
        Ok(())
    }

    /// Returns the image tokens among the tokens `range` of the sequence, which have been [encoded](PromptImages::encode),
    /// and their indices in it, if there are any.
    pub(crate) fn tokens(
        &self,
        range: &Range<usize>,
        device: Device,
    ) -> Result<Option<(&[usize], ImageFeatures)>> {
        let (all, within) = (&self.positions.image_tokens, self.within(range));
        if within.is_empty() {
            return Ok(None);
        }
        let features = self.features.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(whole) = features.as_ref() else {
            return Err(Error::Scheduler("a step reads images that are not encoded"));
        };
        let (from, to) = (within.start as i64, within.end as i64);
        let indices = Tensor::f_arange_start(from, to, (Kind::Int64, device))?;
        let part = whole.select(&indices)?;
        Ok(Some((&all[within], part)))
    }

    /// Drops the image tokens if all of them are among the first `read` tokens, which have been read.
    pub(crate) fn forget(&self, read: usize) {
        if self.within(&(0..read)).end == self.positions.image_tokens.len() {
            *self.features.lock().unwrap_or_else(PoisonError::into_inner) = None;
        }
    }
}
