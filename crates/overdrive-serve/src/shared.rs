//! The state that all requests share.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{SystemTime, UNIX_EPOCH};

use axum::http::StatusCode;
use overdrive_constraints::{GrammarVocabulary, token_bytes};
use overdrive_core::random::entropy;
use overdrive_generation::{
    ChatTemplate, EngineHandle, EngineStatistics, Error, GenerationConfig, ImageProcessor,
    Tokenizer,
};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::JoinHandle;

use crate::ServerOptions;
use crate::api_error::{ApiError, ApiResult};
use crate::fields::shorten;
use crate::metrics::Metrics;
use crate::pooler::Pooler;
use crate::text_format::TextFormat;

/// The model as clients see it.
#[derive(Debug)]
pub struct ServedModel {
    pub(crate) name: Arc<str>,
    pub(crate) tokenizer: Arc<Tokenizer>,
    pub(crate) template: Option<ChatTemplate>,
    pub(crate) config: GenerationConfig,
    pub(crate) format: TextFormat,
    pub(crate) processor: Option<ImageProcessor>,
}

impl ServedModel {
    /// Returns a model of this name. Requests can also name the [adapters](EngineHandle::adapters) of the engine; all
    /// share the tokenizer, the template and the configuration. `tokenizer` is the engine's; its truncation and
    /// padding do not change prompts. `config` has the end-of-text tokens and the defaults of the sampling options.
    /// Like OpenAI's and vLLM's servers, this one samples unless the temperature is 0, whatever `do_sample` says. Those
    /// servers sample from all tokens: for that, set `top_k` to 0 in a configuration whose files have no `top_k` of
    /// their own, since the default of [`GenerationConfig`] is transformers' 50.
    pub fn new(
        name: impl Into<Arc<str>>,
        tokenizer: Arc<Tokenizer>,
        config: GenerationConfig,
    ) -> ServedModel {
        ServedModel {
            name: name.into(),
            tokenizer: without_limits(tokenizer),
            template: None,
            config,
            format: TextFormat::default(),
            processor: None,
        }
    }

    /// Returns the model with the processor of its images. With the feature `image`, the messages of chats and responses may
    /// then have images, as data URLs.
    #[must_use]
    pub fn with_image_processor(mut self, processor: ImageProcessor) -> ServedModel {
        self.processor = Some(processor);
        self
    }

    /// Returns the model with a chat template, which `/v1/chat/completions` needs. If the configuration names no
    /// end-of-text token, the template's `eos_token` is used.
    #[must_use]
    pub fn with_template(mut self, template: ChatTemplate) -> ServedModel {
        self.config = self.config.or_end_of_text(&template, &self.tokenizer);
        self.template = Some(template);
        self
    }
}

/// Returns a tokenizer without truncation and padding, which are meant for training batches: truncation would silently
/// cut the end of a prompt.
fn without_limits(tokenizer: Arc<Tokenizer>) -> Arc<Tokenizer> {
    if tokenizer.get_truncation().is_none() && tokenizer.get_padding().is_none() {
        return tokenizer;
    }
    let mut copy = Tokenizer::clone(&tokenizer);
    copy.with_padding(None);
    // Only enabling truncation can fail.
    let _switched_off = copy.with_truncation(None);
    Arc::new(copy)
}

/// The model that answers a request.
#[derive(Debug, Clone)]
pub(crate) struct ChosenModel {
    /// The name that the request gave, or that of the model.
    pub(crate) name: Arc<str>,
    /// The adapter, if the name is that of an adapter.
    pub(crate) adapter: Option<Arc<str>>,
}

/// The thread that owns the model.
#[derive(Debug)]
pub(crate) enum Backend {
    /// A causal model, which generates text.
    Engine(EngineHandle),
    /// A model of embeddings or scores.
    Pooler(Pooler),
}

/// The state that all requests share.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) backend: Backend,
    pub(crate) model: ServedModel,
    pub(crate) options: ServerOptions,
    pub(crate) metrics: Metrics,
    /// The bytes of each token; empty if the tokenizer's tokens have none of their own.
    pub(crate) token_bytes: Vec<Option<Vec<u8>>>,
    /// The time at which the server was made, in seconds since 1970.
    pub(crate) created: u64,
    // Made for the first request that needs it, because most servers get none.
    grammar: OnceLock<std::result::Result<GrammarVocabulary, String>>,
    seats: Arc<Semaphore>,
    run: u64,
    next: AtomicU64,
}

impl Backend {
    pub(crate) fn vocab_size(&self) -> usize {
        match self {
            Backend::Engine(engine) => engine.vocab_size(),
            Backend::Pooler(pooler) => pooler.vocab_size,
        }
    }

    /// Returns the largest number of tokens of a prompt with its answer, or of a text.
    pub(crate) fn max_model_len(&self) -> usize {
        match self {
            Backend::Engine(engine) => engine.max_model_len(),
            Backend::Pooler(pooler) => pooler.max_length,
        }
    }

    /// Returns the largest number of tokens of a prompt or a text.
    pub(crate) fn max_prompt_len(&self) -> usize {
        match self {
            Backend::Engine(engine) => engine.max_prompt_len(),
            Backend::Pooler(pooler) => pooler.max_length,
        }
    }

    /// Returns the adapters that requests can name.
    pub(crate) fn adapters(&self) -> &[Arc<str>] {
        match self {
            Backend::Engine(engine) => engine.adapters(),
            Backend::Pooler(_) => &[],
        }
    }

    pub(crate) fn is_batch_invariant(&self) -> bool {
        matches!(self, Backend::Engine(engine) if engine.is_batch_invariant())
    }

    /// Returns the state of the engine; a pooler has neither a cache nor steps.
    pub(crate) fn statistics(&self) -> EngineStatistics {
        match self {
            Backend::Engine(engine) => engine.statistics(),
            Backend::Pooler(_) => EngineStatistics::default(),
        }
    }

    /// Checks that the thread of the model takes requests.
    pub(crate) fn check_running(&self) -> ApiResult<()> {
        let is_running = match self {
            Backend::Engine(engine) => engine.is_running(),
            Backend::Pooler(pooler) => pooler.is_running(),
        };
        match is_running {
            true => Ok(()),
            false => Err(Error::EngineStopped.into()),
        }
    }
}

impl Shared {
    pub(crate) fn new(backend: Backend, mut model: ServedModel, options: ServerOptions) -> Shared {
        let config = &mut model.config;
        // Options of the model's folder that the engine does not support, or that each request sets.
        config.do_sample = true;
        config.num_beams = 1;
        config.num_return_sequences = 1;
        config.use_cache = true;
        config.cache_implementation = None;
        config.prompt_lookup_num_tokens = config
            .prompt_lookup_num_tokens
            .filter(|_| matches!(&backend, Backend::Engine(engine) if engine.speculates()));
        config.logprobs = None;
        let bytes = token_bytes(&model.tokenizer, backend.vocab_size()).unwrap_or_default();
        Shared {
            seats: Arc::new(Semaphore::new(options.max_queue)),
            backend,
            model,
            options,
            metrics: Metrics::new(),
            token_bytes: bytes,
            created: now(),
            grammar: OnceLock::new(),
            run: entropy(),
            next: AtomicU64::new(0),
        }
    }

    /// Takes the seats of a request, which are given back when the result is dropped.
    pub(crate) fn seats(&self, param: &str, sequences: usize) -> ApiResult<OwnedSemaphorePermit> {
        let most = self.options.max_queue;
        if sequences > most {
            let message = format!(
                "the request asks for {sequences} sequences, and the server's `max_queue` is {most}; split the request"
            );
            return Err(ApiError::field(param, message));
        }
        let sequences = u32::try_from(sequences).unwrap_or(u32::MAX);
        Arc::clone(&self.seats)
            .try_acquire_many_owned(sequences)
            .map_err(|_| {
                let message = format!(
                    "the server is full: {most} sequences are running or waiting (`max_queue`); try again later"
                );
                ApiError::new(StatusCode::TOO_MANY_REQUESTS, "queue_full", message)
            })
    }

    /// Returns the number of seats that are taken.
    pub(crate) fn in_flight(&self) -> usize {
        let free = self.seats.available_permits();
        self.options.max_queue.saturating_sub(free)
    }

    /// Returns an id for an answer.
    pub(crate) fn id(&self, prefix: &str) -> String {
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        format!("{prefix}-{:016x}{number:08x}", self.run)
    }

    /// Returns an id for a tool call: nine letters and digits, since Mistral's templates refuse any other form when a
    /// client sends the call back.
    pub(crate) fn call_id(&self) -> String {
        const DIGITS: &[u8; 36] = b"0123456789abcdefghijklmnopqrstuvwxyz";
        let number = self.next.fetch_add(1, Ordering::Relaxed);
        // The counter is in the lowest digits, so that the ids of a run are unique.
        let mut rest = self.run.wrapping_add(number);
        let digit = |_| {
            let digit = DIGITS[(rest % 36) as usize];
            rest /= 36;
            char::from(digit)
        };
        (0..9).map(digit).collect()
    }

    /// Returns the vocabulary of grammars.
    pub(crate) fn grammar(&self) -> ApiResult<&GrammarVocabulary> {
        let made = self.grammar.get_or_init(|| {
            let (tokenizer, config) = (&self.model.tokenizer, &self.model.config);
            let size = self.backend.vocab_size();
            GrammarVocabulary::new(tokenizer, size, &config.eos_token_id)
                .map_err(|error| error.to_string())
        });
        made.as_ref().map_err(|error| {
            let message = format!("this model cannot follow a grammar: {error}");
            ApiError::field("response_format", message)
        })
    }

    /// Returns the engine, which generates text.
    pub(crate) fn engine(&self) -> ApiResult<&EngineHandle> {
        match &self.backend {
            Backend::Engine(engine) => Ok(engine),
            Backend::Pooler(pooler) => Err(self.not_served(match pooler.reranker {
                None => "generates no text, it computes embeddings: use /v1/embeddings",
                Some(_) => "generates no text, it scores documents: use /v1/rerank or /v1/score",
            })),
        }
    }

    /// Returns the error of a route that the model does not have; `what` continues "the model NAME".
    pub(crate) fn not_served(&self, what: &str) -> ApiError {
        let message = format!("the model {:?} {what}", self.model.name);
        let error = ApiError::new(StatusCode::BAD_REQUEST, "unsupported_model", message);
        error.with_param("model")
    }

    /// Returns the model or adapter that a request's `model` names; without a name, the model.
    pub(crate) fn choose_model(&self, name: Option<String>) -> ApiResult<ChosenModel> {
        let Some(name) = name.filter(|name| *name != *self.model.name) else {
            return Ok(ChosenModel {
                name: Arc::clone(&self.model.name),
                adapter: None,
            });
        };
        let adapters = self.backend.adapters();
        if let Some(adapter) = adapters.iter().find(|own| ***own == *name) {
            return Ok(ChosenModel {
                name: Arc::clone(adapter),
                adapter: Some(Arc::clone(adapter)),
            });
        }
        let names = std::iter::once(&self.model.name).chain(adapters);
        let names: Vec<String> = names.map(|own| format!("{own:?}")).collect();
        let message = format!(
            "the model {:?} does not exist; this server has {}",
            shorten(&name),
            names.join(", ")
        );
        let error = ApiError::new(StatusCode::NOT_FOUND, "model_not_found", message);
        Err(error.with_param("model"))
    }
}

/// Returns the seconds since 1970.
pub(crate) fn now() -> u64 {
    let since = SystemTime::now().duration_since(UNIX_EPOCH);
    since.map_or(0, |since| since.as_secs())
}

/// Runs a computation that would block a thread of the runtime for too long: tokenizing a prompt, decoding images or
/// compiling a grammar.
///
/// If the client disconnects, a computation that has not begun is dropped, and one that has begun keeps its `seats` until
/// it ends: their number bounds those that run and wait.
pub(crate) async fn blocking<S: Send + 'static, T: Send + 'static>(
    seats: S,
    work: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> ApiResult<(S, T)> {
    let task = tokio::task::spawn_blocking(move || (seats, work()));
    let mut task = AbortOnDrop(task);
    match (&mut task.0).await {
        Ok((seats, result)) => Ok((seats, result?)),
        // Its message is on stderr.
        Err(_) => Err(ApiError::internal(
            "internal error: a thread panicked while it prepared the request",
        )),
    }
}

struct AbortOnDrop<T>(JoinHandle<T>);

impl<T> Drop for AbortOnDrop<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc::channel;
    use std::time::Duration;

    use super::*;

    #[test]
    fn a_computation_keeps_its_seats_until_it_ends() {
        let mut runtime = tokio::runtime::Builder::new_multi_thread();
        let runtime = runtime.enable_time().build().unwrap();
        let seats = Arc::new(Semaphore::new(1));
        let taken = Arc::clone(&seats).try_acquire_owned().unwrap();
        let (begun, has_begun) = channel();
        let (end, ends) = channel::<()>();
        let work = move || {
            begun.send(()).unwrap();
            // Ends when its sender is dropped.
            let _ended = ends.recv();
            Ok(())
        };
        runtime.block_on(async {
            let waiting = blocking(taken, work);
            // The client disconnects once the computation has begun.
            let watch = tokio::task::spawn_blocking(move || has_begun.recv().unwrap());
            tokio::select! {
                _ = waiting => panic!("the computation has not ended"),
                begun = watch => begun.unwrap(),
            }
            assert_eq!(seats.available_permits(), 0);
            drop(end);
            let freed = tokio::time::timeout(Duration::from_secs(60), seats.acquire());
            drop(freed.await.unwrap().unwrap());
        });
    }
}
