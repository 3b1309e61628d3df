use std::sync::Arc;

use overdrive_core::random::Generator;

use crate::logprobs::{Logprobs, TokenLogprobs};
use crate::processors::{History, TokenCounts, changes, process};
use crate::row_scores::BestScores;
use crate::vector_math::{arg_max, sum_exp};
use crate::{Error, GenerationConfig, LogprobsMode, Result, TokenMask};

pub(crate) mod cuts;
mod device;

use self::cuts::Candidates;

/// A sampler that chooses the next token of one row from its logits.
///
/// It has its own random stream: two samplers with the same configuration, seed and row choose the
/// same tokens from the same logits, whatever else the program does. Its buffers are reused from token
/// to token. Without penalties and biases, greedy search is one pass over the logits.
#[derive(Debug, Clone)]
pub struct Sampler {
    config: Arc<GenerationConfig>,
    random: Generator,
    row: usize,
    counts: TokenCounts,
    candidates: Candidates,
    /// The unchanged logits, if their log-probabilities are wanted.
    raw: Vec<f32>,
    /// `true` if the options may have excluded tokens from the last logits.
    changed: bool,
}

/// A chosen token.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Choice {
    /// The token id.
    pub id: i64,
    /// The log-probability of the token and those of others, if `logprobs` asks for them.
    pub logprobs: Option<TokenLogprobs>,
}

impl Sampler {
    /// Returns a sampler for row `row` of a batch. `seed` is used if `config.seed` is `None`.
    ///
    /// # Errors
    /// When the configuration is invalid.
    pub fn new(config: &GenerationConfig, seed: u64, row: usize) -> Result<Sampler> {
        Sampler::shared(Arc::new(config.clone()), seed, row)
    }

    /// Returns a sampler as [`Sampler::new`] does, for rows that share a configuration.
    pub(crate) fn shared(config: Arc<GenerationConfig>, seed: u64, row: usize) -> Result<Sampler> {
        config.validate()?;
        let random = Generator::new(config.seed.unwrap_or(seed), row as u32);
        Ok(Sampler {
            config,
            random,
            row,
            counts: TokenCounts::default(),
            candidates: Candidates::default(),
            raw: Vec::new(),
            changed: false,
        })
    }

    /// Returns the next token id, as [`Sampler::choose`] without a constraint.
    ///
    /// # Errors
    /// As [`Sampler::choose`].
    pub fn next_token(&mut self, logits: &mut [f32], ids: &[i64], new: usize) -> Result<i64> {
        Ok(self.choose(logits, ids, new, None)?.id)
    }

    /// Chooses as [`Sampler::choose`] does, and returns also the distribution from which the token was
    /// drawn (`None` under greedy search) and the probability of the token in it (greedy: in the
    /// softmax).
    pub(crate) fn propose(
        &mut self,
        logits: &mut [f32],
        ids: &[i64],
        new: usize,
    ) -> Result<(i64, Option<Candidates>, f64)> {
        let id = self.choose(logits, ids, new, None)?.id;
        if self.config.is_greedy() {
            // The chosen token has the largest logit, so that its probability is 1 / Σ e^(x - max).
            let best = logits[id as usize];
            return Ok((id, None, 1.0 / sum_exp(logits, best, 1.0)));
        }
        let probability = self.candidates.probability(id);
        Ok((id, Some(self.candidates.snapshot()), probability))
    }

    /// Chooses the next token. `logits (V,)` are processed in place; `ids` are the tokens so far,
    /// prompt included, of which the last `new` are generated; `allowed` are the tokens among which to
    /// choose.
    ///
    /// Greedy search takes the first of the best. Sampling inverts the cumulative distribution, in the
    /// order of ids, at one uniform number a token.
    ///
    /// # Errors
    /// [`Error::BadLogits`] if a logit is NaN or +∞, or none is finite; [`Error::NothingAllowed`] if
    /// the configuration and `allowed` together exclude every token.
    pub fn choose(
        &mut self,
        logits: &mut [f32],
        ids: &[i64],
        new: usize,
        allowed: Option<&TokenMask>,
    ) -> Result<Choice> {
        self.prepare(logits, ids, new, allowed)?;
        let id = if self.config.is_greedy() {
            arg_max(logits).ok_or_else(|| self.no_token_error(logits, new))? as i64
        } else {
            self.select(logits, new)?;
            let uniform = self.random.uniform();
            self.candidates
                .draw(uniform)
                .ok_or(Error::NothingAllowed { row: self.row, new })?
        };
        let logprobs = self.logprobs_of(logits, id);
        Ok(Choice { id, logprobs })
    }

    /// Processes `logits` up to the temperature, after copying the original logits if their
    /// log-probabilities are requested.
    pub(crate) fn prepare(
        &mut self,
        logits: &mut [f32],
        ids: &[i64],
        new: usize,
        allowed: Option<&TokenMask>,
    ) -> Result<()> {
        let history = History { ids, new };
        let raw = self.config.logprobs.is_some()
            && self.config.logprobs_mode == LogprobsMode::RawLogprobs;
        if raw {
            self.raw.clear();
            self.raw.extend_from_slice(logits);
        }
        self.changed = allowed.is_some() || changes(&self.config, history);
        if self.changed {
            // Checked before the first change, because a change may hide a logit that is not finite.
            if !self.config.remove_invalid_values && arg_max(logits).is_none() {
                return Err(Error::BadLogits { row: self.row });
            }
            process(logits, history, allowed, &self.config, &mut self.counts);
        }
        Ok(())
    }

    /// Returns the distribution over prepared `logits` from which tokens are drawn.
    pub(crate) fn select(&mut self, logits: &[f32], new: usize) -> Result<&Candidates> {
        match self.candidates.select(logits, &self.config, 1) {
            Ok(()) => Ok(&self.candidates),
            Err(_) => Err(self.no_token_error(logits, new)),
        }
    }

    /// Verifies a proposed `token`, which was drawn from `proposal` (or is certain without one).
    /// Returns the token to take, and `true` if it is the proposed one. The token is the best one
    /// under greedy search, else a draw with the distribution of [`Sampler::choose`] (Leviathan et
    /// al. 2023, arXiv:2211.17192, section 2.3). `logits` are prepared.
    pub(crate) fn verify(
        &mut self,
        logits: &[f32],
        new: usize,
        token: i64,
        proposal: Option<&Candidates>,
    ) -> Result<(Choice, bool)> {
        let (id, accepted) = if self.config.is_greedy() {
            let best = arg_max(logits).ok_or_else(|| self.no_token_error(logits, new))? as i64;
            (best, best == token)
        } else {
            self.select(logits, new)?;
            let p = self.candidates.probability(token);
            let q = proposal.map_or(1.0, |proposal| proposal.probability(token));
            // Accepts with probability min(1, p / q), without the division by a q that may be 0.
            if self.random.uniform() * q < p {
                (token, true)
            } else {
                let uniform = self.random.uniform();
                let other = self.candidates.draw_residual(token, proposal, uniform);
                let other = other.ok_or(Error::NothingAllowed { row: self.row, new })?;
                (other, false)
            }
        };
        let logprobs = self.logprobs_of(logits, id);
        Ok((Choice { id, logprobs }, accepted))
    }

    /// Returns the log-probabilities of the chosen token and of the other requested tokens. `logits`
    /// are as [`Sampler::prepare`] and [`Sampler::select`] left them.
    pub(crate) fn logprobs_of(&mut self, logits: &[f32], id: i64) -> Option<TokenLogprobs> {
        let top = self.config.logprobs?;
        match self.config.logprobs_mode {
            LogprobsMode::RawLogprobs => Logprobs::of(&self.raw[..], top).of_token(id),
            LogprobsMode::ProcessedLogprobs if self.config.is_greedy() => {
                Logprobs::of(logits, top).of_token(id)
            }
            LogprobsMode::ProcessedLogprobs => self.logprobs_of_candidates(id, top),
        }
    }

    /// Returns the log-probabilities in the distribution from which the token was drawn.
    fn logprobs_of_candidates(&self, id: i64, top: usize) -> Option<TokenLogprobs> {
        let mut entries: Vec<(u32, f32)> = self
            .candidates
            .list
            .iter()
            .map(|c| (c.id, c.score))
            .collect();
        entries.sort_by(|a, b| b.1.total_cmp(&a.1));
        // The cuts have excluded all others.
        let count = entries.len();
        let left = BestScores::new(entries.into_iter(), count, None);
        Logprobs::of(&left, top).of_token(id)
    }

    pub(crate) fn config(&self) -> &GenerationConfig {
        &self.config
    }

    /// Returns the sampler with another row in its errors.
    pub(crate) fn for_row(mut self, row: usize) -> Sampler {
        self.row = row;
        self
    }

    /// Returns a sampler with the same configuration and another random stream.
    pub(crate) fn split(&self, number: u64) -> Sampler {
        let mut other = self.clone();
        other.random = self.random.split(number);
        // Log-probabilities of proposals are never returned.
        Arc::make_mut(&mut other.config).logprobs = None;
        other
    }

    /// Returns the reason why no token can be chosen.
    fn no_token_error(&self, logits: &[f32], new: usize) -> Error {
        let damaged = logits.iter().any(|x| x.is_nan() || *x == f32::INFINITY);
        self.no_token(damaged, new)
    }

    fn no_token(&self, damaged: bool, new: usize) -> Error {
        let row = self.row;
        if damaged || !self.changed {
            Error::BadLogits { row }
        } else {
            Error::NothingAllowed { row, new }
        }
    }
}
