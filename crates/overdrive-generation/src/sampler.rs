use crate::arg_max::{arg_max, sum_exp};
use crate::candidates::Candidates;
use crate::logprobs::{Logprobs, TokenLogprobs};
use crate::processors::{Marks, Place, changes, process};
use crate::random::SplitMix64;
use crate::{Error, GenerationConfig, LogprobsMode, Result, TokenMask};

/// Chooses one row's next token from its logits.
///
/// It has a random state of its own: two samplers with the same configuration, seed and row choose the
/// same tokens from the same logits, whatever happens around them. Its buffers are kept from token to
/// token. Without penalties and biases, greedy is one pass over the logits.
#[derive(Debug, Clone)]
pub struct Sampler {
    config: GenerationConfig,
    random: SplitMix64,
    row: usize,
    marks: Marks,
    candidates: Candidates,
    /// The logits before anything changed them, where log-probabilities of those are wanted.
    raw: Vec<f32>,
    /// Whether anything may have excluded tokens from the last logits.
    changed: bool,
}

/// A chosen token.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Choice {
    /// Its id.
    pub id: i64,
    /// Its log-probability and those of others, where `logprobs` asks for them.
    pub logprobs: Option<TokenLogprobs>,
}

impl Sampler {
    /// A sampler for row `row` of a batch. `seed` takes the place of `config.seed` where that is
    /// `None`.
    ///
    /// # Errors
    /// When the configuration is invalid.
    pub fn new(config: &GenerationConfig, seed: u64, row: usize) -> Result<Sampler> {
        config.validate()?;
        let random = SplitMix64::new(config.seed.unwrap_or(seed), row);
        Ok(Sampler {
            config: config.clone(),
            random,
            row,
            marks: Marks::default(),
            candidates: Candidates::default(),
            raw: Vec::new(),
            changed: false,
        })
    }

    /// The next token id; as [`Sampler::choose`] without a constraint.
    ///
    /// # Errors
    /// As [`Sampler::choose`].
    pub fn next_token(&mut self, logits: &mut [f32], present: &[i64], new: usize) -> Result<i64> {
        Ok(self.choose(logits, present, new, None)?.id)
    }

    /// Chooses as [`Sampler::choose`] does, and gives the distribution that was drawn from, `None` under
    /// greedy search, and the probability of the token in it (greedy: in the softmax).
    pub(crate) fn propose(
        &mut self,
        logits: &mut [f32],
        present: &[i64],
        new: usize,
    ) -> Result<(i64, Option<Candidates>, f64)> {
        let id = self.choose(logits, present, new, None)?.id;
        if self.config.is_greedy() {
            let best = logits[id as usize];
            return Ok((id, None, 1.0 / sum_exp(logits, best, 1.0)));
        }
        let probability = self.candidates.probability(id);
        Ok((id, Some(self.candidates.snapshot()), probability))
    }

    /// The next token. `logits (V,)` are processed in place; `present` are the ids so far, prompt
    /// included, of which the last `new` are generated; `allowed` are the tokens among which to choose.
    ///
    /// Greedy takes the first of the best; sampling inverts the cumulative distribution, in the order of
    /// ids, at one uniform number a token.
    ///
    /// # Errors
    /// [`Error::BadLogits`] where a logit is NaN or +∞, or none is finite; [`Error::NothingAllowed`]
    /// where the configuration and `allowed` together exclude every token.
    pub fn choose(
        &mut self,
        logits: &mut [f32],
        present: &[i64],
        new: usize,
        allowed: Option<&TokenMask>,
    ) -> Result<Choice> {
        self.prepare(logits, present, new, allowed)?;
        let id = if self.config.is_greedy() {
            arg_max(logits).ok_or_else(|| self.nothing_in(logits, new))? as i64
        } else {
            self.select(logits, new)?;
            let uniform = self.random.uniform();
            self.candidates
                .draw(uniform)
                .ok_or(Error::NothingAllowed { row: self.row, new })?
        };
        let logprobs = self.describe(logits, id);
        Ok(Choice { id, logprobs })
    }

    /// Processes `logits` up to the temperature, after keeping what log-probabilities need.
    pub(crate) fn prepare(
        &mut self,
        logits: &mut [f32],
        present: &[i64],
        new: usize,
        allowed: Option<&TokenMask>,
    ) -> Result<()> {
        let place = Place { present, new };
        let raw = self.config.logprobs.is_some()
            && self.config.logprobs_mode == LogprobsMode::RawLogprobs;
        if raw {
            self.raw.clear();
            self.raw.extend_from_slice(logits);
        }
        self.changed = allowed.is_some() || changes(&self.config, place);
        if self.changed {
            // Before the first change: afterwards a bad score may be hidden.
            if !self.config.remove_invalid_values && arg_max(logits).is_none() {
                return Err(Error::BadLogits { row: self.row });
            }
            process(logits, place, allowed, &self.config, &mut self.marks);
        }
        Ok(())
    }

    /// The distribution over prepared `logits`: what is drawn from.
    pub(crate) fn select(&mut self, logits: &[f32], new: usize) -> Result<&Candidates> {
        if self.candidates.select(logits, &self.config, 1).is_none() {
            return Err(self.nothing_in(logits, new));
        }
        Ok(&self.candidates)
    }

    /// The token to take where `token` was proposed, drawn from `proposal` (or certain without one), and
    /// whether it is that: under greedy search the best, else a draw whose distribution is the one of
    /// [`Sampler::choose`] (Leviathan et al. 2023, arXiv:2211.17192, section 2.3). `logits` are prepared.
    pub(crate) fn verify(
        &mut self,
        logits: &[f32],
        new: usize,
        token: i64,
        proposal: Option<&Candidates>,
    ) -> Result<(Choice, bool)> {
        let (id, accepted) = if self.config.is_greedy() {
            let best = arg_max(logits).ok_or_else(|| self.nothing_in(logits, new))? as i64;
            (best, best == token)
        } else {
            self.select(logits, new)?;
            let p = self.candidates.probability(token);
            let q = proposal.map_or(1.0, |proposal| proposal.probability(token));
            if self.random.uniform() * q < p {
                (token, true)
            } else {
                let uniform = self.random.uniform();
                let other = self.candidates.draw_beyond(token, proposal, uniform);
                let other = other.ok_or(Error::NothingAllowed { row: self.row, new })?;
                (other, false)
            }
        };
        let logprobs = self.describe(logits, id);
        Ok((Choice { id, logprobs }, accepted))
    }

    /// The log-probabilities of the chosen token, and the others that are wanted. `logits` are as
    /// [`Sampler::prepare`] and [`Sampler::select`] left them.
    pub(crate) fn describe(&mut self, logits: &[f32], id: i64) -> Option<TokenLogprobs> {
        let top = self.config.logprobs?;
        match self.config.logprobs_mode {
            LogprobsMode::RawLogprobs => Logprobs::of(&self.raw, top).of_token(id),
            LogprobsMode::ProcessedLogprobs if self.config.is_greedy() => {
                Logprobs::of(logits, top).of_token(id)
            }
            LogprobsMode::ProcessedLogprobs => {
                let mut scores = vec![f32::NEG_INFINITY; logits.len()];
                for candidate in &self.candidates.list {
                    scores[candidate.id as usize] = candidate.score;
                }
                Logprobs::of(&scores, top).of_token(id)
            }
        }
    }

    /// The same sampler, whose errors name row `row`.
    pub(crate) fn for_row(mut self, row: usize) -> Sampler {
        self.row = row;
        self
    }

    /// A sampler with the same configuration and another random stream.
    pub(crate) fn split(&self, number: u64) -> Sampler {
        let mut other = self.clone();
        other.random = self.random.split(number);
        other.config.logprobs = None;
        other
    }

    /// Why no token can be chosen.
    fn nothing_in(&self, logits: &[f32], new: usize) -> Error {
        let row = self.row;
        let damaged = logits.iter().any(|x| x.is_nan() || *x == f32::INFINITY);
        if damaged || !self.changed {
            Error::BadLogits { row }
        } else {
            Error::NothingAllowed { row, new }
        }
    }
}
