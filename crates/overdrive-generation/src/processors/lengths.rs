use super::{History, exclude, score};
use crate::GenerationConfig;

pub(super) fn applies(config: &GenerationConfig, history: History<'_>) -> bool {
    let too_short = history.new < config.min_new_tokens || history.ids.len() < config.min_length;
    (too_short && !config.eos_token_id.is_empty())
        || config.forced_bos_token_id.is_some()
        || !config.forced_eos_token_id.is_empty()
        || config.exponential_decay_length_penalty.is_some()
}

/// Excludes the end of text before the minimum length.
pub(super) fn minimum(scores: &mut [f32], history: History<'_>, config: &GenerationConfig) {
    if history.ids.len() < config.min_length || history.new < config.min_new_tokens {
        exclude(scores, &config.eos_token_id);
    }
}

/// Forces the first and the last token.
pub(super) fn forced(scores: &mut [f32], history: History<'_>, config: &GenerationConfig) {
    let mut force = |ids: &[i64]| {
        scores.fill(f32::NEG_INFINITY);
        for &id in ids {
            if let Some(score) = score(scores, id) {
                *score = 0.0;
            }
        }
    };
    if let Some(id) = config.forced_bos_token_id
        && history.ids.len() == 1
    {
        force(&[id]);
    }
    let last = history.new + 1 == config.new_tokens(history.prompt());
    if last && !config.forced_eos_token_id.is_empty() {
        force(&config.forced_eos_token_id);
    }
}

/// Raises the score of the end of text ever more after a start.
pub(super) fn decay(scores: &mut [f32], history: History<'_>, config: &GenerationConfig) {
    let Some((start, factor)) = config.exponential_decay_length_penalty else {
        return;
    };
    let Some(beyond) = history.new.checked_sub(start).filter(|&beyond| beyond > 0) else {
        return;
    };
    let gain = factor.powf(beyond as f64) - 1.0;
    for &id in &config.eos_token_id {
        // An excluded token stays excluded: |-∞| times the gain would be +∞.
        if let Some(score) = score(scores, id).filter(|score| score.is_finite()) {
            *score += (f64::from(score.abs()) * gain) as f32;
        }
    }
}
