use overdrive_nn::Linear;
use tch::Tensor;

use super::PerLayerAttention;
use super::altup::{AltUp, Laurel};
use super::experts::ParallelExperts;
use super::inputs::InputGate;
use crate::attention::AttentionStep;
use crate::config::PerLayerConfig;
use crate::feed_forward::FeedForward;
use crate::moe::LoadBalance;
use crate::parameters::ParameterMap;
use crate::projections::{LinearVisitor, ParameterVisitor};
use crate::rms_norm::RmsNorm;
use crate::{LlamaConfig, Result};

/// The names of the norms before and after attention and the feed-forward block.
const NORMS: [&str; 4] = [
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
];

/// A layer of Gemma 3n or Gemma 4.
#[derive(Debug)]
pub(crate) struct PerLayerBlock {
    layer: i64,
    norms: [RmsNorm; 4],
    attention: PerLayerAttention,
    mlp: FeedForward,
    experts: Option<ParallelExperts>,
    input: Option<InputGate>,
    /// The parallel residual streams and the learned residual connection (Gemma 3n).
    streams: Option<(AltUp, Laurel)>,
    /// The factor of the residual stream after the layer (Gemma 4).
    scalar: Option<Tensor>,
}

impl PerLayerBlock {
    pub(crate) fn take(
        parameters: &mut ParameterMap,
        config: &LlamaConfig,
        sizes: &PerLayerConfig,
        layer: i64,
    ) -> Result<PerLayerBlock> {
        let prefix = &format!("model.layers.{layer}");
        let [first, second, third, fourth] =
            NORMS.map(|name| RmsNorm::take(parameters, &format!("{prefix}.{name}"), config));
        let input = (sizes.hidden_size_per_layer_input > 0)
            .then(|| InputGate::take(parameters, prefix, config));
        let streams = sizes.altup.as_ref().map(|altup| {
            let laurel = Laurel::take(parameters, prefix, config)?;
            Ok::<_, crate::Error>((AltUp::take(parameters, prefix, config, altup)?, laurel))
        });
        let experts = config.experts.as_ref();
        let experts =
            experts.map(|experts| ParallelExperts::take(parameters, prefix, config, experts));
        let scalar =
            (sizes.altup.is_none()).then(|| parameters.take(&format!("{prefix}.layer_scalar")));
        Ok(PerLayerBlock {
            layer,
            norms: [first?, second?, third?, fourth?],
            attention: PerLayerAttention::take(parameters, prefix, config, layer)?,
            mlp: FeedForward::take(parameters, layer, config)?,
            experts: experts.transpose()?,
            input: input.transpose()?,
            streams: streams.transpose()?,
            scalar: scalar.transpose()?,
        })
    }

    /// Computes the residual stream `(B, T, C)`, or the streams `(B, T, N, C)`, after the layer.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        step: AttentionStep<'_, '_>,
        balance: &LoadBalance,
    ) -> Result<Tensor> {
        let (fused, training) = (step.execution.fused_kernels, balance.training);
        let input = match step.layer_inputs {
            Some(inputs) => Some(inputs.f_select(2, self.layer)?),
            None => None,
        };
        let added = |x: &Tensor| match (&self.input, &input) {
            (Some(gate), Some(input)) => Ok(Some(gate.forward(x, input, fused)?)),
            _ => Ok::<_, crate::Error>(None),
        };
        let Some((altup, laurel)) = &self.streams else {
            let mut x = self.computed(x, None, step, balance)?;
            if let Some(delta) = added(&x)? {
                x = x.f_add(&delta)?;
            }
            return match &self.scalar {
                Some(scalar) => Ok(x.f_mul(scalar)?),
                None => Ok(x),
            };
        };
        let predicted = altup.predict(x, training, fused)?;
        let active = altup.active(&predicted)?.f_contiguous()?;
        let computed = self.computed(&active, Some(laurel), step, balance)?;
        let corrected = altup.correct(&predicted, &computed, training, fused)?;
        match added(&altup.output(&corrected)?)? {
            Some(delta) => altup.add_to_others(&corrected, &delta),
            None => Ok(corrected),
        }
    }

    /// Computes attention and the feed-forward block of one residual stream `(B, T, C)`.
    fn computed(
        &self,
        x: &Tensor,
        laurel: Option<&Laurel>,
        step: AttentionStep<'_, '_>,
        balance: &LoadBalance,
    ) -> Result<Tensor> {
        let fused = step.execution.fused_kernels;
        let [before_attention, after_attention, before_mlp, after_mlp] = &self.norms;
        let normalised = before_attention.forward(x, fused)?;
        let mixed = self.attention.forward(&normalised, step)?;
        let mixed = after_attention.forward(&mixed, fused)?;
        let (normalised, x) = match laurel {
            None => before_mlp.forward_sum(x, &mixed, fused)?,
            Some(laurel) => {
                let residual = laurel.forward(&normalised, fused)?;
                let sum = x.f_add(&mixed)?.f_add(&residual)?;
                let sum = sum.f_div_scalar(2f64.sqrt())?;
                (before_mlp.forward(&sum, fused)?, sum)
            }
        };
        let (mut delta, _) = self.mlp.forward(&normalised, fused, balance)?;
        if let Some(experts) = &self.experts {
            delta = experts.add_to(&delta, &x, fused)?;
        }
        Ok(x.f_add(&after_mlp.forward(&delta, fused)?)?)
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = &Linear> {
        let streams = self.streams.iter();
        let streams = streams.flat_map(|(altup, laurel)| altup.layers().chain(laurel.layers()));
        let own = self.attention.layers().chain(self.mlp.layers());
        let input = self.input.iter().flat_map(InputGate::layers);
        let experts = self.experts.iter().flat_map(ParallelExperts::layers);
        own.chain(streams).chain(input).chain(experts)
    }

    pub(crate) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        self.attention.visit(visit)?;
        self.mlp.visit(visit)?;
        if let Some(experts) = &mut self.experts {
            experts.visit(visit)?;
        }
        if let Some((altup, laurel)) = &mut self.streams {
            altup.visit(visit)?;
            laurel.visit(visit)?;
        }
        match &mut self.input {
            Some(input) => input.visit(visit),
            None => Ok(()),
        }
    }

    pub(crate) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        if let Some(scalar) = &mut self.scalar {
            visit(&format!("{prefix}.layer_scalar"), scalar)?;
        }
        self.attention.visit_parameters(prefix, visit)?;
        for (name, norm) in NORMS.iter().zip(&mut self.norms) {
            norm.visit_parameters(&format!("{prefix}.{name}"), visit)?;
        }
        if let Some(experts) = &mut self.experts {
            experts.visit_parameters(prefix, visit)?;
        }
        if let Some((altup, laurel)) = &mut self.streams {
            altup.visit_parameters(prefix, visit)?;
            laurel.visit_parameters(prefix, visit)?;
        }
        match &mut self.input {
            Some(input) => input.visit_parameters(prefix, visit),
            None => Ok(()),
        }
    }
}
