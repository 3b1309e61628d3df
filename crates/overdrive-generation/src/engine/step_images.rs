use overdrive_kv_cache::SequenceId;
use overdrive_sys::transfer::to_device;
use overdrive_transformer::{ImageFeatures, ImageTokens};
use tch::{Device, Tensor};

use super::model::EngineModel;
use super::sample::Sample;
use super::scheduler::{Chunk, ScheduledSequence};
use crate::Result;

/// The input of a step in which a sequence has images.
pub(super) struct StepImages {
    /// The token ids `(1, T)`; those of the cache are other numbers for image tokens.
    pub(super) input_ids: Tensor,
    /// The three positions of each token, `(3, 1, T)`.
    pub(super) position_ids: Tensor,
    /// The image tokens, if the step reads any.
    pub(super) tokens: Option<ImageTokens>,
}

impl StepImages {
    /// Returns the input of `chunks`; `None` if no sequence has images.
    pub(super) fn of<'s, M: EngineModel>(
        chunks: &[Chunk],
        sequence: impl Fn(&Chunk) -> &'s ScheduledSequence<SequenceId, Sample>,
        model: &M,
        device: Device,
    ) -> Result<Option<StepImages>> {
        if chunks
            .iter()
            .all(|chunk| sequence(chunk).data.images.is_none())
        {
            return Ok(None);
        }
        let (mut ids, mut axes) = (Vec::new(), [Vec::new(), Vec::new(), Vec::new()]);
        let (mut indices, mut features) = (Vec::new(), Vec::new());
        for chunk in chunks {
            let sequence = sequence(chunk);
            let images = sequence.data.images.as_deref();
            if let Some(images) = images
                && let Some((own, part)) = images.tokens(chunk.start..chunk.end, model, device)?
            {
                let first = ids.len();
                indices.extend(own.iter().map(|index| (first + index - chunk.start) as i64));
                features.push(part);
            }
            ids.extend(&sequence.tokens[chunk.start..chunk.end]);
            ids.extend(sequence.data.proposal.iter().take(chunk.proposed));
            for index in chunk.start..chunk.end + chunk.proposed {
                let position = match images {
                    Some(images) => images.position(index),
                    None => [index as i64; 3],
                };
                axes.iter_mut()
                    .zip(position)
                    .for_each(|(axis, position)| axis.push(position));
            }
        }
        let on_device = |numbers: &[i64], shape: &[i64]| -> Result<Tensor> {
            Ok(to_device(
                Tensor::f_from_slice(numbers)?.f_view(shape)?,
                device,
            )?)
        };
        let tokens = match features.is_empty() {
            true => None,
            false => Some(ImageTokens {
                indices: on_device(&indices, &[-1])?,
                features: ImageFeatures::cat(&features)?,
            }),
        };
        Ok(Some(StepImages {
            input_ids: on_device(&ids, &[1, -1])?,
            position_ids: on_device(&axes.concat(), &[3, 1, -1])?,
            tokens,
        }))
    }
}
