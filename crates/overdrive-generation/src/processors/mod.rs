//! The changes of scores before a token is chosen, with the arithmetic and in the order of
//! transformers' processors of the same names. A score of -∞ excludes a token.

use crate::{GenerationConfig, TokenMask};

mod biases;
mod lengths;
mod penalties;

pub(crate) use penalties::TokenCounts;

/// The tokens of a row so far.
#[derive(Debug, Clone, Copy)]
pub(crate) struct History<'a> {
    /// The ids of prompt and continuation.
    pub(crate) ids: &'a [i64],
    /// The number of them that are continuation.
    pub(crate) new: usize,
}

impl History<'_> {
    /// Returns the number of tokens of the prompt.
    fn prompt(self) -> usize {
        self.ids.len() - self.new
    }
}

/// Returns `true` if [`process`] may change a score of a row with this `history`.
pub(crate) fn changes(config: &GenerationConfig, history: History<'_>) -> bool {
    penalties::applies(config)
        || biases::applies(config, history)
        || lengths::applies(config, history)
        || config.remove_invalid_values
}

/// Applies everything that `config` asks for up to the temperature; tokens that are not in `allowed`
/// are excluded.
pub(crate) fn process(
    scores: &mut [f32],
    history: History<'_>,
    allowed: Option<&TokenMask>,
    config: &GenerationConfig,
    counts: &mut TokenCounts,
) {
    biases::bias(scores, history, config);
    penalties::penalize(scores, history, config, counts);
    biases::bad_words(scores, history, config);
    lengths::minimum(scores, history, config);
    if let Some(allowed) = allowed {
        allowed.exclude_others(scores);
    }
    // After the constraint, which cannot exclude a forced token.
    lengths::forced(scores, history, config);
    if config.remove_invalid_values {
        scores.iter_mut().for_each(valid);
    }
    lengths::decay(scores, history, config);
    exclude(scores, &config.suppress_tokens);
    let forced_first = history.prompt() == 1 && config.forced_bos_token_id.is_some();
    if history.new == usize::from(forced_first) {
        exclude(scores, &config.begin_suppress_tokens);
    }
}

fn valid(score: &mut f32) {
    *score = if score.is_nan() {
        0.0
    } else {
        score.clamp(f32::MIN, f32::MAX)
    };
}

/// Returns the score of token `id`, if the vocabulary has it.
fn score(scores: &mut [f32], id: i64) -> Option<&mut f32> {
    usize::try_from(id).ok().and_then(|id| scores.get_mut(id))
}

fn exclude(scores: &mut [f32], ids: &[i64]) {
    for &id in ids {
        if let Some(score) = score(scores, id) {
            *score = f32::NEG_INFINITY;
        }
    }
}

#[cfg(test)]
mod tests;
