use overdrive_nn::Linear;
use tch::Tensor;

use crate::config::ExpertsConfig;
use crate::moe::MixtureOfExperts;
use crate::parameters::ParameterMap;
use crate::projections::{LinearVisitor, ParameterVisitor};
use crate::rms_norm::RmsNorm;
use crate::{LlamaConfig, Result};

/// The names of the norms after the feed-forward block, after the experts and before them.
pub(super) const NORMS: [&str; 3] = [
    "post_feedforward_layernorm_1",
    "post_feedforward_layernorm_2",
    "pre_feedforward_layernorm_2",
];

/// The mixture of experts beside the feed-forward block of a layer (Gemma 4).
#[derive(Debug)]
pub(super) struct ParallelExperts {
    mixture: MixtureOfExperts,
    norms: [RmsNorm; 3],
}

impl ParallelExperts {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
        experts: &ExpertsConfig,
    ) -> Result<ParallelExperts> {
        let [after_mlp, after, before] =
            NORMS.map(|name| RmsNorm::take(parameters, &format!("{prefix}.{name}"), config));
        Ok(ParallelExperts {
            mixture: MixtureOfExperts::take(parameters, prefix, config, experts)?,
            norms: [after_mlp?, after?, before?],
        })
    }

    /// Adds the experts of the residual stream `x (B, T, C)` to `mlp`, the output of the feed-forward block.
    pub(super) fn add_to(&self, mlp: &Tensor, x: &Tensor, fused: bool) -> Result<Tensor> {
        let [after_mlp, after, before] = &self.norms;
        let normalised = before.forward(x, fused)?;
        let y = self.mixture.forward_chosen_by(x, &normalised, fused)?;
        let mlp = after_mlp.forward(mlp, fused)?;
        Ok(mlp.f_add(&after.forward(&y, fused)?)?)
    }

    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.mixture.layers()
    }

    pub(super) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        self.mixture.visit(visit)
    }

    pub(super) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        self.mixture.visit_parameters(prefix, visit)?;
        for (name, norm) in NORMS.iter().zip(&mut self.norms) {
            norm.visit_parameters(&format!("{prefix}.{name}"), visit)?;
        }
        Ok(())
    }
}
