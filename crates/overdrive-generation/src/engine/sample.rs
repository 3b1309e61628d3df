use std::sync::Arc;
use std::time::{Duration, Instant};

use tokenizers::Tokenizer;

use super::prompt_logprobs::{PromptScores, ScoredPosition};
use super::request::{PromptLogprobs, RequestId};
use super::scheduler::Chunk;
use crate::device_sampling::RowLogits;
use crate::finish_reason::is_late;
use crate::images::PromptImages;
use crate::row_text::RowText;
use crate::rows::{ChosenToken, RowState};
use crate::speculation::{MOST_PROPOSED, PromptLookup};
use crate::{
    Completion, Constraint, FinishReason, GenerationConfig, Result, Sampler, TokenLogprobs,
    TokenMask,
};

/// A sample of a request: one continuation of its prompt.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) request: RequestId,
    pub(super) number: usize,
    pub(super) row: RowState<'static>,
    /// The index of its adapter among those of the engine.
    pub(super) adapter: Option<usize>,
    /// The images of its prompt.
    pub(super) images: Option<Arc<PromptImages>>,
    submitted: Instant,
    first_token: Option<Duration>,
    /// The other samples of the request, until the prompt that they share has been read.
    pub(super) siblings: Vec<Sample>,
    /// The log-probabilities of the prompt while it is read, if they are wanted.
    pub(super) prompt_scores: Option<PromptScores>,
    /// The log-probabilities of the prompt.
    pub(super) prompt_logprobs: Option<PromptLogprobs>,
    /// The source of proposed tokens, if any are to be proposed.
    lookup: Option<PromptLookup>,
    /// The tokens that are proposed to follow.
    pub(super) proposal: Vec<i64>,
}

/// The data that the samples of a request have in common.
#[derive(Debug)]
pub(super) struct RequestContext<'a> {
    pub(super) request: RequestId,
    pub(super) config: Arc<GenerationConfig>,
    pub(super) prompt: &'a [i64],
    pub(super) limit: (usize, FinishReason),
    pub(super) seed: u64,
    pub(super) constraint: Option<Box<dyn Constraint>>,
    pub(super) adapter: Option<usize>,
    pub(super) images: Option<Arc<PromptImages>>,
    pub(super) tokenizer: Option<&'a Arc<Tokenizer>>,
    pub(super) vocabulary: usize,
}

impl Sample {
    pub(super) fn new(number: usize, shared: &RequestContext<'_>) -> Result<Sample> {
        let RequestContext { config, prompt, .. } = shared;
        let constraint = shared.constraint.as_ref();
        Ok(Sample {
            request: shared.request,
            number,
            row: RowState {
                prompt: prompt.len(),
                limit: shared.limit,
                sampler: Sampler::shared(Arc::clone(config), shared.seed, number)?,
                constraint: constraint.map(|c| (c.fork(), TokenMask::new(shared.vocabulary))),
                text: shared
                    .tokenizer
                    .map(|tokenizer| RowText::shared(Arc::clone(tokenizer), prompt, config)),
                // Kept for the completion, although each token's event has them too: a client may ignore the events.
                logprobs: Vec::new(),
            },
            adapter: shared.adapter,
            images: shared.images.clone(),
            submitted: Instant::now(),
            first_token: None,
            siblings: Vec::new(),
            prompt_scores: None,
            prompt_logprobs: None,
            lookup: config
                .prompt_lookup_num_tokens
                .map(|_| PromptLookup::new(config)),
            proposal: Vec::new(),
        })
    }

    /// Returns the largest number of tokens to propose after `have` tokens, for a model that reads at most `context`.
    pub(super) fn most_proposed(&self, have: usize, context: usize) -> usize {
        // The model yields one token more than is proposed.
        let room = self.row.limit.0.saturating_sub(have + 1);
        room.min(context.saturating_sub(have)).min(MOST_PROPOSED)
    }

    /// Proposes tokens of the text itself to follow `tokens`, prompt included, if the request asks for it; returns `true`
    /// if it does.
    pub(super) fn look_up(&mut self, tokens: &[i64], context: usize) -> bool {
        self.proposal.clear();
        let most = self.most_proposed(tokens.len(), context);
        if let Some(lookup) = &self.lookup {
            self.proposal.extend(lookup.find(tokens, most));
        }
        self.lookup.is_some()
    }

    /// Chooses the token after `tokens`, prompt included.
    pub(super) fn choose(&mut self, logits: RowLogits<'_>, tokens: &[i64]) -> Result<ChosenToken> {
        let choice = self.row.choose(logits, tokens)?;
        let submitted = self.submitted;
        self.first_token.get_or_insert_with(|| submitted.elapsed());
        self.row.push(choice, tokens.len() + 1, self.is_late())
    }

    /// Returns the completions of the sample and of its siblings, with their numbers; `cached` tokens of the prompt were
    /// in the cache.
    pub(super) fn complete_all(
        &mut self,
        tokens: &[i64],
        cached: usize,
        reason: FinishReason,
    ) -> Vec<(usize, Completion)> {
        let siblings = std::mem::take(&mut self.siblings);
        let mut all = vec![(self.number, self.complete(tokens, cached, reason))];
        for mut sibling in siblings {
            all.push((sibling.number, sibling.complete(tokens, cached, reason)));
        }
        all
    }

    /// Returns `true` if nothing is to be generated after `tokens` tokens.
    pub(super) fn is_full(&self, tokens: usize) -> bool {
        self.row.limit.0 <= tokens
    }

    /// Returns the number of leading tokens that need not be read if they are cached; the logits of the other tokens
    /// are still needed.
    pub(super) fn reusable(&self) -> usize {
        let scores = self.prompt_scores.as_ref();
        scores.map_or(usize::MAX, PromptScores::read)
    }

    /// Returns the positions of a chunk of `tokens`, prompt included, that are to be scored.
    pub(super) fn scored_positions(
        &self,
        chunk: &Chunk,
        tokens: &[i64],
    ) -> impl Iterator<Item = ScoredPosition> {
        let prompt = &tokens[..self.row.prompt];
        let scores = self.prompt_scores.iter();
        scores.flat_map(move |scores| scores.positions(chunk, prompt))
    }

    /// Adds the log-probabilities of the prompt's next tokens. Returns those of the whole prompt once they are
    /// complete; the other samples get them too.
    pub(super) fn extend_scores(&mut self, new: Vec<TokenLogprobs>) -> Option<PromptLogprobs> {
        let scores = self.prompt_scores.as_mut()?;
        scores.extend(new);
        if scores.len() < self.row.prompt {
            return None;
        }
        let all: PromptLogprobs = self.prompt_scores.take()?.into();
        for sibling in &mut self.siblings {
            sibling.prompt_logprobs = Some(Arc::clone(&all));
        }
        self.prompt_logprobs = Some(Arc::clone(&all));
        Some(all)
    }

    /// Returns `true` if `max_time` has passed since the submission.
    pub(super) fn is_late(&self) -> bool {
        is_late(self.row.sampler.config(), self.submitted)
    }

    pub(super) fn first_token(&self) -> Option<Duration> {
        self.first_token
    }

    /// Returns the completion of `tokens`, prompt and continuation; `cached` tokens of the prompt were in the cache.
    pub(super) fn complete(
        &mut self,
        tokens: &[i64],
        cached: usize,
        reason: FinishReason,
    ) -> Completion {
        let row = &mut self.row;
        let has_logprobs = row.sampler.config().logprobs.is_some();
        Completion {
            tokens: tokens[row.prompt..].to_vec(),
            text: row.text.take().map(RowText::into_text),
            logprobs: has_logprobs.then(|| std::mem::take(&mut row.logprobs)),
            prompt_logprobs: self.prompt_logprobs.take(),
            cached_tokens: cached,
            finish_reason: reason,
            time_to_first_token: self.first_token,
            time: self.submitted.elapsed(),
        }
    }
}
