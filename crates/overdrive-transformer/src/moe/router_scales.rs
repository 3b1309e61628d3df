//! The factors of the router of Gemma 4.

use tch::Tensor;

use super::names::router_scale_names;
use crate::parameters::ParameterMap;
use crate::projections::ParameterVisitor;
use crate::rms_norm::normalised_without_weight;
use crate::{LlamaConfig, Result};

/// The factors of the rows that are scored, which are normalised before, and of the weights of experts.
#[derive(Debug)]
pub(super) struct RouterScales {
    /// `(C,)`.
    of_channels: Tensor,
    /// `(E,)`.
    of_experts: Tensor,
    /// The factor of all channels.
    root: f64,
    eps: f64,
}

impl RouterScales {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
    ) -> Result<RouterScales> {
        let [channels, experts] = router_scale_names(prefix);
        Ok(RouterScales {
            of_channels: parameters.take(&channels)?,
            of_experts: parameters.take(&experts)?,
            root: (config.hidden_size as f64).sqrt().recip(),
            eps: config.rms_norm_eps,
        })
    }

    /// Returns the rows that are scored of `x (N, C)`.
    pub(super) fn scored(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let normalised = normalised_without_weight(x, self.eps, fused)?;
        Ok(normalised
            .f_mul(&self.of_channels)?
            .f_mul_scalar(self.root)?)
    }

    /// Multiplies the `weights (N, K)` of the chosen `experts (N, K)`.
    pub(super) fn scaled(&self, weights: &Tensor, experts: &Tensor) -> Result<Tensor> {
        // A row of all factors for each token: an index into one row would add up gradients in any order on a GPU.
        let all = self.of_experts.f_unsqueeze(0)?;
        let all = all.f_expand([experts.size()[0], -1], false)?;
        Ok(weights.f_mul(&all.f_gather(-1, experts, false)?)?)
    }

    pub(super) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        let [channels, experts] = router_scale_names(prefix);
        visit(&channels, &mut self.of_channels)?;
        visit(&experts, &mut self.of_experts)
    }
}
