//! The tokens from which one is sampled, and the cuts that leave them.

use crate::GenerationConfig;
use crate::config::Cuts;
use crate::row_scores::RowScores;
use crate::vector_math::exp;

/// A token that may be sampled.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Candidate {
    pub(crate) id: u32,
    /// The logit after the temperature.
    pub(crate) score: f32,
    /// The weight among all candidates, `e^(score - max)`; divided by the sum of weights it is the
    /// probability.
    pub(crate) weight: f32,
}

/// The tokens that remain after the cuts, in the order of their ids, and the buffers to find them.
///
/// The whole vocabulary is read only in vectorized passes. More expensive operations (an exponential, a
/// comparison in a sort) are done only for candidates. The exceptions are `top_p` without `top_k`,
/// which needs the sum of all exponentials, and `typical_p`, `epsilon_cutoff` and `eta_cutoff` without
/// an earlier cut.
#[derive(Debug, Clone, Default)]
pub(crate) struct Candidates {
    pub(crate) list: Vec<Candidate>,
    numbers: Vec<f32>,
    order: Vec<u32>,
}

/// The reason why there are no candidates.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NoCandidates {
    /// The scores are not finite, or exclude everything.
    Unusable,
    /// Tokens with unknown scores may remain after the cuts.
    Incomplete,
}

/// The number of likeliest tokens that transformers' `TopHLogitsWarper` looks at.
pub(crate) const TOP_H_TOKENS: usize = 100;

impl Candidates {
    /// Fills the list from processed scores, with at least `keep` tokens if the scores allow that many.
    pub(crate) fn select<S: RowScores + ?Sized>(
        &mut self,
        scores: &S,
        config: &GenerationConfig,
        keep: usize,
    ) -> Result<(), NoCandidates> {
        let max = scores.maximum().ok_or(NoCandidates::Unusable)?;
        let vocabulary = scores.vocabulary();
        let temperature = config.temperature as f32;
        // transformers applies top-h before top-k, so no other cut may come first.
        let first_cut = config.top_h.is_none();
        let mut top_p = config.top_p < 1.0;
        if config.top_k > 0 && config.top_k.max(keep) < vocabulary && first_cut {
            let k = config.top_k.max(keep);
            let kth = scores.kth_best(k, &mut self.numbers);
            self.take_from(scores, kth.max(f32::MIN), temperature)?;
        } else if top_p && first_cut {
            self.nucleus(scores, max, config, keep)?;
            top_p = false;
        } else if let Some(p) = config.min_p.filter(|&p| p > 0.0 && first_cut && keep == 1) {
            // p·e^(max/T) <= e^(score/T), with a small margin, because the exact cut follows in `cut`.
            let least = max + temperature * (p as f32).ln() * 1.001 - 1e-3;
            self.take_from(scores, least, temperature)?;
        } else if config.top_h.is_some() {
            // `top_h` considers only these tokens.
            let kth = scores.kth_best(TOP_H_TOKENS, &mut self.numbers);
            self.take_from(scores, kth.max(f32::MIN), temperature)?;
        } else {
            self.take_from(scores, f32::MIN, temperature)?;
        }
        self.cut(config, keep, top_p);
        Ok(())
    }

    /// Excludes from `scores` all tokens that the cuts remove, and divides the others by the
    /// temperature.
    pub(crate) fn cut_all(
        &mut self,
        scores: &mut [f32],
        config: &GenerationConfig,
        keep: usize,
    ) -> Option<()> {
        self.select(&*scores, config, keep).ok()?;
        scores.fill(f32::NEG_INFINITY);
        for candidate in &self.list {
            scores[candidate.id as usize] = candidate.score;
        }
        Some(())
    }

    /// Returns the sum of all weights.
    pub(crate) fn total(&self) -> f64 {
        self.list.iter().map(|c| f64::from(c.weight)).sum()
    }

    /// Returns the probability of token `id`.
    pub(crate) fn probability(&self, id: i64) -> f64 {
        let index = u32::try_from(id)
            .ok()
            .and_then(|id| self.list.binary_search_by_key(&id, |c| c.id).ok());
        index.map_or(0.0, |index| {
            f64::from(self.list[index].weight) / self.total()
        })
    }

    /// Returns the candidate whose interval of the cumulative distribution contains `uniform`, a
    /// number in [0, 1).
    pub(crate) fn draw(&self, uniform: f64) -> Option<i64> {
        let mut left = uniform * self.total();
        for candidate in &self.list {
            left -= f64::from(candidate.weight);
            if left < 0.0 {
                return Some(i64::from(candidate.id));
            }
        }
        // Rounding may leave a small remainder, which belongs to the likeliest token.
        let best = self.list.iter().max_by(|a, b| a.score.total_cmp(&b.score));
        best.map(|c| i64::from(c.id))
    }

    /// Samples from the difference between this distribution and that of `proposal`, with negative
    /// probabilities set to 0; without a proposal, samples from all tokens except `token`.
    pub(crate) fn draw_residual(
        &self,
        token: i64,
        proposal: Option<&Candidates>,
        uniform: f64,
    ) -> Option<i64> {
        let total = self.total();
        let rest = |c: &Candidate| {
            let p = f64::from(c.weight) / total;
            let q = match proposal {
                Some(proposal) => proposal.probability(i64::from(c.id)),
                None => f64::from(u8::from(i64::from(c.id) == token)),
            };
            (p - q).max(0.0)
        };
        let rests: Vec<f64> = self.list.iter().map(rest).collect();
        let mut left = uniform * rests.iter().sum::<f64>();
        for (candidate, rest) in self.list.iter().zip(rests) {
            left -= rest;
            if left < 0.0 {
                return Some(i64::from(candidate.id));
            }
        }
        // Both distributions are equal except for rounding.
        self.draw(uniform)
    }

    /// Returns a copy of the list without the buffers.
    pub(crate) fn snapshot(&self) -> Candidates {
        Candidates {
            list: self.list.clone(),
            ..Candidates::default()
        }
    }

    fn take_from<S: RowScores + ?Sized>(
        &mut self,
        scores: &S,
        least: f32,
        temperature: f32,
    ) -> Result<(), NoCandidates> {
        self.list.clear();
        let list = &mut self.list;
        let complete = scores.for_each_from(least, |id, score| {
            list.push(Candidate {
                id: id as u32,
                score: score / temperature,
                weight: 0.0,
            });
        });
        complete.then_some(()).ok_or(NoCandidates::Incomplete)
    }

    /// Applies top-p over the whole vocabulary: computes the sum of all exponentials in one pass, and
    /// sorts a growing number of the best tokens until their sum reaches `p`.
    fn nucleus<S: RowScores + ?Sized>(
        &mut self,
        scores: &S,
        max: f32,
        config: &GenerationConfig,
        keep: usize,
    ) -> Result<(), NoCandidates> {
        let (temperature, vocabulary) = (config.temperature as f32, scores.vocabulary());
        let total = scores.sum_exp(max, temperature);
        // The nucleus of a trained model is mostly a few dozen tokens; a flat distribution takes a few
        // rounds of eight times as many.
        let mut wanted = 64.max(keep);
        loop {
            let kth = if wanted < vocabulary {
                scores.kth_best(wanted, &mut self.numbers).max(f32::MIN)
            } else {
                f32::MIN
            };
            self.take_from(scores, kth, temperature)?;
            self.weigh();
            if self.keep_mass(config.top_p, total, keep) || wanted >= vocabulary {
                return Ok(());
            }
            wanted *= 8;
        }
    }

    /// Applies the cuts; `with_top_p` is `false` if top-p has been applied to the whole vocabulary.
    fn cut(&mut self, config: &GenerationConfig, keep: usize, with_top_p: bool) {
        let Cuts {
            top_k,
            top_p,
            min_p,
            top_h,
            typical_p,
            epsilon_cutoff,
            eta_cutoff,
        } = config.cuts();
        self.weigh();
        if let Some(h) = top_h {
            self.top_h(h);
            if top_k > 0 && top_k.max(keep) < self.list.len() {
                let least = self.nth_best(top_k.max(keep));
                self.list.retain(|c| c.score >= least);
            }
        }
        if with_top_p {
            let total = self.total();
            self.keep_mass(top_p, total, keep);
        }
        if let Some(p) = min_p {
            let p = p as f32;
            self.retain_best(keep, |c| c.weight >= p);
        }
        if typical_p < 1.0 {
            self.typical(typical_p, keep);
        }
        if epsilon_cutoff > 0.0 {
            let least = (epsilon_cutoff * self.total()) as f32;
            self.retain_best(keep, |c| c.weight >= least);
        }
        if eta_cutoff > 0.0 {
            let epsilon = eta_cutoff;
            let eta = epsilon.min(epsilon.sqrt() * (-self.entropy()).exp());
            let least = (eta * self.total()) as f32;
            self.retain_best(keep, |c| c.weight >= least);
        }
    }

    fn weigh(&mut self) {
        let max = self.list.iter().map(|c| c.score).fold(f32::MIN, f32::max);
        for candidate in &mut self.list {
            candidate.weight = exp(candidate.score - max);
        }
    }

    /// Sorts the indices of the list by descending score. Among equal scores the later index comes
    /// first, as in transformers, which sorts in ascending order and reads from the end.
    fn sort(&mut self) {
        self.order.clear();
        self.order.extend(0..self.list.len() as u32);
        let list = &self.list;
        self.order.sort_unstable_by(|&a, &b| {
            let (left, right) = (list[a as usize].score, list[b as usize].score);
            right.total_cmp(&left).then(b.cmp(&a))
        });
    }

    /// Keeps the first `count` indices of `order`, in the order of their ids.
    fn keep_first(&mut self, count: usize) {
        self.order.truncate(count);
        self.order.sort_unstable();
        for (to, &from) in self.order.iter().enumerate() {
            self.list[to] = self.list[from as usize];
        }
        self.list.truncate(self.order.len());
    }

    /// Keeps the best candidates until their weights reach the fraction `p` of `total`; returns
    /// `true` if they reach it before the end of the list.
    fn keep_mass(&mut self, p: f64, total: f64, keep: usize) -> bool {
        self.sort();
        let (mut mass, mut count) = (0.0, 0);
        for &index in &self.order {
            if mass >= p * total && count >= keep {
                break;
            }
            mass += f64::from(self.list[index as usize].weight);
            count += 1;
        }
        let reached = mass >= p * total;
        self.keep_first(count);
        reached
    }

    /// Keeps the candidates for which `fits` returns `true`, and the `keep` best in any case.
    fn retain_best(&mut self, keep: usize, fits: impl Fn(&Candidate) -> bool) {
        let least = self.nth_best(keep);
        self.list.retain(|c| fits(c) || c.score >= least);
    }

    fn nth_best(&mut self, n: usize) -> f32 {
        if n == 1 {
            return self.list.iter().map(|c| c.score).fold(f32::MIN, f32::max);
        }
        self.numbers.clear();
        self.numbers.extend(self.list.iter().map(|c| c.score));
        if self.numbers.len() <= n {
            return f32::NEG_INFINITY;
        }
        *self
            .numbers
            .select_nth_unstable_by(n - 1, |a, b| b.total_cmp(a))
            .1
    }

    /// Returns the entropy in nats.
    fn entropy(&self) -> f64 {
        let total = self.total();
        let term = |c: &Candidate| {
            let p = f64::from(c.weight) / total;
            if p > 0.0 { -p * p.ln() } else { 0.0 }
        };
        self.list.iter().map(term).sum()
    }

    /// Renormalizes the 100 likeliest candidates and keeps the best of them until the sum of their
    /// entropy terms would exceed `h` times the entropy.
    fn top_h(&mut self, h: f64) {
        self.sort();
        self.keep_first(TOP_H_TOKENS);
        self.weigh();
        self.sort();
        let (total, budget) = (self.total(), h * self.entropy());
        let (mut spent, mut count) = (0.0, 0);
        for &index in &self.order {
            let p = f64::from(self.list[index as usize].weight) / total;
            spent += if p > 0.0 { -p * p.ln() } else { 0.0 };
            if spent > budget && count > 0 {
                break;
            }
            count += 1;
        }
        self.keep_first(count);
    }

    fn typical(&mut self, mass: f64, keep: usize) {
        let (total, entropy) = (self.total(), self.entropy());
        self.numbers.clear();
        let shift = |c: &Candidate| {
            let surprise = -(f64::from(c.weight) / total).ln();
            (surprise - entropy).abs() as f32
        };
        self.numbers.extend(self.list.iter().map(shift));
        self.order.clear();
        self.order.extend(0..self.list.len() as u32);
        let shifts = &self.numbers;
        self.order
            .sort_by(|&a, &b| shifts[a as usize].total_cmp(&shifts[b as usize]));
        let mut together = 0.0;
        let mut last = 0;
        for &index in &self.order {
            together += f64::from(self.list[index as usize].weight) / total;
            if together >= mass {
                break;
            }
            last += 1;
        }
        let Some(&last) = self.order.get(last).or(self.order.last()) else {
            return;
        };
        let bound = shifts[last as usize];
        let within = self
            .order
            .partition_point(|&index| shifts[index as usize] <= bound);
        self.keep_first(within.max(keep));
    }
}
