use overdrive_fused::rows::RowAngles;

use super::stream::Stream;
use crate::Result;
use crate::attention::{AttentionStep, RotaryAttention};
use crate::decode_step::DecodeBuffers;
use crate::gpt2::dropped;
use crate::mlp::FeedForward;
use crate::moe::{ExpertLoad, LoadBalance};
use crate::phi::ParallelBlock;
use crate::rms_norm::RmsNorm;

/// A layer of the model. All layers of a model are of one kind.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "a model has few layers, and a box would only be in the way"
)]
pub(super) enum Layer {
    Serial(Block),
    /// Phi-2.
    Parallel(ParallelBlock),
}

#[derive(Debug)]
pub(super) struct Block {
    pub(super) input_norm: RmsNorm,
    pub(super) attention: RotaryAttention,
    /// The norm before the feed-forward block.
    pub(super) mlp_norm: RmsNorm,
    pub(super) mlp: FeedForward,
    /// The norms of the outputs of attention and of the feed-forward block (Gemma).
    pub(super) output_norms: Option<(RmsNorm, RmsNorm)>,
}

impl Layer {
    pub(super) fn forward(
        &self,
        stream: Stream,
        step: AttentionStep<'_, '_>,
        balance: &LoadBalance,
    ) -> Result<Stream> {
        match self {
            Layer::Serial(block) => block.forward(stream, step, balance),
            Layer::Parallel(block) => {
                let x = stream.sum()?;
                let delta = Some(block.forward(&x, step)?);
                Ok(Stream {
                    x,
                    delta,
                    load: stream.load,
                })
            }
        }
    }

    pub(super) fn forward_rows(
        &self,
        buffers: &mut DecodeBuffers,
        first: bool,
        step: AttentionStep<'_, '_>,
        angles: &RowAngles,
    ) -> Result<()> {
        match self {
            Layer::Serial(block) => block.forward_rows(buffers, first, step, angles),
            Layer::Parallel(_) => {
                let what = "a parallel layer has no forward pass on slices";
                Err(overdrive_core::Error::internal(what).into())
            }
        }
    }
}

impl Block {
    pub(super) fn forward(
        &self,
        mut stream: Stream,
        step: AttentionStep<'_, '_>,
        balance: &LoadBalance,
    ) -> Result<Stream> {
        let (fused, dropout) = (step.execution.fused_kernels, step.residual_dropout);
        let before = stream.load.take();
        let (normalised, x) = stream.normalised(&self.input_norm, fused)?;
        let mut mixed = self.attention.forward(&normalised, step)?;
        if let Some((after_attention, _)) = &self.output_norms {
            mixed = after_attention.forward(&mixed, fused)?;
        }
        mixed = dropped(mixed, dropout)?;
        // The sum and its norm are one pass over the stream.
        let (normalised, x) = self.mlp_norm.forward_sum(&x, &mixed, fused)?;
        let (mut delta, load) = self.mlp.forward(&normalised, fused, balance)?;
        if let Some((_, after_mlp)) = &self.output_norms {
            delta = after_mlp.forward(&delta, fused)?;
        }
        Ok(Stream {
            x,
            delta: Some(dropped(delta, dropout)?),
            load: ExpertLoad::sum(before, load)?,
        })
    }

    /// Computes the block on slices, as [`forward`](Self::forward) does on tensors; the `first` block has no previous
    /// output to add.
    pub(super) fn forward_rows(
        &self,
        buffers: &mut DecodeBuffers,
        first: bool,
        step: AttentionStep<'_, '_>,
        angles: &RowAngles,
    ) -> Result<()> {
        let DecodeBuffers {
            x,
            sum,
            delta,
            normalised,
            joint,
            inner,
            on_slices,
        } = buffers;
        if first {
            self.input_norm.forward_rows(x, normalised)?;
        } else {
            self.input_norm
                .forward_sum_rows(x, delta, sum, normalised)?;
            std::mem::swap(x, sum);
        }
        *on_slices &= self
            .attention
            .forward_rows(normalised, step, angles, joint, inner, delta)?;
        if let Some((after_attention, _)) = &self.output_norms {
            after_attention.forward_rows(delta, sum)?;
            std::mem::swap(delta, sum);
        }
        self.mlp_norm.forward_sum_rows(x, delta, sum, normalised)?;
        std::mem::swap(x, sum);
        *on_slices &= self.mlp.forward_rows(normalised, joint, inner, delta)?;
        if let Some((_, after_mlp)) = &self.output_norms {
            after_mlp.forward_rows(delta, sum)?;
            std::mem::swap(delta, sum);
        }
        Ok(())
    }
}
