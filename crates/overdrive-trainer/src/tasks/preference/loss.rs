use clap::ValueEnum;
use overdrive_core::{check_option, check_positive};
use serde::{Deserialize, Serialize};
use tch::{Kind, Tensor};

use super::{PreferenceLogProbs, RewardTotals};
use crate::Result;

/// The options of [`dpo_loss`], under the keys of TRL's `DPOConfig` and with its defaults.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct DpoConfig {
    /// β, which bounds the deviation from the reference model: the larger, the closer the policy stays; τ in IPO. Positive.
    /// Default 0.1.
    pub beta: f64,
    /// The loss of a pair. Default [`DpoLossType::Sigmoid`].
    pub loss_type: DpoLossType,
    /// ε, the probability that the answers of a pair are swapped, from 0 to below 0.5; only [`DpoLossType::Robust`] has it.
    /// Default 0.
    pub label_smoothing: f64,
    /// If `true`, the dropouts of the model and of its adapters are off. Default `true`.
    pub disable_dropout: bool,
}

impl Default for DpoConfig {
    fn default() -> Self {
        Self {
            beta: 0.1,
            loss_type: DpoLossType::Sigmoid,
            label_smoothing: 0.0,
            disable_dropout: true,
        }
    }
}

/// The loss of a pair, where δ is the difference between the log-ratios of policy and reference for the chosen and for the
/// rejected answer. The names are those of TRL.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum DpoLossType {
    /// -ln σ(βδ): DPO (Rafailov et al. 2023, arXiv:2305.18290).
    #[default]
    Sigmoid,
    /// max(0, 1 - βδ): SLiC (Zhao et al. 2023, arXiv:2305.10425).
    Hinge,
    /// (δ - 1 / 2β)², with δ of means over the tokens: IPO (Azar et al. 2023, arXiv:2310.12036).
    Ipo,
    /// ((ε - 1) ln σ(βδ) + ε ln σ(-βδ)) / (1 - 2ε): robust DPO (Chowdhury et al. 2024, arXiv:2403.00409).
    Robust,
}

impl DpoConfig {
    /// Checks the ranges of the options.
    ///
    /// # Errors
    /// [`Error::Common`](crate::Error::Common) with the option, its value and what is allowed.
    pub fn validate(&self) -> Result<()> {
        check_positive("beta", self.beta)?;
        let smoothing = self.label_smoothing;
        match self.loss_type {
            DpoLossType::Robust => check_option(
                (0.0..0.5).contains(&smoothing),
                "label_smoothing",
                smoothing,
                "at least 0 and below 0.5",
            )?,
            _ => check_option(
                smoothing == 0.0,
                "label_smoothing",
                smoothing,
                "0 with this `loss_type`; `robust` is the sigmoid loss with label smoothing",
            )?,
        }
        Ok(())
    }
}

/// The loss of the pairs of a batch, and their rewards.
#[derive(Debug)]
#[non_exhaustive]
pub struct DpoOutput {
    /// The mean loss of the pairs, a scalar.
    pub loss: Tensor,
    /// The rewards of the pairs, without gradients.
    pub rewards: RewardTotals,
}

/// Computes the loss of Direct Preference Optimization of B pairs, from the log-probabilities of their answers under the
/// policy, which is trained, and under the reference model.
///
/// The reward of an answer is β times the difference between its log-probabilities under policy and reference. Gradients go
/// to the policy only. The host reads nothing.
///
/// ```
/// use overdrive_trainer::{DpoConfig, PreferenceLogProbs, dpo_loss};
/// use tch::Tensor;
///
/// let log_probs = |chosen: f32, rejected: f32| PreferenceLogProbs {
///     chosen: Tensor::from_slice(&[chosen]),
///     rejected: Tensor::from_slice(&[rejected]),
///     chosen_tokens: Tensor::from_slice(&[4_f32]),
///     rejected_tokens: Tensor::from_slice(&[4_f32]),
/// };
/// let output = dpo_loss(&log_probs(-3.0, -8.0), &log_probs(-5.0, -5.0), &DpoConfig::default())?;
/// // -ln σ(0.1 · ((-3 + 5) - (-8 + 5)))
/// assert!((output.loss.double_value(&[]) - 0.474077).abs() < 1e-6);
/// # Ok::<(), overdrive_trainer::Error>(())
/// ```
///
/// # Errors
/// Those of [`DpoConfig::validate`], and an error of libtorch if the shapes do not fit.
pub fn dpo_loss(
    policy: &PreferenceLogProbs,
    reference: &PreferenceLogProbs,
    config: &DpoConfig,
) -> Result<DpoOutput> {
    config.validate()?;
    let chosen = policy.chosen.f_sub(&reference.chosen.f_detach()?)?;
    let rejected = policy.rejected.f_sub(&reference.rejected.f_detach()?)?;
    let scaled = || chosen.f_sub(&rejected)?.f_mul_scalar(config.beta);
    let losses = match config.loss_type {
        DpoLossType::Sigmoid => scaled()?.f_log_sigmoid()?.f_neg()?,
        DpoLossType::Hinge => scaled()?.f_neg()?.f_add_scalar(1.0)?.f_relu()?,
        DpoLossType::Ipo => {
            // Means over the tokens, as TRL's authors have confirmed with the authors of IPO; sums would grow
            // with the length of the answers.
            let mean = |ratio: &Tensor, tokens: &Tensor| ratio.f_div(&tokens.f_clamp_min(1.0)?);
            let chosen = mean(&chosen, &policy.chosen_tokens)?;
            let rejected = mean(&rejected, &policy.rejected_tokens)?;
            let target = 1.0 / (2.0 * config.beta);
            chosen.f_sub(&rejected)?.f_sub_scalar(target)?.f_square()?
        }
        DpoLossType::Robust => {
            let (scaled, smoothing) = (scaled()?, config.label_smoothing);
            let as_given = scaled.f_log_sigmoid()?.f_mul_scalar(smoothing - 1.0)?;
            let swapped = scaled.f_neg()?.f_log_sigmoid()?.f_mul_scalar(smoothing)?;
            let unbiased = 1.0 / (1.0 - 2.0 * smoothing);
            as_given.f_add(&swapped)?.f_mul_scalar(unbiased)?
        }
    };
    Ok(DpoOutput {
        loss: losses.f_mean(None::<Kind>)?,
        rewards: RewardTotals::of(&chosen, &rejected, config.beta)?,
    })
}
