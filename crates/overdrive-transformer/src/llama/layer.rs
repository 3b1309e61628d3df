use overdrive_fused::rows::RowAngles;
use overdrive_nn::Linear;
use tch::Tensor;

use super::block_norms::BlockNorms;
use super::stream::Stream;
use crate::attention::{AttentionStep, RotaryAttention};
use crate::config::NormPosition::{AfterAttention, AfterMlp, BeforeAttention, BeforeMlp};
use crate::decode_step::DecodeBuffers;
use crate::feed_forward::FeedForward;
use crate::gated_delta_net::GatedDeltaNet;
use crate::gpt2::dropped;
use crate::latent_attention::LatentAttention;
use crate::moe::{ExpertLoad, LoadBalance};
use crate::parallel_block::ParallelBlock;
use crate::parameters::ParameterMap;
use crate::per_layer::PerLayerBlock;
use crate::projections::{LinearVisitor, ParameterVisitor};
use crate::rms_norm::RmsNorm;
use crate::{LlamaConfig, Result};

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
    /// Gemma 3n and 4.
    WithInput(PerLayerBlock),
}

/// The attention of a block.
#[derive(Debug)]
#[allow(
    clippy::large_enum_variant,
    reason = "a model has few layers, and a box would only be in the way"
)]
pub(super) enum Attention {
    Rotary(RotaryAttention),
    /// DeepSeek.
    Latent(LatentAttention),
    /// Most blocks of Qwen3-Next and Qwen3.5.
    DeltaNet(GatedDeltaNet),
}

impl Attention {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        layer: i64,
        config: &LlamaConfig,
    ) -> Result<Attention> {
        let prefix = &config.layer_name(layer);
        if let Some(sizes) = config.delta_net_of(layer) {
            let delta_net = GatedDeltaNet::take(parameters, prefix, config, sizes)?;
            return Ok(Attention::DeltaNet(delta_net));
        }
        Ok(match &config.mla {
            Some(sizes) => {
                Attention::Latent(LatentAttention::take(parameters, prefix, config, sizes)?)
            }
            None => Attention::Rotary(RotaryAttention::take(parameters, prefix, config)?),
        })
    }

    fn forward(&self, x: &Tensor, step: AttentionStep<'_, '_>) -> Result<Tensor> {
        match self {
            Attention::Rotary(attention) => attention.forward(x, step),
            Attention::Latent(attention) => attention.forward(x, step),
            Attention::DeltaNet(delta_net) => delta_net.forward(x, step),
        }
    }

    pub(super) fn layers(&self) -> Box<dyn Iterator<Item = &Linear> + '_> {
        match self {
            Attention::Rotary(attention) => Box::new(attention.layers()),
            Attention::Latent(attention) => Box::new(attention.layers()),
            Attention::DeltaNet(delta_net) => Box::new(delta_net.layers()),
        }
    }

    pub(super) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        match self {
            Attention::Rotary(attention) => attention.visit(visit),
            Attention::Latent(attention) => attention.visit(visit),
            Attention::DeltaNet(delta_net) => delta_net.visit(visit),
        }
    }

    pub(super) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        match self {
            Attention::Rotary(attention) => attention.visit_parameters(prefix, visit),
            Attention::Latent(attention) => attention.visit_parameters(prefix, visit),
            Attention::DeltaNet(delta_net) => delta_net.visit_parameters(prefix, visit),
        }
    }
}

#[derive(Debug)]
pub(super) struct Block {
    pub(super) norms: BlockNorms,
    pub(super) attention: Attention,
    pub(super) mlp: FeedForward,
    /// The factor of the outputs of attention and of the feed-forward block (Granite).
    pub(super) residual_scale: Option<f64>,
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
            Layer::WithInput(block) => {
                let x = block.forward(&stream.sum()?, step, balance)?;
                Ok(Stream::new(x))
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
            Layer::Parallel(_) | Layer::WithInput(_) => {
                let what = "this layer has no forward pass on slices";
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
        let (normalised, x) = stream.normalised(self.norms.at(BeforeAttention), fused)?;
        let mut mixed = self.attention.forward(&normalised, step)?;
        if let Some(norm) = self.norms.at(AfterAttention) {
            mixed = norm.forward_for(x.kind(), &mixed, fused)?;
        }
        let stream = Stream::with_delta(x, dropped(self.scaled(mixed)?, dropout)?);
        let (normalised, x) = stream.normalised(self.norms.at(BeforeMlp), fused)?;
        let (mut delta, load) = self.mlp.forward(&normalised, fused, balance)?;
        if let Some(norm) = self.norms.at(AfterMlp) {
            delta = norm.forward_for(x.kind(), &delta, fused)?;
        }
        Ok(Stream {
            load: ExpertLoad::sum(before, load)?,
            ..Stream::with_delta(x, dropped(self.scaled(delta)?, dropout)?)
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
        match self.norms.at(BeforeAttention) {
            norm if !first => add_rows(norm, x, delta, sum, normalised)?,
            Some(norm) => norm.forward_rows(x, normalised)?,
            None => normalised.copy_from_slice(x),
        }
        let Attention::Rotary(attention) = &self.attention else {
            let what = "this attention has no forward pass on slices";
            return Err(overdrive_core::Error::internal(what).into());
        };
        *on_slices &= attention.forward_rows(normalised, step, angles, joint, inner, delta)?;
        if let Some(norm) = self.norms.at(AfterAttention) {
            norm.forward_rows(delta, sum)?;
            std::mem::swap(delta, sum);
        }
        self.scale_rows(delta);
        add_rows(self.norms.at(BeforeMlp), x, delta, sum, normalised)?;
        *on_slices &= self.mlp.forward_rows(normalised, joint, inner, delta)?;
        if let Some(norm) = self.norms.at(AfterMlp) {
            norm.forward_rows(delta, sum)?;
            std::mem::swap(delta, sum);
        }
        self.scale_rows(delta);
        Ok(())
    }

    /// Multiplies the output of attention or of the feed-forward block.
    fn scaled(&self, delta: Tensor) -> Result<Tensor> {
        match self.residual_scale {
            None => Ok(delta),
            Some(scale) => Ok(delta.f_mul_scalar(scale)?),
        }
    }

    /// Multiplies rows in slices as [`scaled`](Self::scaled) does.
    fn scale_rows(&self, delta: &mut [f32]) {
        if let Some(scale) = self.residual_scale {
            delta.iter_mut().for_each(|delta| *delta *= scale as f32);
        }
    }
}

/// Adds `delta` to the stream `x`, and writes the normalised sum, or the sum if there is no norm, to `normalised`;
/// `sum` is memory to compute in.
fn add_rows(
    norm: Option<&RmsNorm>,
    x: &mut Vec<f32>,
    delta: &[f32],
    sum: &mut Vec<f32>,
    normalised: &mut [f32],
) -> Result<()> {
    let Some(norm) = norm else {
        x.iter_mut().zip(delta).for_each(|(x, delta)| *x += delta);
        normalised.copy_from_slice(x);
        return Ok(());
    };
    norm.forward_sum_rows(x, delta, sum, normalised)?;
    std::mem::swap(x, sum);
    Ok(())
}
