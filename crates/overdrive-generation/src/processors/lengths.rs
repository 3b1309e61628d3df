use super::{Place, exclude, score};
use crate::GenerationConfig;

pub(super) fn change(config: &GenerationConfig, place: Place<'_>) -> bool {
    let too_short = place.new < config.min_new_tokens || place.present.len() < config.min_length;
    (too_short && !config.eos_token_id.is_empty())
        || config.forced_bos_token_id.is_some()
        || !config.forced_eos_token_id.is_empty()
        || config.exponential_decay_length_penalty.is_some()
}

/// No end before the least length.
pub(super) fn minimum(scores: &mut [f32], place: Place<'_>, config: &GenerationConfig) {
    if place.present.len() < config.min_length || place.new < config.min_new_tokens {
        exclude(scores, &config.eos_token_id);
    }
}

/// The forced first and last tokens.
pub(super) fn forced(scores: &mut [f32], place: Place<'_>, config: &GenerationConfig) {
    let mut force = |ids: &[i64]| {
        scores.fill(f32::NEG_INFINITY);
        for &id in ids {
            if let Some(score) = score(scores, id) {
                *score = 0.0;
            }
        }
    };
    if let Some(id) = config.forced_bos_token_id
        && place.present.len() == 1
    {
        force(&[id]);
    }
    let last = place.new + 1 == config.new_tokens(place.prompt());
    if last && !config.forced_eos_token_id.is_empty() {
        force(&config.forced_eos_token_id);
    }
}

/// Raises the end of text ever more after a start.
pub(super) fn decay(scores: &mut [f32], place: Place<'_>, config: &GenerationConfig) {
    let Some((start, factor)) = config.exponential_decay_length_penalty else {
        return;
    };
    let Some(beyond) = place.new.checked_sub(start).filter(|&beyond| beyond > 0) else {
        return;
    };
    let gain = factor.powf(beyond as f64) - 1.0;
    for &id in &config.eos_token_id {
        if let Some(score) = score(scores, id).filter(|score| score.is_finite()) {
            *score += (f64::from(score.abs()) * gain) as f32;
        }
    }
}
