use tch::{Kind, Tensor};

use super::{PreferenceLogProbs, RewardTotals};
use crate::Result;
use crate::arguments::{DpoConfig, DpoLossType};

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
