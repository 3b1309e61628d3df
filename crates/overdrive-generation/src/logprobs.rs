use crate::row_scores::{BestScores, RowScores};

/// The log-probability of a chosen token and of the likeliest ones at its position.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct TokenLogprobs {
    /// The natural logarithm of the probability of the chosen token.
    pub logprob: f32,
    /// The rank among all tokens; the likeliest has 1.
    pub rank: usize,
    /// The `logprobs` likeliest tokens and their log-probabilities, likeliest first; of equal ones the
    /// smaller id first.
    pub top: Vec<(i64, f32)>,
}

/// The log-softmax of scores, computed for the tokens that are looked up.
pub(crate) struct Logprobs<'a, S: RowScores + ?Sized> {
    scores: &'a S,
    top: usize,
    /// The logarithm of the sum of exponentials.
    normalizer: f64,
}

impl<'a, S: RowScores + ?Sized> Logprobs<'a, S> {
    pub(crate) fn of(scores: &'a S, top: usize) -> Self {
        let normalizer = match scores.maximum() {
            None => f64::NAN,
            Some(max) => f64::from(max) + scores.sum_exp(max, 1.0).ln(),
        };
        Logprobs {
            scores,
            top,
            normalizer,
        }
    }

    pub(crate) fn logprob(&self, score: f32) -> f32 {
        (f64::from(score) - self.normalizer) as f32
    }

    /// Returns the log-probabilities of a token that has this `score` and `better` likelier tokens, with the
    /// likeliest tokens; `None` if these are not known.
    pub(crate) fn beside(&self, score: f32, better: usize) -> Option<TokenLogprobs> {
        Some(TokenLogprobs {
            logprob: self.logprob(score),
            rank: better + 1,
            top: self.best()?,
        })
    }

    fn best(&self) -> Option<Vec<(i64, f32)>> {
        let count = self.top.min(self.scores.vocabulary());
        if count == 0 {
            return Some(Vec::new());
        }
        // -∞ marks excluded tokens, which are not among the likeliest.
        let least = self.scores.kth_best(count, &mut Vec::new()).max(f32::MIN);
        let mut best = Vec::with_capacity(count);
        let complete = self.scores.for_each_from(least, |id, score| {
            best.push((id as i64, self.logprob(score)));
        });
        best.sort_by(|a, b| b.1.total_cmp(&a.1));
        best.truncate(count);
        complete.then_some(best)
    }
}

impl Logprobs<'_, [f32]> {
    pub(crate) fn of_token(&self, id: i64) -> Option<TokenLogprobs> {
        let index = usize::try_from(id).ok()?;
        let score = *self.scores.get(index)?;
        let better = self.scores.iter().filter(|other| **other > score).count();
        self.beside(score, better)
    }
}

impl Logprobs<'_, BestScores> {
    /// Returns `true` if the token is among the best scores.
    pub(crate) fn has(&self, id: i64) -> bool {
        u32::try_from(id).is_ok_and(|id| self.scores.standing(id).is_some())
    }

    /// Returns `None` if the token is not among the best scores, or the likeliest are not known.
    pub(crate) fn of_token(&self, id: i64) -> Option<TokenLogprobs> {
        let (score, better) = self.scores.standing(u32::try_from(id).ok()?)?;
        self.beside(score, better)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn log_probabilities_are_those_of_the_softmax_with_rank_and_the_best() {
        let scores = [1.0f32, 3.0, -2.0, 3.0, 0.5];
        let sum: f64 = scores.iter().map(|&x| f64::from(x).exp()).sum();
        let want = |x: f64| (x - sum.ln()) as f32;
        let got = Logprobs::of(&scores[..], 3).of_token(0).unwrap();
        assert_eq!(got.rank, 3);
        assert!((got.logprob - want(1.0)).abs() < 1e-6);
        let ids: Vec<i64> = got.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [1, 3, 0]);
        assert!((got.top[1].1 - want(3.0)).abs() < 1e-6);
        let none = Logprobs::of(&scores[..], 0).of_token(2).unwrap();
        assert!(none.top.is_empty());
        // The best scores of a device with the sum over all.
        let best = [(1, 3.0), (3, 3.0), (0, 1.0), (4, 0.5)].into_iter();
        let total = sum / 3f64.exp();
        let best = BestScores::new(best, 5, Some(total));
        let same = Logprobs::of(&best, 3).of_token(0).unwrap();
        assert_eq!(same.rank, got.rank);
        assert!((same.logprob - got.logprob).abs() < 1e-6);
        for (a, b) in same.top.iter().zip(&got.top) {
            assert!(a.0 == b.0 && (a.1 - b.1).abs() < 1e-6);
        }
        // A token outside the list may have the score of the last one in it.
        assert_eq!(Logprobs::of(&best, 4).of_token(0), None);
        assert_eq!(Logprobs::of(&best, 1).of_token(2), None);
    }
}
