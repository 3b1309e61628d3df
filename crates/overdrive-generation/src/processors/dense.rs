//! Changes of scores on the host.

use super::Scores;
use crate::TokenMask;

/// Returns the score of token `id`, if the vocabulary has it.
fn score(scores: &mut [f32], id: i64) -> Option<&mut f32> {
    usize::try_from(id).ok().and_then(|id| scores.get_mut(id))
}

fn valid(score: &mut f32) {
    *score = if score.is_nan() {
        0.0
    } else {
        score.clamp(f32::MIN, f32::MAX)
    };
}

impl Scores for [f32] {
    fn vocabulary(&self) -> usize {
        self.len()
    }

    fn add(&mut self, id: i64, value: f32) {
        if let Some(score) = score(self, id) {
            *score += value;
        }
    }

    fn penalize_repetition(&mut self, id: usize, penalty: f32) {
        if let Some(score) = self.get_mut(id) {
            *score = if *score < 0.0 {
                *score * penalty
            } else {
                *score / penalty
            };
        }
    }

    fn subtract(&mut self, id: usize, frequency: f32, presence: f32) {
        if let Some(score) = self.get_mut(id) {
            // In two subtractions, as in vLLM: their sum would round differently.
            *score -= frequency;
            *score -= presence;
        }
    }

    fn exclude(&mut self, ids: &[i64]) {
        for &id in ids {
            if let Some(score) = score(self, id) {
                *score = f32::NEG_INFINITY;
            }
        }
    }

    fn keep_only(&mut self, allowed: &TokenMask) {
        allowed.exclude_others(self);
    }

    fn force(&mut self, ids: &[i64]) {
        self.fill(f32::NEG_INFINITY);
        for &id in ids {
            if let Some(score) = score(self, id) {
                *score = 0.0;
            }
        }
    }

    fn make_valid(&mut self) {
        self.iter_mut().for_each(valid);
    }

    fn decay(&mut self, ids: &[i64], gain: f64) {
        for &id in ids {
            // An excluded token stays excluded: |-∞| times the gain would be +∞.
            if let Some(score) = score(self, id).filter(|score| score.is_finite()) {
                *score += (f64::from(score.abs()) * gain) as f32;
            }
        }
    }
}
