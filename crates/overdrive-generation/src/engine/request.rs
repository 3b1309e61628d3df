use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use overdrive_transformer::VisionConfig;

use crate::finish_reason::limit;
use crate::images::grids_of;
use crate::prompts::{check, check_ids};
use crate::{
    Constraint, Error, FinishReason, GenerationConfig, ImagePatches, Result, TokenLogprobs,
};

/// The id of a request of one [`Engine`](crate::Engine); later requests have higher ids.
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
    /// The token ids of the prompt; at least one.
    pub prompt: Vec<i64>,
    /// The generation options. The `num_return_sequences` samples share the memory of the prompt, and
    /// `max_time` counts from the submission.
    pub config: GenerationConfig,
    /// A constraint on the continuations. Default `None`.
    pub constraint: Option<Box<dyn Constraint>>,
    /// The images of the prompt, in the order of their image tokens, for a model that sees images. Default empty, for none.
    pub images: Vec<ImagePatches>,
    /// The name of the adapter that the request is computed with; one of
    /// [`EngineModel::adapters`](crate::EngineModel::adapters). Requests of several adapters share a batch.
    /// Default `None`: the model as it is.
    pub adapter: Option<Arc<str>>,
    /// The number of likeliest tokens whose log-probabilities are returned for each position of the prompt, in addition
    /// to that of the prompt's own token. Default `None`: the prompt has no log-probabilities.
    pub prompt_logprobs: Option<usize>,
}

/// The log-probability of each token of a prompt given the tokens before it; `None` for the first one, which has none
/// before it.
pub type PromptLogprobs = Arc<[Option<TokenLogprobs>]>;

impl Request {
    /// Returns a request to continue `prompt` with the options of `config`. `num_beams` must be 1, and
    /// `use_cache` `true`.
    pub fn new(prompt: impl Into<Vec<i64>>, config: GenerationConfig) -> Request {
        Request {
            prompt: prompt.into(),
            config,
            constraint: None,
            images: Vec::new(),
            adapter: None,
            prompt_logprobs: None,
        }
    }

    /// Returns the request with a constraint on its continuations.
    #[must_use]
    pub fn with_constraint(mut self, constraint: Box<dyn Constraint>) -> Request {
        self.constraint = Some(constraint);
        self
    }

    /// Returns the request with the images of its prompt, in which as many image tokens stand for each as it has
    /// ([`VisionConfig::expand`](overdrive_transformer::VisionConfig::expand)).
    ///
    /// Requests share cached blocks of images whose pixels are the same.
    #[must_use]
    pub fn with_images(mut self, images: Vec<ImagePatches>) -> Request {
        self.images = images;
        self
    }

    /// Returns the request with the log-probabilities of its prompt (vLLM's `prompt_logprobs`), and those of the `top`
    /// likeliest tokens at each position.
    ///
    /// They are those of the model's own distribution, before any change, and do not depend on how the prompt is read:
    /// in chunks, beside other requests, or a second time after its blocks were needed, up to the rounding of another
    /// batch. The prompt reads no cached prefix, whose positions would have no logits; later requests may reuse its
    /// blocks. The logits of the prompt are computed in blocks of at most 64 MiB in f32, of which the host has one copy
    /// more; [`EngineModel::forward_in_blocks`](crate::EngineModel::forward_in_blocks) says for which models.
    ///
    /// With a `max_length` of at most the length of the prompt, and without `max_new_tokens`, nothing is generated.
    #[must_use]
    pub fn with_prompt_logprobs(mut self, top: usize) -> Request {
        self.prompt_logprobs = Some(top);
        self
    }

    /// Returns the request with an adapter.
    #[must_use]
    pub fn with_adapter(mut self, name: impl Into<Arc<str>>) -> Request {
        self.adapter = Some(name.into());
        self
    }
}

/// An event of a request.
#[derive(Debug)]
#[non_exhaustive]
pub enum Event {
    /// The prompt has been read, of a request that asks for its log-probabilities. Comes once, before the first token.
    Prompt {
        /// The request.
        request: RequestId,
        /// The log-probabilities.
        logprobs: PromptLogprobs,
    },
    /// A sample has one more token.
    Token {
        /// The request.
        request: RequestId,
        /// The number of the sample, from 0.
        sample: usize,
        /// The token id.
        id: i64,
        /// The text that is certain now; empty while a character or a stop string is incomplete, and
        /// without a tokenizer.
        text: String,
        /// The log-probability of the token and those of others, if `logprobs` asks for them.
        logprobs: Option<TokenLogprobs>,
    },
    /// A sample has ended. After the last one there are no more events of the request.
    Finished {
        /// The request.
        request: RequestId,
        /// The number of the sample.
        sample: usize,
        /// The whole continuation.
        completion: Completion,
        /// `true` for the last sample of the request.
        is_last: bool,
    },
    /// The request has failed, and there are no more events of it. Other requests are not affected.
    Failed {
        /// The request.
        request: RequestId,
        /// The error.
        error: Error,
    },
}

impl Event {
    /// Returns `true` if there are no more events of the request.
    pub fn is_last(&self) -> bool {
        match self {
            Event::Prompt { .. } | Event::Token { .. } => false,
            Event::Finished { is_last, .. } => *is_last,
            Event::Failed { .. } => true,
        }
    }

    /// Returns the request of the event.
    pub fn request(&self) -> RequestId {
        match self {
            Event::Prompt { request, .. }
            | Event::Token { request, .. }
            | Event::Finished { request, .. }
            | Event::Failed { request, .. } => *request,
        }
    }
}

/// A continuation that has ended.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Completion {
    /// The new tokens, without the prompt; an end-of-text token is included.
    pub tokens: Vec<i64>,
    /// The text without special tokens, the end-of-text or stop token, and stop strings, if the engine has a
    /// tokenizer.
    pub text: Option<String>,
    /// The log-probabilities of each token, if `logprobs` asks for them.
    pub logprobs: Option<Vec<TokenLogprobs>>,
    /// The log-probabilities of the prompt, if the request asks for them; `None` if it ended before the prompt had been
    /// read.
    pub prompt_logprobs: Option<PromptLogprobs>,
    /// The number of tokens of the prompt that earlier requests had left in the cache, so that they were not computed
    /// again.
    pub cached_tokens: usize,
    /// The reason of the end; [`FinishReason::Stopped`] for a cancelled request.
    pub finish_reason: FinishReason,
    /// The time from the submission to the first token; `None` without tokens.
    pub time_to_first_token: Option<Duration>,
    /// The time from the submission to the end.
    pub time: Duration,
}

/// The outcome of a request: its completions in the order of their numbers, or the error with which it
/// failed.
pub type Outcome = (RequestId, Result<Vec<Completion>>);

/// The completions of a request so far, by the numbers of their samples.
#[derive(Debug, Default)]
pub(crate) struct Completions(BTreeMap<usize, Completion>);

impl Completions {
    /// Takes an event of the request; returns the completions, in the order of their numbers, or the error if it is
    /// the last event.
    pub(crate) fn take(&mut self, event: Event) -> Option<Result<Vec<Completion>>> {
        match event {
            Event::Prompt { .. } | Event::Token { .. } => None,
            Event::Finished {
                sample,
                completion,
                is_last,
                ..
            } => {
                self.0.insert(sample, completion);
                is_last.then(|| Ok(std::mem::take(&mut self.0).into_values().collect()))
            }
            Event::Failed { error, .. } => Some(Err(error)),
        }
    }
}

/// The limits of a request.
#[derive(Debug, Clone)]
pub(super) struct RequestLimits {
    /// `true` if an answer does not depend on the other requests.
    pub(super) is_batch_invariant: bool,
    /// `true` if steps verify proposed tokens.
    pub(super) speculates: bool,
    pub(super) vocab_size: usize,
    /// The largest number of tokens of a prompt that the model can read.
    pub(super) context: usize,
    /// The largest number of tokens of a prompt and its continuation.
    pub(super) length: usize,
    pub(super) block_size: usize,
    pub(super) num_blocks: usize,
    /// `true` if the engine has a tokenizer.
    pub(super) has_text: bool,
    /// The names of the adapters of the model.
    pub(super) adapters: Arc<[Arc<str>]>,
    /// The vision tower, if the model sees images.
    pub(super) vision: Option<Arc<VisionConfig>>,
}

impl RequestLimits {
    /// Checks that the engine could serve `request` if it were alone.
    pub(super) fn check(&self, request: &Request) -> Result<()> {
        let (prompt, config) = (&request.prompt, &request.config);
        let vocabulary = self.vocab_size as i64;
        config.validate()?;
        self.adapter(request)?;
        // Refused rather than ignored: the result would silently differ from that of `generate`.
        unsupported(config)?;
        if let Some(tokens) = config.prompt_lookup_num_tokens.filter(|_| !self.speculates) {
            let (key, found) = ("prompt_lookup_num_tokens", tokens.to_string());
            let hint =
                "on a GPU it replays steps of one token a sequence; use generate to speculate";
            return Err(Error::NotInEngine { key, found, hint });
        }
        check_ids(config, vocabulary)?;
        if !config.stop_strings.is_empty() && !self.has_text {
            let (key, found) = ("stop_strings", format!("{:?}", config.stop_strings));
            let hint = "set the tokenizer with Engine::with_tokenizer";
            return Err(Error::NotInEngine { key, found, hint });
        }
        check(std::slice::from_ref(prompt), self.context, vocabulary)?;
        if !request.images.is_empty() {
            let vision = self.vision()?;
            vision.positions(prompt, &grids_of(&request.images, vision)?)?;
        }
        // The last token is never read, so it takes no slot of the cache.
        let tokens = (self.longest(request).0 - 1).max(prompt.len());
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

    /// Returns the vision tower, which a request with images needs.
    pub(super) fn vision(&self) -> Result<&VisionConfig> {
        let vision = self.vision.as_deref();
        Ok(vision.ok_or(overdrive_transformer::Error::NoVision)?)
    }

    /// Returns the index of the adapter of `request`.
    pub(super) fn adapter(&self, request: &Request) -> Result<Option<usize>> {
        let Some(name) = &request.adapter else {
            return Ok(None);
        };
        match self.adapters.iter().position(|own| own == name) {
            Some(index) => Ok(Some(index)),
            None => Err(Error::UnknownAdapter {
                name: name.to_string(),
                available: self.adapters.iter().map(ToString::to_string).collect(),
            }),
        }
    }

    /// Checks the shape of a model's logits.
    pub(super) fn check_logits(&self, found: &[i64], rows: i64) -> Result<()> {
        if found == [rows, self.vocab_size as i64] {
            return Ok(());
        }
        let expected = format!(
            "({rows}, {}): a row for each requested token",
            self.vocab_size
        );
        Err(overdrive_core::Error::shape("logits", found, expected).into())
    }

    /// Returns the length at which a continuation ends, prompt included, and the reason; never less
    /// than the prompt.
    pub(super) fn longest(&self, request: &Request) -> (usize, FinishReason) {
        let prompt = request.prompt.len();
        // A prompt that the cache cannot hold is refused.
        limit(&request.config, prompt, self.length.max(prompt))
    }
}

/// Refuses options that the engine would otherwise ignore.
fn unsupported(config: &GenerationConfig) -> Result<()> {
    let refuse = |key, found: String, hint| Err(Error::NotInEngine { key, found, hint });
    if config.num_beams != 1 {
        let hint = "beams search together; use generate for them";
        return refuse("num_beams", config.num_beams.to_string(), hint);
    }
    if !config.use_cache {
        let hint = "its sequences are in the paged cache; use generate to run without a cache";
        return refuse("use_cache", false.to_string(), hint);
    }
    // The kind of cache is a hint, and the paged cache gives the same tokens; but a window that the model
    // does not have would give different tokens.
    if config.cache_implementation.as_deref() == Some("sliding_window")
        && let Some(window) = config.cache_config.window_length
    {
        let hint = "its cache keeps every token; use generate for a window";
        return refuse("cache_config.window_length", window.to_string(), hint);
    }
    Ok(())
}
