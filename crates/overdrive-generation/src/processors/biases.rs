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
    for (sequence, bias) in &config.sequence_bias {
        if let Some(last) = completed_by(sequence, history.ids) {
            scores.add(last, *bias as f32);
        }
    }
    for (&id, &bias) in &config.logit_bias {
        scores.add(id, bias as f32);
    }
}

/// Excludes the last token of each bad word whose beginning ends the row.
pub(super) fn bad_words<S: Scores + ?Sized>(
    scores: &mut S,
    history: History<'_>,
    config: &GenerationConfig,
) {
    for word in &config.bad_words_ids {
        let is_end = word.len() == 1 && config.eos_token_id.contains(&word[0]);
        if !is_end && let Some(last) = completed_by(word, history.ids) {
            scores.exclude(&[last]);
        }
    }
}

/// Returns the token that completes `sequence` after `ids`.
fn completed_by(sequence: &[i64], ids: &[i64]) -> Option<i64> {
    let (&last, before) = sequence.split_last()?;
    ids.ends_with(before).then_some(last)
}
