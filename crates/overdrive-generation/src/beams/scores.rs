//! The scores of all continuations of a prompt's beams by one token.

use crate::arg_max::{for_each_from, kth_best, maximum, sum_exp};
use crate::candidates::Candidates;
use crate::processors::{Marks, Place, process};
use crate::random::SplitMix64;
use crate::{Error, GenerationConfig, Result, TokenMask};

/// One more token for a beam.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Continuation {
    pub(super) beam: usize,
    pub(super) token: i64,
    /// The sum of log-probabilities.
    pub(super) score: f32,
}

/// Turns logits `(V,)` into log-probabilities, and processes those.
pub(super) struct Scorer<'a> {
    pub(super) config: &'a GenerationConfig,
    pub(super) row: usize,
    marks: Marks,
    candidates: Candidates,
    numbers: Vec<f32>,
}

impl<'a> Scorer<'a> {
    pub(super) fn new(config: &'a GenerationConfig, row: usize) -> Self {
        Scorer {
            config,
            row,
            marks: Marks::default(),
            candidates: Candidates::default(),
            numbers: Vec::new(),
        }
    }

    /// Log-probabilities in place; false where everything is excluded.
    pub(super) fn score(
        &mut self,
        scores: &mut [f32],
        ids: &[i64],
        new: usize,
        allowed: Option<&TokenMask>,
    ) -> Result<bool> {
        if !log_softmax(scores) {
            return Err(Error::BadLogits { row: self.row });
        }
        let place = Place { present: ids, new };
        process(scores, place, allowed, self.config, &mut self.marks);
        if !self.config.is_greedy() {
            // A token that ends no beam must be left.
            let keep = (self.config.eos_token_id.len() + 1).max(2);
            let cut = self.candidates.cut_all(scores, self.config, keep);
            if cut.is_none() {
                return Ok(false);
            }
        }
        Ok(!self.config.renormalize_logits || log_softmax(scores))
    }

    /// The `count` best of all continuations, best first; of equals the first.
    pub(super) fn best(&mut self, scores: &[f32], sums: &[f32], count: usize) -> Vec<Continuation> {
        let vocabulary = scores.len() / sums.len();
        let mut all = Vec::new();
        for (beam, (scores, sum)) in scores.chunks_exact(vocabulary).zip(sums).enumerate() {
            let least = kth_best(scores, count.min(vocabulary), &mut self.numbers);
            for_each_from(scores, least.max(f32::MIN), |token, score| {
                all.push(Continuation {
                    beam,
                    token: token as i64,
                    score: score + sum,
                });
            });
        }
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        all.truncate(count);
        all
    }

    /// `count` continuations drawn without replacement, in the order of the draws: the best after a
    /// Gumbel number has been added to each (Kool et al. 2019, arXiv:1903.06059).
    pub(super) fn drawn(
        &mut self,
        scores: &[f32],
        sums: &[f32],
        count: usize,
        random: &mut SplitMix64,
    ) -> Vec<Continuation> {
        let vocabulary = scores.len() / sums.len();
        let mut all = Vec::new();
        for (beam, (scores, sum)) in scores.chunks_exact(vocabulary).zip(sums).enumerate() {
            for_each_from(scores, f32::MIN, |token, score| {
                let score = score + sum;
                // In (0, 1]: its logarithm is finite.
                let gumbel = -(-(1.0 - random.uniform()).ln()).ln();
                let token = token as i64;
                all.push((
                    f64::from(score) + gumbel,
                    Continuation { beam, token, score },
                ));
            });
        }
        all.sort_by(|a, b| b.0.total_cmp(&a.0));
        all.truncate(count);
        all.into_iter()
            .map(|(_, continuation)| continuation)
            .collect()
    }
}

fn log_softmax(scores: &mut [f32]) -> bool {
    let Some(max) = maximum(scores) else {
        return false;
    };
    let shift = sum_exp(scores, max, 1.0).ln();
    // In two steps, as libtorch does: their sum would lose digits.
    scores
        .iter_mut()
        .for_each(|score| *score = (*score - max) - shift as f32);
    true
}
