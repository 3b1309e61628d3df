use crate::vector_math::{for_each_from, kth_best, maximum, sum_exp};

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
pub(crate) struct Logprobs<'a> {
    scores: &'a [f32],
    top: usize,
    /// The logarithm of the sum of exponentials.
    normalizer: f64,
}

impl<'a> Logprobs<'a> {
    pub(crate) fn of(scores: &'a [f32], top: usize) -> Self {
        let normalizer = match maximum(scores) {
            None => f64::NAN,
            Some(max) => f64::from(max) + sum_exp(scores, max, 1.0).ln(),
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

    pub(crate) fn of_token(&self, id: i64) -> Option<TokenLogprobs> {
        let score = *usize::try_from(id)
            .ok()
            .and_then(|id| self.scores.get(id))?;
        let better = self.scores.iter().filter(|other| **other > score).count();
        Some(TokenLogprobs {
            logprob: self.logprob(score),
            rank: better + 1,
            top: self.best(),
        })
    }

    fn best(&self) -> Vec<(i64, f32)> {
        let count = self.top.min(self.scores.len());
        if count == 0 {
            return Vec::new();
        }
        // -∞ marks excluded tokens, which are not among the likeliest.
        let least = kth_best(self.scores, count, &mut Vec::new()).max(f32::MIN);
        let mut best = Vec::with_capacity(count);
        for_each_from(self.scores, least, |id, score| {
            best.push((id as i64, self.logprob(score)));
        });
        best.sort_by(|a, b| b.1.total_cmp(&a.1));
        best.truncate(count);
        best
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
        let got = Logprobs::of(&scores, 3).of_token(0).unwrap();
        assert_eq!(got.rank, 3);
        assert!((got.logprob - want(1.0)).abs() < 1e-6);
        let ids: Vec<i64> = got.top.iter().map(|(id, _)| *id).collect();
        assert_eq!(ids, [1, 3, 0]);
        assert!((got.top[1].1 - want(3.0)).abs() < 1e-6);
        assert!(Logprobs::of(&scores, 0).of_token(2).unwrap().top.is_empty());
    }
}
