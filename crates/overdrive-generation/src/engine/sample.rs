use std::sync::Arc;
use std::time::{Duration, Instant};

use tokenizers::Tokenizer;

use super::request::RequestId;
use crate::device_sampling::{RowLogits, RowPlan};
use crate::row_text::RowText;
use crate::rows::{MaskedConstraint, allowed, end_after};
use crate::{
    Completion, Constraint, FinishReason, GenerationConfig, Result, Sampler, TokenLogprobs,
    TokenMask,
};

/// A sample of a request: one continuation of its prompt.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) request: RequestId,
    pub(super) number: usize,
    config: Arc<GenerationConfig>,
    /// The number of tokens of the prompt.
    prompt: usize,
    /// The length at which it ends, and the reason.
    limit: (usize, FinishReason),
    sampler: Sampler,
    constraint: Option<MaskedConstraint>,
    /// The index of its adapter among those of the engine.
    pub(super) adapter: Option<usize>,
    text: Option<RowText<'static>>,
    logprobs: Vec<TokenLogprobs>,
    submitted: Instant,
    first_token: Option<Duration>,
    /// The other samples of the request, until the prompt that they share has been read.
    pub(super) siblings: Vec<Sample>,
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
    pub(super) tokenizer: Option<&'a Arc<Tokenizer>>,
    pub(super) vocabulary: usize,
}

/// A token that was chosen.
#[derive(Debug)]
pub(super) struct SampledToken {
    pub(super) id: i64,
    pub(super) text: String,
    pub(super) logprobs: Option<TokenLogprobs>,
    pub(super) finished: Option<FinishReason>,
}

impl Sample {
    pub(super) fn new(number: usize, shared: &RequestContext<'_>) -> Result<Sample> {
        let RequestContext { config, prompt, .. } = shared;
        let constraint = shared.constraint.as_ref();
        Ok(Sample {
            request: shared.request,
            number,
            config: Arc::clone(config),
            prompt: prompt.len(),
            limit: shared.limit,
            sampler: Sampler::new(config, shared.seed, number)?,
            constraint: constraint.map(|c| (c.fork(), TokenMask::new(shared.vocabulary))),
            adapter: shared.adapter,
            text: shared
                .tokenizer
                .map(|tokenizer| RowText::shared(Arc::clone(tokenizer), prompt, config)),
            logprobs: Vec::new(),
            submitted: Instant::now(),
            first_token: None,
            siblings: Vec::new(),
        })
    }

    /// Returns the plan to choose the token after `tokens` on a device, from row `source` of the logits.
    pub(super) fn plan(
        &mut self,
        source: usize,
        vocabulary: usize,
        tokens: &[i64],
    ) -> Result<RowPlan> {
        let allowed = allowed(&mut self.constraint)?;
        let history = (tokens, tokens.len() - self.prompt);
        Ok(self.sampler.plan(source, vocabulary, history, allowed))
    }

    /// Chooses the token after `tokens`, prompt included.
    pub(super) fn choose(&mut self, logits: RowLogits<'_>, tokens: &[i64]) -> Result<SampledToken> {
        let new = tokens.len() - self.prompt;
        let choice = match logits {
            RowLogits::Host(scores) => {
                let allowed = allowed(&mut self.constraint)?;
                self.sampler.choose(scores, tokens, new, allowed)?
            }
            RowLogits::Device(step, row) => self.sampler.choose_on(step, row, (tokens, new))?,
        };
        let (submitted, id) = (self.submitted, choice.id);
        self.first_token.get_or_insert_with(|| submitted.elapsed());
        // Kept for the completion, although each token's event has them too: a client may ignore the
        // events.
        self.logprobs.extend(choice.logprobs.clone());
        let length = tokens.len() + 1;
        let mut finished = end_after(id, length, self.limit, &self.config, &mut self.constraint)?;
        if self.is_late() {
            finished.get_or_insert(FinishReason::TimeLimit);
        }
        let mut text = String::new();
        if let Some(stream) = &mut self.text {
            // After the other reasons: a last token releases the text that is held back, and a stop
            // string in it wins.
            let (piece, stop) = stream.push(id, finished)?;
            text = piece;
            if let Some(number) = stop {
                finished = Some(FinishReason::StopString { number });
            }
        }
        Ok(SampledToken {
            id,
            text,
            logprobs: choice.logprobs,
            finished,
        })
    }

    /// Returns `true` if `max_time` has passed since the submission.
    pub(super) fn is_late(&self) -> bool {
        let limit = self.config.max_time;
        limit.is_some_and(|limit| self.submitted.elapsed().as_secs_f64() > limit)
    }

    pub(super) fn first_token(&self) -> Option<Duration> {
        self.first_token
    }

    /// Returns the completion of `tokens`, prompt and continuation.
    pub(super) fn complete(&mut self, tokens: &[i64], reason: FinishReason) -> Completion {
        Completion {
            tokens: tokens[self.prompt..].to_vec(),
            text: self.text.take().map(RowText::into_text),
            logprobs: self
                .config
                .logprobs
                .map(|_| std::mem::take(&mut self.logprobs)),
            finish_reason: reason,
            time_to_first_token: self.first_token,
            time: self.submitted.elapsed(),
        }
    }
}
