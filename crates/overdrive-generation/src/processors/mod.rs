//! What changes scores before a token is chosen, with the arithmetic of the processors of the same
//! names in transformers and in its order. A score of -∞ excludes a token.

use crate::{GenerationConfig, TokenMask};

mod biases;
mod lengths;
mod penalties;

pub(crate) use penalties::Marks;

/// Where a row stands.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Place<'a> {
    /// The ids of prompt and continuation so far.
    pub(crate) present: &'a [i64],
    /// How many of them are continuation.
    pub(crate) new: usize,
}

impl Place<'_> {
    fn prompt(self) -> usize {
        self.present.len() - self.new
    }
}

/// Whether [`process`] may change a score of a row at `place`.
pub(crate) fn changes(config: &GenerationConfig, place: Place<'_>) -> bool {
    penalties::change(config)
        || biases::change(config, place)
        || lengths::change(config, place)
        || config.remove_invalid_values
}

/// Applies all that `config` asks for up to the temperature; `allowed` excludes what it does not hold.
pub(crate) fn process(
    scores: &mut [f32],
    place: Place<'_>,
    allowed: Option<&TokenMask>,
    config: &GenerationConfig,
    marks: &mut Marks,
) {
    biases::bias(scores, place, config);
    penalties::penalize(scores, place, config, marks);
    biases::bad_words(scores, place, config);
    lengths::minimum(scores, place, config);
    if let Some(allowed) = allowed {
        allowed.exclude_others(scores);
    }
    lengths::forced(scores, place, config);
    if config.remove_invalid_values {
        scores.iter_mut().for_each(valid);
    }
    lengths::decay(scores, place, config);
    exclude(scores, &config.suppress_tokens);
    let forced_first = place.prompt() == 1 && config.forced_bos_token_id.is_some();
    if place.new == usize::from(forced_first) {
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

/// The score of token `id`, where the vocabulary has it.
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
