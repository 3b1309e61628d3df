use tch::Tensor;

use crate::layer_norm::LayerNorm;
use crate::parameters::ParameterMap;
use crate::projections::ParameterVisitor;
use crate::rms_norm::RmsNorm;
use crate::{LlamaConfig, LlamaFamily, Result};

/// A norm whose kind depends on the family: the one after the last layer, and those of heads.
#[derive(Debug)]
pub(crate) enum Norm {
    Rms(RmsNorm),
    /// Phi-2.
    Layer(LayerNorm),
}

impl Norm {
    pub(crate) fn take(
        parameters: &mut ParameterMap,
        name: &str,
        config: &LlamaConfig,
    ) -> Result<Norm> {
        Ok(match config.family {
            LlamaFamily::Phi => Norm::Layer(LayerNorm::take(
                parameters,
                name,
                true,
                config.rms_norm_eps,
            )?),
            _ => Norm::Rms(RmsNorm::take(parameters, name, config)?),
        })
    }

    pub(crate) fn forward(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        match self {
            Norm::Rms(norm) => norm.forward(x, fused),
            Norm::Layer(norm) => norm.forward(x),
        }
    }

    /// Normalises rows of f32 as [`forward`](Self::forward) does.
    pub(crate) fn forward_rows(&self, x: &[f32], y: &mut [f32]) -> Result<()> {
        match self {
            Norm::Rms(norm) => norm.forward_rows(x, y),
            Norm::Layer(_) => {
                let what = "a LayerNorm has no forward pass on slices";
                Err(overdrive_core::Error::internal(what).into())
            }
        }
    }

    pub(crate) fn visit_parameters(
        &mut self,
        name: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        match self {
            Norm::Rms(norm) => norm.visit_parameters(name, visit),
            Norm::Layer(norm) => norm.visit_parameters(name, visit),
        }
    }
}
