use overdrive_nn::{Linear, LinearWeight};
use tch::{Kind, Tensor};

use super::names::{correction_name, router_module};
use super::router_scales::RouterScales;
use crate::Result;
use crate::config::{ExpertsConfig, LlamaConfig, LlamaFamily};
use crate::parameters::ParameterMap;
use crate::projections::{LinearVisitor, ParameterVisitor, visit_linear};
use crate::sigmoid_gates::sigmoid;

/// The choice of experts for `N` tokens.
#[derive(Debug)]
pub(crate) struct Routing {
    /// The experts of each token `(N, K)`, i64, the most probable one first.
    pub(crate) experts: Tensor,
    /// The factors of their outputs `(N, K)`.
    pub(crate) weights: Tensor,
    /// The probabilities of all experts `(N, E)`, fp32 or wider.
    pub(crate) probabilities: Tensor,
}

/// The linear layer that scores the experts, and the choice by its scores.
#[derive(Debug)]
pub(crate) struct Router {
    gate: Linear,
    per_token: i64,
    /// If `true`, the weights of a token sum to one.
    normalises: bool,
    /// If `true`, the weights are rounded to the dtype of the scores, as those of Qwen's mixtures are, and those of
    /// Mixtral, DeepSeek and Gemma 4 are not.
    rounds: bool,
    /// If `true`, the scores are computed in fp32 at least (DeepSeek): rounded to 16 bits, those of many experts are
    /// equal.
    is_wide: bool,
    /// The number of groups of experts, and of those that the experts of a token are chosen from (DeepSeek).
    groups: Option<[i64; 2]>,
    /// The corrections `(E,)` of the scores by which experts are chosen (DeepSeek-V3), whose scores are sigmoids.
    correction: Option<Tensor>,
    /// The factor of the weights (DeepSeek).
    scale: f64,
    /// The factors of channels and experts (Gemma 4).
    scales: Option<RouterScales>,
}

impl Router {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
        experts: &ExpertsConfig,
    ) -> Result<Router> {
        let mixtral = config.family == LlamaFamily::Mixtral;
        // The softmax over the scores of the chosen experts alone is the division by their sum.
        let gpt_oss = config.family == LlamaFamily::GptOss;
        let qwen3_vl = config.family == LlamaFamily::Qwen3VlMoe;
        let gemma = config.family == LlamaFamily::Gemma4;
        let name = router_module(config.family, prefix);
        let corrected = config.family == LlamaFamily::DeepseekV3;
        let correction = corrected.then(|| parameters.take(&correction_name(prefix)));
        Ok(Router {
            gate: parameters
                .take_linear(&name, config.has_mlp_bias())?
                .without_fp8(),
            per_token: experts.num_experts_per_tok,
            normalises: mixtral || gpt_oss || qwen3_vl || experts.norm_topk_prob,
            rounds: !mixtral && !gemma && !config.family.is_deepseek(),
            is_wide: config.family.is_deepseek(),
            groups: experts.groups(),
            correction: correction.transpose()?,
            scale: experts.routed_scaling_factor,
            scales: gemma
                .then(|| RouterScales::take(parameters, prefix, config))
                .transpose()?,
        })
    }

    pub(super) fn layer(&self) -> &Linear {
        &self.gate
    }

    pub(super) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        visit_linear(&mut self.gate, visit)
    }

    /// Lends the parameters that are not of a linear layer. The corrections are none that adapters could train.
    pub(super) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        match &mut self.scales {
            Some(scales) => scales.visit_parameters(prefix, visit),
            None => Ok(()),
        }
    }

    /// Chooses the experts of the rows `x (N, C)`.
    pub(super) fn route(&self, x: &Tensor, fused: bool) -> Result<Routing> {
        let scored = self.scales.as_ref().map(|scales| scales.scored(x, fused));
        let scored = scored.transpose()?;
        let scores = self.scores(scored.as_ref().unwrap_or(x), fused)?;
        let kind = match scores.kind() {
            Kind::Double => Kind::Double,
            _ => Kind::Float,
        };
        let probabilities = match &self.correction {
            None => scores.f_softmax(-1, kind)?,
            Some(_) => sigmoid(&scores.f_to_kind(kind)?, fused)?,
        };
        let (mut weights, experts) = match self.preferences(&probabilities)? {
            None => probabilities.f_topk(self.per_token, -1, true, true)?,
            Some(preferences) => {
                let (_, experts) = preferences.f_topk(self.per_token, -1, true, true)?;
                (probabilities.f_gather(-1, &experts, false)?, experts)
            }
        };
        if self.normalises {
            let mut sum = weights.f_sum_dim_intlist([-1i64].as_slice(), true, kind)?;
            if self.correction.is_some() {
                // As in transformers: all sigmoids of a token may be 0.
                sum = sum.f_add_scalar(1e-20)?;
            }
            weights = weights.f_div(&sum)?;
        }
        if self.scale != 1.0 {
            weights = weights.f_mul_scalar(self.scale)?;
        }
        if let Some(scales) = &self.scales {
            weights = scales.scaled(&weights, &experts)?;
        }
        if self.rounds {
            weights = weights.f_to_kind(scores.kind())?;
        }
        Ok(Routing {
            experts,
            weights,
            probabilities,
        })
    }

    /// Returns the scores `(N, E)` of the experts.
    fn scores(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        if let (LinearWeight::Dense { weight, .. }, None) = self.gate.in_use()
            && self.is_wide
            && matches!(x.kind(), Kind::Half | Kind::BFloat16)
            && self.gate.active_adapter().is_none()
        {
            let [x, weight] = [x, weight].map(|tensor| tensor.f_to_kind(Kind::Float));
            return Ok(x?.f_linear(&weight?, None::<&Tensor>)?);
        }
        Ok(self.gate.forward_with(x, fused)?)
    }

    /// Returns the numbers `(N, E)` by which experts are chosen, if they are not their probabilities: corrected ones, and
    /// minus infinity for the experts of groups that are not among the best.
    fn preferences(&self, probabilities: &Tensor) -> Result<Option<Tensor>> {
        let corrected = match &self.correction {
            None => probabilities.shallow_clone(),
            Some(correction) => probabilities.f_add(correction)?,
        };
        let Some([groups, chosen]) = self.groups else {
            return Ok(self.correction.as_ref().map(|_| corrected));
        };
        let grouped = corrected.f_unflatten(-1, [groups, -1])?;
        let best = match &self.correction {
            None => grouped.f_amax([-1i64].as_slice(), false)?,
            Some(_) => {
                let (two, _) = grouped.f_topk(2, -1, true, false)?;
                two.f_sum_dim_intlist([-1i64].as_slice(), false, two.kind())?
            }
        };
        let (_, kept) = best.f_topk(chosen, -1, true, false)?;
        let others = best.f_ones_like()?.f_scatter_value(-1, &kept, 0)?;
        let others = others.f_to_kind(Kind::Bool)?.f_unsqueeze(-1)?;
        let limited = grouped.f_masked_fill(&others, f64::NEG_INFINITY)?;
        Ok(Some(limited.f_flatten(-2, -1)?))
    }

    /// Chooses the experts of rows of fp32 in slices by their `scores`, `experts` for each row. `choose` receives the
    /// row, the expert and the weight, `K` times per row.
    pub(super) fn choose(
        &self,
        scores: &[f32],
        experts: usize,
        mut choose: impl FnMut(usize, usize, f32),
    ) {
        let mut best: Vec<(f32, usize)> = Vec::with_capacity(experts);
        for (row, scores) in scores.chunks_exact(experts).enumerate() {
            best.clear();
            best.extend(scores.iter().copied().zip(0..));
            // Equal scores are ordered by index, so that the choice does not depend on the sort.
            best.sort_unstable_by(|a, b| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1)));
            let Some(&(largest, _)) = best.first() else {
                continue;
            };
            let sum: f32 = scores.iter().map(|score| (score - largest).exp()).sum();
            best.truncate(self.per_token.unsigned_abs() as usize);
            let chosen: f32 = best.iter().map(|(score, _)| (score - largest).exp()).sum();
            let total = if self.normalises { chosen } else { sum };
            for &(score, expert) in &best {
                choose(row, expert, (score - largest).exp() / total);
            }
        }
    }
}
