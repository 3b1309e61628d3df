//! The scores of all continuations of a prompt's beams by one token.

use overdrive_core::random::Generator;

use crate::processors::{History, TokenCounts, process};
use crate::sampler::cuts::Candidates;
use crate::vector_math::{for_each_from, kth_best, maximum, sum_exp};
use crate::{Error, GenerationConfig, Result, TokenMask};

/// A continuation of a beam by one token.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Continuation {
    pub(super) beam: usize,
    pub(super) token: i64,
    /// The sum of log-probabilities.
    pub(super) score: f32,
}

/// Computes log-probabilities from logits `(V,)`, and applies the processors to them.
pub(super) struct Scorer<'a> {
    pub(super) config: &'a GenerationConfig,
    pub(super) row: usize,
    counts: TokenCounts,
    candidates: Candidates,
    numbers: Vec<f32>,
}

impl<'a> Scorer<'a> {
    pub(super) fn new(config: &'a GenerationConfig, row: usize) -> Self {
        Scorer {
            config,
            row,
            counts: TokenCounts::default(),
            candidates: Candidates::default(),
            numbers: Vec::new(),
        }
    }

    /// Computes log-probabilities in place; returns `false` if everything is excluded.
    pub(super) fn score(
        &mut self,
        scores: &mut [f32],
        ids: &[i64],
        new: usize,
        allowed: Option<&TokenMask>,
    ) -> Result<bool> {
        if !log_softmax(scores) {
            if !self.config.remove_invalid_values {
                return Err(Error::BadLogits { row: self.row });
            }
            // As libtorch's log-softmax, in which one logit that is not finite spoils all.
            scores.fill(f32::NAN);
        }
        let history = History { ids, new };
        process(scores, history, allowed, self.config, &mut self.counts);
        if !self.config.is_greedy() {
            // At least one token that does not end a beam must remain.
            let keep = (self.config.eos_token_id.len() + 1).max(2);
            let cut = self.candidates.cut_all(scores, self.config, keep);
            if cut.is_none() {
                return Ok(false);
            }
        }
        Ok(!self.config.renormalize_logits || log_softmax(scores))
    }

    /// Returns the `count` best of all continuations, best first; equal ones stay in their order.
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
        // A stable sort: equal scores stay in the order of beams and ids, as with transformers' top-k.
        all.sort_by(|a, b| b.score.total_cmp(&a.score));
        all.truncate(count);
        all
    }

    /// Samples `count` continuations without replacement, in the order of the draws: the best ones
    /// after a Gumbel number has been added to each (Kool et al. 2019, arXiv:1903.06059).
    pub(super) fn sample(
        &mut self,
        scores: &[f32],
        sums: &[f32],
        count: usize,
        random: &mut Generator,
    ) -> Vec<Continuation> {
        let vocabulary = scores.len() / sums.len();
        let mut all = Vec::new();
        for (beam, (scores, sum)) in scores.chunks_exact(vocabulary).zip(sums).enumerate() {
            for_each_from(scores, f32::MIN, |token, score| {
                let score = score + sum;
                // In (0, 1], so that the logarithm is finite.
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
    // Subtracted in two steps, as in libtorch: a single sum would lose digits.
    scores
        .iter_mut()
        .for_each(|score| *score = (*score - max) - shift as f32);
    true
}
