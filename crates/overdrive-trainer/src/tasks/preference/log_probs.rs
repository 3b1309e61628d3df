use overdrive_transformer::{CausalLm, ForwardInput};
use tch::{Kind, Reduction, Tensor};

use super::PreferenceBatch;
use crate::Result;

/// The log-probabilities of the answers of B pairs under a model.
#[derive(Debug)]
pub struct PreferenceLogProbs {
    /// The sums over the tokens of the chosen answers in nats, (B), fp32 or wider.
    pub chosen: Tensor,
    /// The sums over the tokens of the rejected answers in nats, (B).
    pub rejected: Tensor,
    /// The numbers of tokens of the chosen answers, (B), Float.
    pub chosen_tokens: Tensor,
    /// The numbers of tokens of the rejected answers, (B), Float.
    pub rejected_tokens: Tensor,
}

/// Computes the log-probabilities of the answers of `batch`, in one forward pass over its 2 B rows.
///
/// The head computes the logits of the answers only, N · V of them in fp32, not those of the prompts and of the padding. The
/// sums do not depend on the order in which the threads of a GPU end, so that a run can be repeated bit for bit. The
/// load-balancing loss of a mixture of experts is not computed.
///
/// # Errors
/// An error if the batch has a token that is not in the model's vocabulary, or memory runs out.
pub fn preference_log_probs(
    model: &CausalLm,
    batch: &PreferenceBatch,
) -> Result<PreferenceLogProbs> {
    batch.rows.check_ids(model.config().vocab_size())?;
    let tokens = &batch.rows.input_ids;
    let hidden = model.hidden_states(ForwardInput::new(tokens))?;
    let width = hidden.size().last().copied().unwrap_or(0);
    let hidden = hidden.f_reshape([-1, width])?;
    let logits = model.logits(&hidden.f_index_select(0, &batch.positions)?)?;
    let logits = match logits.kind() {
        Kind::Half | Kind::BFloat16 => logits.f_to_kind(Kind::Float)?,
        _ => logits,
    };
    let losses = logits.f_cross_entropy_loss(
        &batch.targets,
        None::<&Tensor>,
        Reduction::None,
        overdrive_datasets::IGNORE_INDEX,
        0.0,
    )?;
    // A scatter writes each position once; `index_add` would add to a row in any order on a GPU.
    let all = Tensor::f_zeros([tokens.numel() as i64], (losses.kind(), losses.device()))?;
    let all = all.f_scatter(0, &batch.positions, &losses.f_neg()?)?;
    let sums = all
        .f_reshape(tokens.size())?
        .f_sum_dim_intlist(1i64, false, None)?;
    let (pairs, counts) = (batch.pairs as i64, &batch.label_counts);
    Ok(PreferenceLogProbs {
        chosen: sums.f_narrow(0, 0, pairs)?,
        rejected: sums.f_narrow(0, pairs, pairs)?,
        chosen_tokens: counts.f_narrow(0, 0, pairs)?,
        rejected_tokens: counts.f_narrow(0, pairs, pairs)?,
    })
}
