use super::{History, Scores};
use crate::GenerationConfig;

pub(super) fn applies(config: &GenerationConfig, _history: History<'_>) -> bool {
    !config.sequence_bias.is_empty()
        || !config.logit_bias.is_empty()
        || !config.bad_words_ids.is_empty()
        || !config.suppress_tokens.is_empty()
        || !config.begin_suppress_tokens.is_empty()
}

/// Adds the bias of each sequence whose beginning ends the row to the score of its last token.
pub(super) fn bias<S: Scores + ?Sized>(
    scores: &mut S,
    history: History<'_>,
    config: &GenerationConfig,
) {
    for (id, bias) in biases(history, config) {
        scores.add(id, bias);
    }
}

/// Excludes the tokens with a bias of -∞, and the last token of each bad word whose beginning ends the row.
pub(super) fn exclusions<S: Scores + ?Sized>(
    scores: &mut S,
    history: History<'_>,
    config: &GenerationConfig,
) {
    // Excluded again, because `remove_invalid_values` has given these tokens finite scores.
    for (id, bias) in biases(history, config) {
        if bias == f32::NEG_INFINITY {
            scores.exclude(&[id]);
        }
    }
    for word in &config.bad_words_ids {
        let is_end = word.len() == 1 && config.eos_token_id.contains(&word[0]);
        if !is_end && let Some(last) = completed_by(word, history.ids) {
            scores.exclude(&[last]);
        }
    }
}

/// Returns the tokens that have a bias now.
fn biases(history: History<'_>, config: &GenerationConfig) -> impl Iterator<Item = (i64, f32)> {
    let sequences = config.sequence_bias.iter();
    sequences
        .filter_map(move |(ids, bias)| Some((completed_by(ids, history.ids)?, *bias)))
        .chain(config.logit_bias.iter().map(|(id, bias)| (*id, *bias)))
        .map(|(id, bias)| (id, bias as f32))
}

/// Returns the token that completes `sequence` after `ids`.
fn completed_by(sequence: &[i64], ids: &[i64]) -> Option<i64> {
    let (&last, before) = sequence.split_last()?;
    ids.ends_with(before).then_some(last)
}
