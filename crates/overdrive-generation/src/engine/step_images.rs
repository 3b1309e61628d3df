use overdrive_kv_cache::SequenceId;
use overdrive_sys::transfer::to_device;
use overdrive_transformer::{ImageFeatures, ImageTokens};
use tch::{Device, Tensor};

use super::sample::Sample;
use super::scheduler::{Chunk, ScheduledSequence};
use crate::Result;

type Sequence = ScheduledSequence<SequenceId, Sample>;

/// The input of a step that reads tokens of a prompt with images.
pub(super) struct StepImages {
    /// The token ids `(1, T)`; those of the cache are other numbers for image tokens.
    pub(super) input_ids: Tensor,
    /// The three positions of each token, `(3, 1, T)`.
    pub(super) position_ids: Tensor,
    /// The image tokens, if the step reads any.
    pub(super) tokens: Option<ImageTokens>,
}

impl StepImages {
    /// Returns the input of `chunks`; `None` if they read no prompt with images. After the prompt, the cache knows the tokens
    /// and their positions.
    pub(super) fn of<'s>(
        chunks: &[Chunk],
        sequence: impl Fn(&Chunk) -> &'s Sequence,
        device: Device,
    ) -> Result<Option<StepImages>> {
        let reads = |chunk: &Chunk| {
            let sample = &sequence(chunk).data;
            sample.images.is_some() && chunk.start < sample.row.prompt
        };
        if !chunks.iter().any(reads) {
            return Ok(None);
        }
        let mut row = Row::default();
        for chunk in chunks {
            row.add(chunk, sequence(chunk), device)?;
        }
        row.into_input(device).map(Some)
    }
}

/// The tokens of a step, on the host.
#[derive(Default)]
struct Row {
    ids: Vec<i64>,
    /// The positions on each axis.
    positions: [Vec<i64>; 3],
    /// The indices of image tokens among `ids`.
    indices: Vec<i64>,
    features: Vec<ImageFeatures>,
}

impl Row {
    fn add(&mut self, chunk: &Chunk, sequence: &Sequence, device: Device) -> Result<()> {
        let images = sequence.data.images.as_deref();
        if let Some(images) = images
            && let Some((own, part)) = images.tokens(&(chunk.start..chunk.end), device)?
        {
            let first = self.ids.len();
            let indices = own.iter().map(|index| (first + index - chunk.start) as i64);
            self.indices.extend(indices);
            self.features.push(part);
        }
        let proposed = sequence.data.proposal.iter().take(chunk.proposed);
        self.ids.extend(&sequence.tokens[chunk.start..chunk.end]);
        self.ids.extend(proposed);
        for index in chunk.start..chunk.end + chunk.proposed {
            let position = match images {
                Some(images) => images.position(index),
                None => [index as i64; 3],
            };
            for (axis, position) in self.positions.iter_mut().zip(position) {
                axis.push(position);
            }
        }
        Ok(())
    }

    fn into_input(self, device: Device) -> Result<StepImages> {
        let on_device = |numbers: &[i64], shape: &[i64]| -> Result<Tensor> {
            let tensor = Tensor::f_from_slice(numbers)?.f_view(shape)?;
            Ok(to_device(tensor, device)?)
        };
        let tokens = match self.features.is_empty() {
            true => None,
            false => Some(ImageTokens {
                indices: on_device(&self.indices, &[-1])?,
                features: ImageFeatures::cat(&self.features)?,
            }),
        };
        Ok(StepImages {
            input_ids: on_device(&self.ids, &[1, -1])?,
            position_ids: on_device(&self.positions.concat(), &[3, 1, -1])?,
            tokens,
        })
    }
}
