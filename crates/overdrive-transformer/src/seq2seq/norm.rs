use tch::Tensor;

use crate::Result;
use crate::layer_norm::LayerNorm;
use crate::norm::Norm as AnyNorm;
use crate::parameters::ParameterMap;
use crate::projections::ParameterVisitor;
use crate::rms_norm::RmsNorm;

/// The norm of a sublayer or a stack.
#[derive(Debug)]
pub(super) struct Norm {
    name: String,
    norm: AnyNorm,
}

impl Norm {
    /// Takes T5's norm: without a mean and a bias.
    pub(super) fn rms(parameters: &mut ParameterMap, name: &str, eps: f64) -> Result<Norm> {
        Ok(Norm {
            name: name.to_owned(),
            norm: AnyNorm::Rms(RmsNorm::take_plain(parameters, name, eps)?),
        })
    }

    /// Takes BART's norm.
    pub(super) fn layer(parameters: &mut ParameterMap, name: &str) -> Result<Norm> {
        // PyTorch's default, which no key of the configuration changes.
        let eps = 1e-5;
        Ok(Norm {
            name: name.to_owned(),
            norm: AnyNorm::Layer(LayerNorm::take(parameters, name, true, eps)?),
        })
    }

    pub(super) fn forward(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        match &self.norm {
            // A model in fp16 whose last projections are fp32 has a residual stream in fp32, and its layers take
            // fp16; without a graph of autocast, in which weights are fp32, the norm is where it changes.
            AnyNorm::Rms(norm) if x.kind() != norm.kind() => {
                Ok(norm.forward(x, false)?.f_to_kind(norm.kind())?)
            }
            norm => norm.forward(x, fused),
        }
    }

    pub(super) fn visit_parameters(
        &mut self,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        self.norm.visit_parameters(&self.name, visit)
    }
}
