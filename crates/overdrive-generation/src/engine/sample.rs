use std::sync::Arc;
use std::time::{Duration, Instant};

use tokenizers::Tokenizer;

use super::request::RequestId;
use crate::row_text::RowText;
use crate::{
    Completion, Constraint, FinishReason, GenerationConfig, Result, Sampler, TokenLogprobs,
    TokenMask,
};

/// One continuation of a request.
#[derive(Debug)]
pub(super) struct Sample {
    pub(super) request: RequestId,
    pub(super) number: usize,
    config: Arc<GenerationConfig>,
    /// Tokens of the prompt.
    prompt: usize,
    /// The length at which it ends, and why.
    limit: (usize, FinishReason),
    sampler: Sampler,
    constraint: Option<(Box<dyn Constraint>, TokenMask)>,
    text: Option<RowText<'static>>,
    logprobs: Vec<TokenLogprobs>,
    submitted: Instant,
    first_token: Option<Duration>,
    /// The request's other continuations, until the prompt that they share has been read.
    pub(super) siblings: Vec<Sample>,
}

/// What the continuations of a request have in common.
#[derive(Debug)]
pub(super) struct Shared<'a> {
    pub(super) request: RequestId,
    pub(super) config: Arc<GenerationConfig>,
    pub(super) prompt: &'a [i64],
    pub(super) limit: (usize, FinishReason),
    pub(super) seed: u64,
    pub(super) constraint: Option<Box<dyn Constraint>>,
    pub(super) tokenizer: Option<&'a Arc<Tokenizer>>,
    pub(super) vocabulary: usize,
}

/// A token that was chosen.
#[derive(Debug)]
pub(super) struct Chosen {
    pub(super) id: i64,
    pub(super) text: String,
    pub(super) logprobs: Option<TokenLogprobs>,
    pub(super) finished: Option<FinishReason>,
}

impl Sample {
    pub(super) fn new(number: usize, shared: &Shared<'_>) -> Result<Sample> {
        let Shared { config, prompt, .. } = shared;
        let constraint = shared.constraint.as_ref();
        Ok(Sample {
            request: shared.request,
            number,
            config: Arc::clone(config),
            prompt: prompt.len(),
            limit: shared.limit,
            sampler: Sampler::new(config, shared.seed, number)?,
            constraint: constraint.map(|c| (c.fork(), TokenMask::new(shared.vocabulary))),
            text: shared.tokenizer.map(|tokenizer| {
                RowText::shared(Arc::clone(tokenizer), prompt, &config.stop_strings)
            }),
            logprobs: Vec::new(),
            submitted: Instant::now(),
            first_token: None,
            siblings: Vec::new(),
        })
    }

    /// The token after `tokens`, prompt included. `scores (V,)` are changed.
    pub(super) fn choose(&mut self, scores: &mut [f32], tokens: &[i64]) -> Result<Chosen> {
        let allowed = match &mut self.constraint {
            Some((constraint, mask)) => {
                mask.clear();
                constraint.allowed(mask)?;
                Some(&*mask)
            }
            None => None,
        };
        let new = tokens.len() - self.prompt;
        let choice = self.sampler.choose(scores, tokens, new, allowed)?;
        let (submitted, id) = (self.submitted, choice.id);
        self.first_token.get_or_insert_with(|| submitted.elapsed());
        self.logprobs.extend(choice.logprobs.clone());
        let mut finished = self.end_after(id, tokens.len() + 1)?;
        let mut text = String::new();
        if let Some(stream) = &mut self.text {
            let (piece, stop) = stream.push(id, finished.is_some())?;
            text = piece;
            if let Some(number) = stop {
                finished = Some(FinishReason::StopString { number });
            }
        }
        Ok(Chosen {
            id,
            text,
            logprobs: choice.logprobs,
            finished,
        })
    }

    /// Whether the text ends with the token `id`, which makes it `length` tokens long.
    fn end_after(&mut self, id: i64, length: usize) -> Result<Option<FinishReason>> {
        let mut finished = None;
        if let Some((constraint, _)) = &mut self.constraint {
            constraint.advance(id)?;
            finished = constraint.is_finished().then_some(FinishReason::Constraint);
        }
        if self.config.eos_token_id.contains(&id) {
            finished = Some(FinishReason::EndOfText);
        } else if self.config.stop_token_ids.contains(&id) {
            finished = Some(FinishReason::StopToken);
        }
        if length >= self.limit.0 {
            finished.get_or_insert(self.limit.1);
        }
        if self.is_late() {
            finished.get_or_insert(FinishReason::TimeLimit);
        }
        Ok(finished)
    }

    /// Whether `max_time` has passed since the submission.
    pub(super) fn is_late(&self) -> bool {
        let limit = self.config.max_time;
        limit.is_some_and(|limit| self.submitted.elapsed().as_secs_f64() > limit)
    }

    pub(super) fn first_token(&self) -> Option<Duration> {
        self.first_token
    }

    /// All of it, where `tokens` are prompt and continuation.
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
