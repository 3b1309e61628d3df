//! The changes of scores before a token is chosen, with the arithmetic and in the order of
//! transformers' processors of the same names. A score of -∞ excludes a token.

use crate::{GenerationConfig, TokenMask};

mod biases;
mod dense;
mod lengths;
mod penalties;

pub(crate) use penalties::TokenCounts;

/// The tokens of a row so far.
#[derive(Debug, Clone, Copy)]
pub(crate) struct History<'a> {
    /// The ids of prompt and continuation.
    pub(crate) ids: &'a [i64],
    /// The number of ids that belong to the continuation.
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

/// The scores of a row on which [`process`] makes its changes. Ids outside of the vocabulary are ignored.
///
/// The order of the changes is decided by [`process`] alone; the host makes them at once (`[f32]`), a device
/// records them for all rows of a step (`RowChanges`).
pub(crate) trait Scores {
    /// Returns the size of the vocabulary.
    fn vocabulary(&self) -> usize;

    /// Adds `value` to the score of `id`.
    fn add(&mut self, id: i64, value: f32);

    /// Divides the score of `id` by `penalty` if it is positive, and multiplies it if it is negative.
    fn penalize_repetition(&mut self, id: usize, penalty: f32);

    /// Subtracts `frequency`, and then `presence`, from the score of `id`.
    fn subtract(&mut self, id: usize, frequency: f32, presence: f32);

    /// Excludes `ids`.
    fn exclude(&mut self, ids: &[i64]);

    /// Excludes all tokens but those of `allowed`.
    fn keep_only(&mut self, allowed: &TokenMask);

    /// Excludes all tokens but `ids`, whose scores become 0.
    fn force(&mut self, ids: &[i64]);

    /// Replaces NaN by 0 and infinities by the largest numbers.
    fn make_valid(&mut self);

    /// Adds `gain` times the absolute value to the scores of `ids`, unless they are excluded.
    fn decay(&mut self, ids: &[i64], gain: f64);
}

/// Applies everything that `config` asks for up to the temperature; tokens that are not in `allowed`
/// are excluded.
pub(crate) fn process<S: Scores + ?Sized>(
    scores: &mut S,
    history: History<'_>,
    allowed: Option<&TokenMask>,
    config: &GenerationConfig,
    counts: &mut TokenCounts,
) {
    biases::bias(scores, history, config);
    penalties::penalize(scores, history, config, counts);
    if config.remove_invalid_values {
        // Runs before all exclusions. In transformers this processor also turns exclusions into finite scores, and a
        // beam search would then fill up with tokens that a constraint does not allow.
        scores.make_valid();
    }
    penalties::no_repeated_ngram(scores, history, config);
    biases::exclusions(scores, history, config);
    lengths::minimum(scores, history, config);
    if let Some(allowed) = allowed {
        scores.keep_only(allowed);
    }
    // Runs after the constraint, so that the constraint cannot exclude a forced token.
    lengths::forced(scores, history, config);
    lengths::decay(scores, history, config);
    scores.exclude(&config.suppress_tokens);
    let forced_first = history.prompt() == 1 && config.forced_bos_token_id.is_some();
    if history.new == usize::from(forced_first) {
        scores.exclude(&config.begin_suppress_tokens);
    }
}

#[cfg(test)]
mod tests;
