//! Continuous batching: many requests over one model and one paged cache.

use std::collections::{BTreeMap, HashMap};
use std::ops::ControlFlow;
use std::sync::Arc;
use std::time::{Duration, Instant};

use overdrive_core::check_option;
use overdrive_core::random::entropy;
use overdrive_kv_cache::{PagedCache, PagedCacheConfig, SequenceId};
use overdrive_transformer::VisionConfig;
use tch::Device;
use tokenizers::Tokenizer;
use tracing::info;

use self::assistant::Assistant;
use self::flight::Flight;
use self::prompt_logprobs::PromptScores;
use self::request::RequestLimits;
use self::sample::{RequestContext, Sample};
use self::scheduler::{Limits, ScheduledSequence, Scheduler};
use self::statistics::LatencyWindow;
use self::step_logits::StepLogits;
use crate::captured::CapturedSteps;
use crate::device_sampling::LookAhead;
use crate::images::PromptImages;
use crate::speculation::check_vocabularies;
use crate::{Error, FinishReason, ImagePatches, Result};

mod assistant;
mod block_allocator;
mod config;
mod flight;
mod handle;
mod model;
mod prompt_logprobs;
mod request;
mod sample;
mod scheduler;
mod statistics;
mod step;
mod step_images;
mod step_logits;

pub use config::EngineConfig;
pub use handle::{EngineHandle, Events, Ticket};
pub use model::{EngineModel, RaggedStep, StepAdapters};
pub(crate) use request::Completions;
pub use request::{Completion, Event, Outcome, PromptLogprobs, Request, RequestId};
pub use statistics::{EngineStatistics, Latency};

/// An inference engine that continues many prompts at once and keeps the batch full: requests join and
/// leave at any step.
///
/// A [`step`](Engine::step) computes one new token of every running sequence and, within a token
/// budget, chunks of prompts that are still to be read, all in one row through the model. Keys and
/// values are stored in the blocks of a [`PagedCache`]. If blocks run out, sequences wait, or the latest
/// one releases its blocks and is recomputed later; a request that would fit alone never fails
/// for lack of cache memory. Requests are served in order of arrival.
///
/// A request gets the tokens that [`generate`](crate::generate) returns for its prompt alone, whatever
/// else is computed beside it, up to the rounding of a wider batch.
///
/// An engine computes on the thread that calls it, in that thread's mode for subnormal numbers, which a program sets
/// with [`set_flush_denormals`](overdrive_sys::denormals::set_flush_denormals). An
/// [`EngineHandle`](crate::EngineHandle) sets it on its own thread.
///
/// `M` is a [`CausalLm`](overdrive_transformer::CausalLm), a reference to one, or a model of your own.
///
/// ```
/// use overdrive_generation::{Engine, EngineConfig, GenerationConfig, Request};
/// use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = LlamaConfig {
///     vocab_size: 100,
///     hidden_size: 32,
///     intermediate_size: 64,
///     num_hidden_layers: 2,
///     num_attention_heads: 4,
///     ..LlamaConfig::default()
/// };
/// let model = CausalLm::new(&config.into(), &InitOptions::default())?;
/// let mut engine = Engine::new(&model, EngineConfig::default())?;
/// for length in [3, 50, 7] {
///     let prompt: Vec<i64> = (0..length).collect();
///     let config = GenerationConfig { max_new_tokens: Some(8), ..GenerationConfig::default() };
///     engine.submit(Request::new(prompt, config))?;
/// }
/// for (request, completions) in engine.run_to_end()? {
///     println!("{request}: {:?}", completions?[0].tokens);
/// }
/// assert_eq!(engine.statistics().generated_tokens, 3 * 8);
/// # Ok(())
/// # }
/// ```
///
/// References: Yu et al. 2022 (Orca: iterations as the unit of scheduling), Kwon et al. 2023 (vLLM:
/// paged attention, arXiv:2309.06180) and Agrawal et al. 2024 (Sarathi: chunked prefill,
/// arXiv:2403.02310).
#[derive(Debug)]
pub struct Engine<M> {
    /// The captured steps; dropped before the fields that they use.
    captured: Option<CapturedSteps>,
    /// The step that the device computes between two calls of [`step`](Engine::step).
    flight: Option<Flight>,
    look_ahead: LookAhead,
    model: M,
    device: Device,
    tokenizer: Option<Arc<Tokenizer>>,
    /// The draft model.
    assistant: Option<Assistant>,
    cache: PagedCache,
    scheduler: Scheduler<SequenceId, Sample>,
    /// The requests that have not ended.
    live: HashMap<RequestId, LiveRequest>,
    limits: RequestLimits,
    /// The number of the next request.
    next: u64,
    // Also filled between steps, by `cancel` and by requests that end at submission.
    events: Vec<Event>,
    counts: EngineStatistics,
    first_tokens: LatencyWindow,
    /// The logits of a step.
    logits: StepLogits,
}

/// A request that has not ended.
#[derive(Debug)]
struct LiveRequest {
    /// The number of its unfinished samples.
    samples: usize,
    /// `true` if a sample was ended early: cancelled, or by `max_time`.
    is_cut: bool,
}

impl<M: EngineModel> Engine<M> {
    /// Returns an engine for `model` and allocates its cache.
    ///
    /// # Errors
    /// When an option of `config` is out of its range, or memory runs out.
    pub fn new(model: M, config: EngineConfig) -> Result<Engine<M>> {
        config.validate()?;
        let (shape, context) = (model.cache_shape()?, model.context());
        // After the last of n positions the model still gives logits, so that n + 1 tokens are
        // possible.
        let possible = context.saturating_add(1);
        let length = config.max_model_len.unwrap_or(possible);
        check_option(
            length <= possible,
            "max_model_len",
            length,
            format!(
                "at most {possible}: the context of {context}, and one generated token that the model does not read"
            ),
        )?;
        let sizes = PagedCacheConfig::of(&shape);
        if config.enable_prefix_caching && !sizes.enable_prefix_caching {
            info!(
                "prefixes are not shared: the states of this model's recurrent layers are of whole sequences"
            );
        }
        let sizes = PagedCacheConfig {
            block_size: config.block_size as i64,
            kv_cache_dtype: config.kv_cache_dtype,
            enable_prefix_caching: config.enable_prefix_caching && sizes.enable_prefix_caching,
            ..sizes
        };
        let most = length;
        let sequences = config.sequences(&sizes);
        if sequences < config.max_num_seqs {
            info!(
                "at most {sequences} sequences are computed at once, not max_num_seqs ({}): the states of one take up to {} \
                 bytes of kv_cache_memory_bytes",
                config.max_num_seqs,
                sizes.bytes_of_states(1)
            );
        }
        let num_blocks = config.blocks(&sizes, sequences, most)?;
        // If the cache cannot hold the context, it bounds the sequences unless the caller has set another
        // bound: `max_length` in a model's folder usually equals the context, and without this bound every
        // request would be refused.
        let held = num_blocks
            .saturating_mul(config.block_size)
            .saturating_add(1);
        let length = config.max_model_len.map_or(most.min(held), |_| most);
        let cache = PagedCache::new(PagedCacheConfig {
            num_blocks,
            ..sizes
        })?;
        let limits = Limits {
            max_sequences: sequences,
            tokens: config.step_tokens(shape.device == Device::Cpu),
            reserve: (config.watermark * num_blocks as f64).ceil() as usize,
        };
        let captured = match config.enforce_eager {
            true => None,
            false => CapturedSteps::new(&model, &cache, config.max_num_seqs, length),
        };
        Ok(Engine {
            captured,
            flight: None,
            look_ahead: LookAhead::default(),
            device: shape.device,
            limits: RequestLimits {
                is_batch_invariant: tch::no_grad(|| model.is_batch_invariant()),
                speculates: shape.device == Device::Cpu,
                vocab_size: model.vocab_size(),
                context: context.min(most),
                length,
                block_size: config.block_size,
                num_blocks,
                has_text: false,
                adapters: model.adapters().into_iter().map(Arc::from).collect(),
                vision: model.vision().cloned().map(Arc::new),
            },
            tokenizer: None,
            assistant: None,
            model,
            cache,
            scheduler: Scheduler::new(limits),
            live: HashMap::new(),
            next: 0,
            events: Vec::new(),
            counts: EngineStatistics::default(),
            first_tokens: LatencyWindow::default(),
            logits: StepLogits::default(),
        })
    }

    /// Returns the engine with a tokenizer: it then gives text as well as tokens, and supports
    /// `stop_strings`.
    #[must_use]
    pub fn with_tokenizer(mut self, tokenizer: Arc<Tokenizer>) -> Engine<M> {
        self.tokenizer = Some(tokenizer);
        self.limits.has_text = true;
        self
    }

    /// Returns the engine with a draft model: a smaller model with the same tokens, which proposes tokens to each sequence
    /// whose request does not ask for prompt lookup. The model verifies them together in its next step. Answers have the
    /// tokens that they have without a draft model; `num_assistant_tokens`, `num_assistant_tokens_schedule` and
    /// `assistant_confidence_threshold` of a request bound the proposals. The draft model has a cache with as many blocks.
    ///
    /// `tokenizer` is that of the draft model: if the engine has one too, their tokens are compared.
    ///
    /// # Errors
    /// On a GPU, where steps are replayed; if the vocabularies differ; if memory runs out.
    pub fn with_assistant(
        mut self,
        assistant: impl EngineModel + Send + 'static,
        tokenizer: Option<&Tokenizer>,
    ) -> Result<Engine<M>> {
        if !self.limits.speculates {
            let (key, found) = ("assistant_model", "set".to_owned());
            let hint =
                "on a GPU it replays steps of one token a sequence; use generate to speculate";
            return Err(Error::NotInEngine { key, found, hint });
        }
        let sizes = [self.limits.vocab_size, assistant.vocab_size()];
        check_vocabularies(
            sizes.map(|size| size as i64),
            self.tokenizer.as_deref().zip(tokenizer),
        )?;
        let (size, blocks) = (self.limits.block_size, self.limits.num_blocks);
        self.assistant = Some(Assistant::new(Box::new(assistant), size, blocks)?);
        Ok(self)
    }

    /// Returns the vision tower and the tokens of images, if the model sees images.
    pub fn vision(&self) -> Option<&VisionConfig> {
        self.limits.vision.as_deref()
    }

    /// Submits a request; the following steps compute it.
    ///
    /// # Errors
    /// When the prompt is empty, longer than the context or holds an id outside the vocabulary; when
    /// its configuration is invalid or asks for something that an engine does not support; or when
    /// prompt and continuation would not fit the cache even alone.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        let id = RequestId(self.next);
        self.submit_as(id, request)?;
        self.next += 1;
        Ok(id)
    }

    /// Submits a request under an id that no other has had.
    fn submit_as(&mut self, id: RequestId, request: Request) -> Result<()> {
        self.limits.check(&request)?;
        let limit = self.limits.longest(&request);
        let adapter = self.limits.adapter(&request)?;
        let images = self.images_of(&request.prompt, request.images)?;
        let keys = images
            .as_ref()
            .map(|images| Arc::from(images.keys.as_slice()));
        let shared = RequestContext {
            request: id,
            images,
            config: Arc::new(request.config),
            prompt: &request.prompt,
            limit,
            // Requests without their own seed draw different numbers; the samples of one request use
            // different streams.
            seed: entropy(),
            constraint: request.constraint,
            adapter,
            tokenizer: self.tokenizer.as_ref(),
            vocabulary: self.limits.vocab_size,
        };
        let mut samples = (0..shared.config.num_return_sequences.max(1))
            .map(|number| Sample::new(number, &shared))
            .collect::<Result<Vec<_>>>()?;
        let prompt = request.prompt;
        let siblings = samples.split_off(1);
        let Some(mut first) = samples.pop() else {
            return Err(Error::Scheduler("a request has no sample"));
        };
        let live = LiveRequest {
            samples: 1 + siblings.len(),
            is_cut: false,
        };
        self.live.insert(id, live);
        first.siblings = siblings;
        first.prompt_scores = request.prompt_logprobs.map(PromptScores::new);
        // The only token of a prompt has no log-probability, and needs no step.
        if let Some(logprobs) = first.extend_scores(Vec::new()) {
            let request = id;
            self.events.push(Event::Prompt { request, logprobs });
        }
        // Nothing to compute: the request ends without a step.
        if first.prompt_scores.is_none() && first.is_full(prompt.len()) {
            self.finish_all(id, first.complete_all(&prompt, 0, limit.1));
            return Ok(());
        }
        // Keys and values depend on the adapter, so only requests with the same adapter share blocks.
        let namespace = adapter.map_or(0, |index| index as u64 + 1);
        let reusable = first.reusable();
        self.scheduler
            .submit((id.0, 0), namespace, (prompt, reusable), keys, first);
        Ok(())
    }

    /// Returns the images of a prompt, if it has any.
    fn images_of(
        &self,
        prompt: &[i64],
        images: Vec<ImagePatches>,
    ) -> Result<Option<Arc<PromptImages>>> {
        if images.is_empty() {
            return Ok(None);
        }
        let images = PromptImages::new(prompt, images, self.limits.vision()?)?;
        Ok(Some(Arc::new(images)))
    }

    /// Ends a request: its samples finish with the tokens that they have, as [`FinishReason::Stopped`],
    /// with the events of the next step. Returns `true` if there was such a request.
    ///
    /// # Errors
    /// An error of the cache.
    pub fn cancel(&mut self, id: RequestId) -> Result<bool> {
        if !self.live.contains_key(&id) {
            return Ok(false);
        }
        let gone = self.remove_where(|sequence| sequence.data.request == id)?;
        self.complete_all(gone, FinishReason::Stopped);
        Ok(true)
    }

    /// Returns `true` if there is nothing to compute and no event to return.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_empty() && self.events.is_empty() && self.flight.is_none()
    }

    /// Computes one step, and returns the events since the last one.
    ///
    /// # Errors
    /// When the model or the cache fails. The step is undone, and the next one computes the same. An
    /// error of a single request is returned as its [`Event::Failed`] instead.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        if !self.scheduler.is_empty() || self.flight.is_some() {
            let start = Instant::now();
            // Per step, because the caller may step the engine from any thread, and the mode belongs to
            // the thread.
            let _no_grad = tch::no_grad_guard();
            self.end_late()?;
            let tokens = match self.flight.take() {
                Some(flight) => self.land(flight)?,
                None => self.compute()?,
            };
            self.counts.steps += u64::from(tokens > 0);
            self.counts.busy += start.elapsed();
            self.counts.computed_tokens += tokens as u64;
        }
        Ok(std::mem::take(&mut self.events))
    }

    /// Computes steps until every request has ended; returns the outcomes in the order of submission.
    ///
    /// Events that earlier calls of [`step`](Engine::step) returned are not repeated.
    ///
    /// # Errors
    /// As [`Engine::step`]; the call can be repeated.
    pub fn run_to_end(&mut self) -> Result<Vec<Outcome>> {
        let mut requests: HashMap<RequestId, Completions> = HashMap::new();
        let mut outcomes = BTreeMap::new();
        while !self.is_idle() {
            for event in self.step()? {
                let id = event.request();
                if let Some(outcome) = requests.entry(id).or_default().take(event) {
                    outcomes.insert(id, outcome);
                }
            }
        }
        Ok(outcomes.into_iter().collect())
    }

    /// Computes one request to its end, and returns its completions in the order of their numbers. `on_step` is
    /// called after each step with the request's new events, of which there may be none; if it breaks, the
    /// request is cancelled.
    ///
    /// After an error nothing is left of the request: the next one does not see its events. Other requests are
    /// computed too, and the next [`step`](Engine::step) returns their events.
    ///
    /// # Errors
    /// As [`Engine::submit`] and [`Engine::step`], and the error with which the request failed.
    pub fn run_one(
        &mut self,
        request: Request,
        mut on_step: impl FnMut(&[Event]) -> ControlFlow<()>,
    ) -> Result<Vec<Completion>> {
        let id = self.submit(request)?;
        let mut others = Vec::new();
        let outcome = self.run_request(id, &mut others, &mut on_step);
        if outcome.is_err() {
            // The first error is the one to report.
            let _cancelled = self.cancel(id);
            self.events.retain(|event| event.request() != id);
        }
        others.append(&mut self.events);
        self.events = others;
        outcome
    }

    fn run_request(
        &mut self,
        id: RequestId,
        others: &mut Vec<Event>,
        on_step: &mut dyn FnMut(&[Event]) -> ControlFlow<()>,
    ) -> Result<Vec<Completion>> {
        let mut completions = Completions::default();
        loop {
            let (own, rest): (Vec<_>, Vec<_>) = self
                .step()?
                .into_iter()
                .partition(|event| event.request() == id);
            others.extend(rest);
            let stops = on_step(&own).is_break();
            for event in own {
                if let Some(outcome) = completions.take(event) {
                    return outcome;
                }
            }
            if stops {
                self.cancel(id)?;
            }
            if self.is_idle() {
                return Err(Error::Scheduler("a request has ended without an event"));
            }
        }
    }

    /// Returns the state and the counters of the engine.
    pub fn statistics(&self) -> EngineStatistics {
        EngineStatistics {
            time_to_first_token: self.first_tokens.summary(),
            ..self.counts()
        }
    }

    /// Returns the statistics without the latency, whose measurements must be sorted.
    fn counts(&self) -> EngineStatistics {
        let counts = self.scheduler.counts;
        let captured = self.captured.as_ref();
        let captured = captured.map(CapturedSteps::counts).unwrap_or_default();
        EngineStatistics {
            replayed_steps: captured.replays,
            graphs: captured.graphs,
            graph_bytes: captured.bytes,
            running: self.scheduler.running().len(),
            waiting: self.scheduler.waiting(),
            blocks_used: self.cache.used_blocks(),
            blocks: self.cache.num_blocks(),
            cache_bytes: self.cache.bytes(),
            reused_tokens: counts.reused_tokens,
            preemptions: counts.preemptions,
            recomputed_tokens: counts.recomputed_tokens,
            ..self.counts.clone()
        }
    }

    /// Returns the number of tokens of a block of the cache.
    pub(crate) fn block_size(&self) -> usize {
        self.limits.block_size
    }

    /// Records the time of a warm-up.
    pub(crate) fn record_warm_up(&mut self, time: Duration) {
        self.counts.warm_up += time;
    }

    /// Captures the decoding steps of every number of sequences, if this engine captures steps and none is running.
    pub(crate) fn capture_steps(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        let sequences = self.scheduler.max_sequences();
        match &mut self.captured {
            Some(captured) if self.flight.is_none() => {
                captured.prepare(&self.model, &mut self.cache, sequences)
            }
            _ => Ok(()),
        }
    }

    /// Returns the model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// Returns the cache.
    pub fn cache(&self) -> &PagedCache {
        &self.cache
    }

    /// Returns the limits of a request.
    fn limits(&self) -> RequestLimits {
        self.limits.clone()
    }

    /// Ends all requests with an error.
    fn fail_all(&mut self, message: &str) -> Result<()> {
        for request in std::mem::take(&mut self.live).into_keys() {
            self.counts.failed += 1;
            let error = Error::EngineFailed {
                message: message.to_owned(),
            };
            self.events.push(Event::Failed { request, error });
        }
        self.remove_where(|_| true).map(|_| ())
    }

    /// Ends the requests whose `max_time` is over while they wait or while their prompt is being read.
    fn end_late(&mut self) -> Result<()> {
        let gone = self.remove_where(|sequence| sequence.data.is_late())?;
        self.complete_all(gone, FinishReason::TimeLimit);
        Ok(())
    }

    /// Ends the samples of `gone` with the tokens that they have.
    fn complete_all(
        &mut self,
        gone: Vec<ScheduledSequence<SequenceId, Sample>>,
        reason: FinishReason,
    ) {
        for mut sequence in gone {
            let cached = sequence.cached_tokens();
            let completions = sequence.data.complete_all(&sequence.tokens, cached, reason);
            self.finish_all(sequence.data.request, completions);
        }
    }

    /// Returns the cache of the draft model, if there is one.
    pub fn assistant_cache(&self) -> Option<&PagedCache> {
        self.assistant.as_ref().map(Assistant::cache)
    }

    /// Records the end of samples of one request.
    fn finish_all(&mut self, request: RequestId, completions: Vec<(usize, Completion)>) {
        for (sample, completion) in completions {
            self.finish((request, sample), completion);
        }
    }

    /// Records the end of a sample.
    fn finish(&mut self, (request, sample): (RequestId, usize), completion: Completion) {
        let is_last = self.live.get_mut(&request).is_none_or(|live| {
            let reason = completion.finish_reason;
            live.is_cut |= matches!(reason, FinishReason::Stopped | FinishReason::TimeLimit);
            live.samples -= 1;
            live.samples == 0
        });
        if is_last && let Some(live) = self.live.remove(&request) {
            match live.is_cut {
                true => self.counts.cancelled += 1,
                false => self.counts.finished += 1,
            }
        }
        self.events.push(Event::Finished {
            request,
            sample,
            completion,
            is_last,
        });
    }

    fn remove_where(
        &mut self,
        gone: impl Fn(&ScheduledSequence<SequenceId, Sample>) -> bool,
    ) -> Result<Vec<ScheduledSequence<SequenceId, Sample>>> {
        let gone = self.scheduler.remove_where(&mut self.cache, gone)?;
        if let Some(assistant) = &mut self.assistant {
            let running = self.scheduler.running();
            assistant.retain(|arrival| running.iter().any(|other| other.arrival == arrival))?;
        }
        Ok(gone)
    }
}

#[cfg(test)]
mod tests {
    use overdrive_transformer::{CausalLm, InitOptions, LlamaConfig};

    use super::*;
    use crate::GenerationConfig;

    #[test]
    fn a_request_of_which_one_sample_was_ended_early_counts_as_cancelled_whichever_sample_ends_last()
     {
        tch::set_num_threads(1);
        let config = LlamaConfig {
            vocab_size: 16,
            hidden_size: 32,
            intermediate_size: 32,
            num_hidden_layers: 1,
            num_attention_heads: 4,
            ..LlamaConfig::default()
        };
        let model = CausalLm::new(&config.into(), &InitOptions::default()).unwrap();
        let mut engine = Engine::new(model, EngineConfig::default()).unwrap();
        let nothing = GenerationConfig {
            max_length: Some(1),
            max_new_tokens: None,
            ..GenerationConfig::default()
        };
        engine.submit(Request::new([1], nothing)).unwrap();
        let finished = engine.run_to_end().unwrap().remove(0).1.unwrap().remove(0);
        assert_eq!((engine.counts.finished, engine.counts.cancelled), (1, 0));
        for (number, early) in (1..).zip([FinishReason::TimeLimit, FinishReason::Stopped]) {
            let id = RequestId(number);
            let live = LiveRequest {
                samples: 2,
                is_cut: false,
            };
            engine.live.insert(id, live);
            let cut = Completion {
                finish_reason: early,
                ..finished.clone()
            };
            engine.finish((id, 0), cut);
            engine.finish((id, 1), finished.clone());
            assert!(engine.events.pop().unwrap().is_last());
            assert_eq!(
                (engine.counts.finished, engine.counts.cancelled),
                (1, number)
            );
        }
    }
}
