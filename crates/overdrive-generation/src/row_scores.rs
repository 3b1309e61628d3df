//! The scores of a row that a token is chosen from: all of them, or the best ones that a device returned.

use crate::vector_math::{for_each_from, kth_best, maximum, sum_exp};

/// The scores of a row, for the cuts and the log-probabilities.
pub(crate) trait RowScores {
    /// Returns the size of the vocabulary.
    fn vocabulary(&self) -> usize;

    /// Returns the largest score, or `None` if one is NaN or +∞, or all are -∞.
    fn maximum(&self) -> Option<f32>;

    /// Returns the `k`-th best score; -∞ if it is not known. `buffer` is reused from call to call.
    fn kth_best(&self, k: usize, buffer: &mut Vec<f32>) -> f32;

    /// Calls `found` with the index of each score of at least `least`, in order. Returns `false` if there may be
    /// more of them than are known.
    fn for_each_from(&self, least: f32, found: impl FnMut(usize, f32)) -> bool;

    /// Returns `Σ e^((score - max) / temperature)`.
    fn sum_exp(&self, max: f32, temperature: f32) -> f64;
}

impl RowScores for [f32] {
    fn vocabulary(&self) -> usize {
        self.len()
    }

    fn maximum(&self) -> Option<f32> {
        maximum(self)
    }

    fn kth_best(&self, k: usize, buffer: &mut Vec<f32>) -> f32 {
        kth_best(self, k, buffer)
    }

    fn for_each_from(&self, least: f32, found: impl FnMut(usize, f32)) -> bool {
        for_each_from(self, least, found);
        true
    }

    fn sum_exp(&self, max: f32, temperature: f32) -> f64 {
        sum_exp(self, max, temperature)
    }
}

/// The best scores of a row, and the sum over all.
#[derive(Debug, Clone, Default)]
pub(crate) struct BestScores {
    /// The ids and their scores, in the order of the ids.
    by_id: Vec<(u32, f32)>,
    /// The scores, best first.
    descending: Vec<f32>,
    vocabulary: usize,
    /// The sum over all scores at the temperature for which it was asked; `None` if it is the sum of these.
    total: Option<f64>,
}

impl BestScores {
    /// Takes the `entries`, best first, of a row; all scores outside are at most the last one.
    pub(crate) fn new(
        entries: impl Iterator<Item = (u32, f32)>,
        vocabulary: usize,
        total: Option<f64>,
    ) -> BestScores {
        let mut by_id: Vec<(u32, f32)> = entries.collect();
        let descending = by_id.iter().map(|(_, score)| *score).collect();
        by_id.sort_unstable_by_key(|(id, _)| *id);
        BestScores {
            by_id,
            descending,
            vocabulary,
            total,
        }
    }

    /// Returns the score of `id` and the number of better ones, if they are known.
    pub(crate) fn standing(&self, id: u32) -> Option<(f32, usize)> {
        let index = self.by_id.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        let score = self.by_id[index].1;
        Some((
            score,
            self.descending.partition_point(|other| *other > score),
        ))
    }
}

impl RowScores for BestScores {
    fn vocabulary(&self) -> usize {
        self.vocabulary
    }

    fn maximum(&self) -> Option<f32> {
        let best = *self.descending.first()?;
        best.is_finite().then_some(best)
    }

    fn kth_best(&self, k: usize, _: &mut Vec<f32>) -> f32 {
        let kth = self.descending.get(k.saturating_sub(1));
        kth.copied().unwrap_or(f32::NEG_INFINITY)
    }

    fn for_each_from(&self, least: f32, mut found: impl FnMut(usize, f32)) -> bool {
        for &(id, score) in &self.by_id {
            if score >= least {
                found(id as usize, score);
            }
        }
        let all = self.by_id.len() >= self.vocabulary;
        all || self.descending.last().is_some_and(|last| *last < least)
    }

    fn sum_exp(&self, max: f32, temperature: f32) -> f64 {
        self.total
            .unwrap_or_else(|| sum_exp(&self.descending, max, temperature))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_best_scores_know_how_far_they_reach() {
        let best = BestScores::new([(7, 3.0), (2, 1.0), (5, 1.0)].into_iter(), 10, None);
        let from = |least: f32| {
            let mut ids = Vec::new();
            let complete = best.for_each_from(least, |id, _| ids.push(id));
            (ids, complete)
        };
        assert_eq!(from(2.0), (vec![7], true));
        // A token outside the list may have the score of the last one in it.
        assert_eq!(from(1.0), (vec![2, 5, 7], false));
        assert_eq!(
            (best.maximum(), best.kth_best(2, &mut Vec::new())),
            (Some(3.0), 1.0)
        );
        assert_eq!(best.kth_best(4, &mut Vec::new()), f32::NEG_INFINITY);
        assert_eq!(best.standing(5), Some((1.0, 1)));
        assert_eq!(best.standing(1), None);
        let excluded = [(1, 2.0), (0, f32::NEG_INFINITY)].into_iter();
        let few = BestScores::new(excluded, 10, None);
        assert!(
            few.for_each_from(f32::MIN, |_, _| {}),
            "all others are excluded too"
        );
        for wrong in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert_eq!(
                BestScores::new([(0, wrong)].into_iter(), 10, None).maximum(),
                None
            );
        }
    }
}
