use std::sync::Arc;
use std::time::{Duration, Instant};

use tokenizers::Tokenizer;

use super::request::RequestId;
use crate::device_sampling::RowLogits;
use crate::row_text::RowText;
use crate::rows::{ChosenToken, RowState, is_late};
use crate::{Completion, Constraint, FinishReason, GenerationConfig, Result, Sampler, TokenMask};

/// A sample of a request: one continuation of its prompt.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) request: RequestId,
    pub(super) number: usize,
    pub(super) row: RowState<'static>,
    /// The index of its adapter among those of the engine.
    pub(super) adapter: Option<usize>,
    submitted: Instant,
    first_token: Option<Duration>,
    /// The other samples of the request, until the prompt that they share has been read.
    pub(super) siblings: Vec<Sample>,
}

/// The data that the samples of a request have in common.
#[derive(Debug)]
pub(super) struct RequestContext<'a> {
    pub(super) request: RequestId,
    pub(super) config: GenerationConfig,
    pub(super) prompt: &'a [i64],
    pub(super) limit: (usize, FinishReason),
    pub(super) seed: u64,
    pub(super) constraint: Option<Box<dyn Constraint>>,
    pub(super) adapter: Option<usize>,
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
                sampler: Sampler::new(config, shared.seed, number)?,
                constraint: constraint.map(|c| (c.fork(), TokenMask::new(shared.vocabulary))),
                text: shared
                    .tokenizer
                    .map(|tokenizer| RowText::shared(Arc::clone(tokenizer), prompt, config)),
                // Kept for the completion, although each token's event has them too: a client may ignore the events.
                logprobs: Vec::new(),
            },
            adapter: shared.adapter,
            submitted: Instant::now(),
            first_token: None,
            siblings: Vec::new(),
        })
    }

    /// Chooses the token after `tokens`, prompt included.
    pub(super) fn choose(&mut self, logits: RowLogits<'_>, tokens: &[i64]) -> Result<ChosenToken> {
        let choice = self.row.choose(logits, tokens)?;
        let submitted = self.submitted;
        self.first_token.get_or_insert_with(|| submitted.elapsed());
        self.row.push(choice, tokens.len() + 1, self.is_late())
    }

    /// Returns `true` if `max_time` has passed since the submission.
    pub(super) fn is_late(&self) -> bool {
        is_late(self.row.sampler.config(), self.submitted)
    }

    pub(super) fn first_token(&self) -> Option<Duration> {
        self.first_token
    }

    /// Returns the completion of `tokens`, prompt and continuation.
    pub(super) fn complete(&mut self, tokens: &[i64], reason: FinishReason) -> Completion {
        let row = &mut self.row;
        let has_logprobs = row.sampler.config().logprobs.is_some();
        Completion {
            tokens: tokens[row.prompt..].to_vec(),
            text: row.text.take().map(RowText::into_text),
            logprobs: has_logprobs.then(|| std::mem::take(&mut row.logprobs)),
            finish_reason: reason,
            time_to_first_token: self.first_token,
            time: self.submitted.elapsed(),
        }
    }
}
