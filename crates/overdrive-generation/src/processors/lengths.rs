use super::{History, Scores};
use crate::GenerationConfig;

pub(super) fn applies(config: &GenerationConfig, history: History<'_>) -> bool {
    let too_short = history.new < config.min_new_tokens.max(config.min_tokens)
        || history.ids.len() < config.min_length;
    (too_short && !(config.eos_token_id.is_empty() && config.stop_token_ids.is_empty()))
        || config.forced_bos_token_id.is_some()
        || !config.forced_eos_token_id.is_empty()
        || config.exponential_decay_length_penalty.is_some()
}

/// Excludes the end of text, and stop tokens, before their minimum length.
pub(super) fn minimum<S: Scores + ?Sized>(
    scores: &mut S,
    history: History<'_>,
    config: &GenerationConfig,
) {
    if history.ids.len() < config.min_length || history.new < config.min_new_tokens {
        scores.exclude(&config.eos_token_id);
    }
    if history.new < config.min_tokens {
        scores.exclude(&config.eos_token_id);
        scores.exclude(&config.stop_token_ids);
    }
}

/// Forces the first and the last token.
pub(super) fn forced<S: Scores + ?Sized>(
    scores: &mut S,
    history: History<'_>,
    config: &GenerationConfig,
) {
    if let Some(id) = config.forced_bos_token_id
        && history.ids.len() == 1
    {
        scores.force(&[id]);
    }
    let last = history.new + 1 == config.new_tokens(history.prompt());
    if last && !config.forced_eos_token_id.is_empty() {
        scores.force(&config.forced_eos_token_id);
    }
}

/// Raises the score of the end of text by a growing amount from a start position on.
pub(super) fn decay<S: Scores + ?Sized>(
    scores: &mut S,
    history: History<'_>,
    config: &GenerationConfig,
) {
    let Some((start, factor)) = config.exponential_decay_length_penalty else {
        return;
    };
    if let Some(beyond) = history.new.checked_sub(start).filter(|&beyond| beyond > 0) {
        scores.decay(&config.eos_token_id, factor.powf(beyond as f64) - 1.0);
    }
}
