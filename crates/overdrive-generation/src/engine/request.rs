use std::time::Duration;

use crate::prompts::check_ids;
use crate::{Constraint, Error, FinishReason, GenerationConfig, Result, TokenLogprobs};

/// Names a request of one [`Engine`](crate::Engine); later requests have higher numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub(super) u64);

impl std::fmt::Display for RequestId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "request {}", self.0)
    }
}

/// A prompt to be continued.
#[derive(Debug)]
#[non_exhaustive]
pub struct Request {
    /// Token ids; at least one.
    pub prompt: Vec<i64>,
    /// How it is continued; `num_return_sequences` continuations share the memory of the prompt, and
    /// `max_time` counts from the submission.
    pub config: GenerationConfig,
    /// What the continuations may be; default `None`: anything.
    pub constraint: Option<Box<dyn Constraint>>,
}

impl Request {
    /// `prompt` continued as `config` says. `num_beams` must be 1, and `use_cache` true.
    pub fn new(prompt: impl Into<Vec<i64>>, config: GenerationConfig) -> Request {
        Request {
            prompt: prompt.into(),
            config,
            constraint: None,
        }
    }

    /// Only continuations that `constraint` allows.
    #[must_use]
    pub fn with_constraint(mut self, constraint: Box<dyn Constraint>) -> Request {
        self.constraint = Some(constraint);
        self
    }
}

/// What happens to a request.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// A continuation has one more token.
    Token {
        /// Of which request.
        request: RequestId,
        /// Which of its continuations, from 0.
        sample: usize,
        /// The token.
        id: i64,
        /// The text that is now certain; empty while a character or a stop string is incomplete, and
        /// where the engine has no tokenizer.
        text: String,
        /// Its log-probability and those of others, where `logprobs` asks for them.
        logprobs: Option<TokenLogprobs>,
    },
    /// A continuation has ended. After the last one nothing more comes of the request.
    Finished {
        /// Of which request.
        request: RequestId,
        /// Which of its continuations.
        sample: usize,
        /// All of it.
        completion: Completion,
        /// Whether it was the last of the request's.
        is_last: bool,
    },
    /// The request cannot go on, and nothing more comes of it. No other request is touched.
    Failed {
        /// Which request.
        request: RequestId,
        /// Why.
        error: Error,
    },
}

impl Event {
    /// Whether nothing more comes of the request.
    pub fn is_last(&self) -> bool {
        match self {
            Event::Token { .. } => false,
            Event::Finished { is_last, .. } => *is_last,
            Event::Failed { .. } => true,
        }
    }

    /// Which request it is about.
    pub fn request(&self) -> RequestId {
        match self {
            Event::Token { request, .. }
            | Event::Finished { request, .. }
            | Event::Failed { request, .. } => *request,
        }
    }
}

/// A continuation that has ended.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Completion {
    /// Its tokens, the prompt's not among them; an end-of-text token is.
    pub tokens: Vec<i64>,
    /// Its text without special tokens and stop strings, where the engine has a tokenizer.
    pub text: Option<String>,
    /// Of each token, where `logprobs` asks for them.
    pub logprobs: Option<Vec<TokenLogprobs>>,
    /// Why it ended. [`FinishReason::Stopped`] is a cancelled one.
    pub finish_reason: FinishReason,
    /// From the submission to the first token; `None` where there is none.
    pub time_to_first_token: Option<Duration>,
    /// From the submission to the end.
    pub time: Duration,
}

/// What came of a request: its completions in the order of their numbers, or why it failed.
pub type Outcome = (RequestId, Result<Vec<Completion>>);

/// What a request may ask for.
#[derive(Debug, Clone, Copy)]
pub(super) struct RequestLimits {
    pub(super) vocab_size: i64,
    /// Positions of the model.
    pub(super) context: usize,
    /// Tokens of a prompt and its continuation.
    pub(super) length: usize,
    pub(super) block_size: usize,
    pub(super) num_blocks: usize,
    /// Whether there is a tokenizer.
    pub(super) has_text: bool,
}

impl RequestLimits {
    /// Whether the engine can answer `request` if it is alone.
    pub(super) fn check(&self, request: &Request) -> Result<()> {
        let (prompt, config) = (&request.prompt, &request.config);
        config.validate()?;
        unsupported(config)?;
        check_ids(config, self.vocab_size)?;
        if !config.stop_strings.is_empty() && !self.has_text {
            let (key, found) = ("stop_strings", format!("{:?}", config.stop_strings));
            let hint = "give it the tokenizer with Engine::with_tokenizer";
            return Err(Error::NotInEngine { key, found, hint });
        }
        if prompt.is_empty() {
            return Err(Error::EmptyPrompt { row: 0 });
        }
        let limit = self.context.min(self.length);
        if prompt.len() > limit {
            return Err(Error::PromptTooLong {
                row: 0,
                tokens: prompt.len(),
                limit: limit as i64,
            });
        }
        let known = 0..self.vocab_size;
        if let Some(position) = prompt.iter().position(|id| !known.contains(id)) {
            return Err(Error::TokenOutOfRange {
                row: 0,
                position,
                id: prompt[position],
                vocab_size: self.vocab_size,
            });
        }
        let tokens = self.longest(request).0 - 1;
        let blocks = tokens.div_ceil(self.block_size);
        if blocks > self.num_blocks {
            return Err(Error::RequestTooLarge {
                prompt: prompt.len(),
                new: tokens + 1 - prompt.len(),
                blocks,
                block_size: self.block_size,
                num_blocks: self.num_blocks,
            });
        }
        Ok(())
    }

    /// Whether a model gave what was asked.
    pub(super) fn check_logits(&self, found: &[i64], rows: i64) -> Result<()> {
        if found == [rows, self.vocab_size] {
            return Ok(());
        }
        Err(Error::LogitsShape {
            found: found.to_vec(),
            rows,
            vocab_size: self.vocab_size,
        })
    }

    /// The length at which a continuation ends, prompt included, and why it does; never under that of
    /// the prompt.
    pub(super) fn longest(&self, request: &Request) -> (usize, FinishReason) {
        let prompt = request.prompt.len();
        let asked = prompt.saturating_add(request.config.new_tokens(prompt));
        if asked > self.length {
            (self.length, FinishReason::ContextFull)
        } else {
            (asked, FinishReason::Length)
        }
    }
}

/// Refuses what would make the result another one than asked for.
fn unsupported(config: &GenerationConfig) -> Result<()> {
    let refuse = |key, found: String, hint| Err(Error::NotInEngine { key, found, hint });
    if config.num_beams != 1 {
        let hint = "beams search together; use generate for them";
        return refuse("num_beams", config.num_beams.to_string(), hint);
    }
    if !config.use_cache {
        let hint = "its texts live in the paged cache; use generate to go without";
        return refuse("use_cache", false.to_string(), hint);
    }
    if let Some(kind) = config
        .cache_implementation
        .as_deref()
        .filter(|&kind| kind != "paged")
    {
        let hint = "its cache is the paged one; use generate for others";
        return refuse("cache_implementation", kind.to_owned(), hint);
    }
    if let Some(tokens) = config.prompt_lookup_num_tokens {
        let hint = "it computes many texts at once instead; use generate to speculate on one";
        return refuse("prompt_lookup_num_tokens", tokens.to_string(), hint);
    }
    Ok(())
}
