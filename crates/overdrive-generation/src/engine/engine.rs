use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::Arc;
use std::time::Instant;

use overdrive_kv_cache::{PagedCache, PagedCacheConfig, SequenceId};
use tch::{Device, Tensor};
use tokenizers::Tokenizer;

use super::model::{EngineModel, RaggedStep};
use super::request::{Completion, Event, Outcome, Request, RequestId, RequestLimits};
use super::sample::{Chosen, Sample, Shared};
use super::scheduler::{Arrival, Job, Limits, Part, Scheduler};
use super::statistics::{EngineStatistics, Recent};
use crate::decoder::to_host;
use crate::random::SplitMix64;
use crate::{EngineConfig, Error, FinishReason, Result};

/// Continues many prompts at once, and keeps the batch full: requests join and leave at any step.
///
/// A [`step`](Engine::step) takes one new token of every running text and, within a budget of tokens,
/// parts of prompts that are still to be read, all in one row through the model. Keys and values lie in
/// the blocks of a [`PagedCache`]. Where these run out, texts wait, or the latest gives its blocks
/// back and is computed again later: never an error for a request that would fit alone. Requests are
/// served in order of arrival.
///
/// What a request gets is what [`generate`](crate::generate) gives for its prompt alone, whatever else
/// is computed beside it, up to the rounding of a wider batch.
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
/// After Yu et al. 2022 (Orca: iterations as the unit of scheduling), Kwon et al. 2023 (vLLM: paged
/// attention, arXiv:2309.06180) and Agrawal et al. 2024 (Sarathi: chunked prefill, arXiv:2403.02310).
#[derive(Debug)]
pub struct Engine<M> {
    model: M,
    device: Device,
    tokenizer: Option<Arc<Tokenizer>>,
    cache: PagedCache,
    scheduler: Scheduler<SequenceId, Sample>,
    /// How many continuations of each request go on.
    live: HashMap<RequestId, usize>,
    limits: RequestLimits,
    next: u64,
    events: Vec<Event>,
    counts: EngineStatistics,
    first_tokens: Recent,
    /// Logits of a step, on the host.
    scores: Vec<f32>,
}

impl<M: EngineModel> Engine<M> {
    /// An engine for `model`. The memory of the cache is taken here.
    ///
    /// # Errors
    /// When a value of `config` is out of its range, or the memory cannot be had.
    pub fn new(model: M, config: EngineConfig) -> Result<Engine<M>> {
        config.validate()?;
        let (shape, context) = (model.cache_shape()?, model.context());
        let numbers = 2 * shape.layers as u64 * (shape.kv_heads * shape.head_dim).unsigned_abs();
        let token_bytes = numbers * shape.kind.elt_size_in_bytes() as u64;
        // A context of n positions gives the token after the n-th as well.
        let length = config.max_model_len.unwrap_or(usize::MAX).min(context + 1);
        let num_blocks = config.blocks(token_bytes, length)?;
        let cache = PagedCache::new(PagedCacheConfig {
            block_size: config.block_size as i64,
            num_blocks,
            kind: shape.kind,
            device: shape.device,
            enable_prefix_caching: config.enable_prefix_caching,
            layers: shape.layers,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            ..PagedCacheConfig::default()
        })?;
        let limits = Limits {
            seats: config.max_num_seqs,
            tokens: config.step_tokens(shape.device == Device::Cpu),
            reserve: (config.watermark * num_blocks as f64).ceil() as usize,
        };
        Ok(Engine {
            device: shape.device,
            limits: RequestLimits {
                vocab_size: model.vocab_size() as i64,
                context,
                length,
                block_size: config.block_size,
                num_blocks,
                has_text: false,
            },
            tokenizer: None,
            model,
            cache,
            scheduler: Scheduler::new(limits),
            live: HashMap::new(),
            next: 0,
            events: Vec::new(),
            counts: EngineStatistics::default(),
            first_tokens: Recent::default(),
            scores: Vec::new(),
        })
    }

    /// Gives texts as well as tokens, and heeds `stop_strings`.
    #[must_use]
    pub fn with_tokenizer(mut self, tokenizer: Arc<Tokenizer>) -> Engine<M> {
        self.tokenizer = Some(tokenizer);
        self.limits.has_text = true;
        self
    }

    /// Takes a request; it is computed by the steps that follow.
    ///
    /// # Errors
    /// When the prompt is empty, longer than the context or holds an id outside the vocabulary; when
    /// its configuration is invalid or asks for what an engine does not do; or when prompt and
    /// continuation would not fit the cache even alone.
    pub fn submit(&mut self, request: Request) -> Result<RequestId> {
        self.limits.check(&request)?;
        let id = RequestId(self.next);
        let limit = self.limits.longest(&request);
        let shared = Shared {
            request: id,
            config: Arc::new(request.config),
            prompt: &request.prompt,
            limit,
            seed: SplitMix64::entropy(),
            constraint: request.constraint,
            tokenizer: self.tokenizer.as_ref(),
            vocabulary: self.limits.vocab_size.unsigned_abs() as usize,
        };
        let mut samples = (0..shared.config.num_return_sequences.max(1))
            .map(|number| Sample::new(number, &shared))
            .collect::<Result<Vec<_>>>()?;
        let prompt = request.prompt;
        self.next += 1;
        self.live.insert(id, samples.len());
        if limit.0 <= prompt.len() {
            for sample in &mut samples {
                let completion = sample.complete(&prompt, limit.1);
                self.finish((id, sample.number), completion);
            }
            return Ok(id);
        }
        let siblings = samples.split_off(1);
        if let Some(mut first) = samples.pop() {
            first.siblings = siblings;
            self.scheduler.submit((id.0, 0), prompt, first);
        }
        Ok(id)
    }

    /// Ends a request: its continuations finish with what they have, as [`FinishReason::Stopped`], with
    /// the events of the next step. Whether there was such a request.
    ///
    /// # Errors
    /// An error of the cache.
    pub fn cancel(&mut self, id: RequestId) -> Result<bool> {
        if !self.live.contains_key(&id) {
            return Ok(false);
        }
        let gone = self.settle(|job| job.data.request == id)?;
        for mut job in gone {
            let siblings = std::mem::take(&mut job.data.siblings);
            for mut sample in std::iter::once(job.data).chain(siblings) {
                let completion = sample.complete(&job.tokens, FinishReason::Stopped);
                self.finish((id, sample.number), completion);
            }
        }
        Ok(true)
    }

    /// Whether there is anything to do: texts to compute or events to hand out.
    pub fn is_idle(&self) -> bool {
        self.scheduler.is_empty() && self.events.is_empty()
    }

    /// Computes one step, and returns what has happened since the last.
    ///
    /// # Errors
    /// When the model or the cache fails. The step is undone: the next one computes the same. What is
    /// wrong with one request comes as its [`Event::Failed`] instead.
    pub fn step(&mut self) -> Result<Vec<Event>> {
        if !self.scheduler.is_empty() {
            let start = Instant::now();
            let _no_grad = tch::no_grad_guard();
            self.end_late()?;
            let parts = self.scheduler.schedule(&mut self.cache)?;
            if !parts.is_empty() {
                let ends = self.forward(&parts)?;
                self.scheduler.computed(&parts);
                self.choose(&ends)?;
                self.counts.steps += 1;
            }
            self.counts.busy += start.elapsed();
            let tokens: usize = parts.iter().map(|part| part.end - part.start).sum();
            self.counts.computed_tokens += tokens as u64;
        }
        Ok(std::mem::take(&mut self.events))
    }

    /// Computes steps until every request has ended; what came of each, in the order of submission.
    ///
    /// Events that earlier calls of [`step`](Engine::step) returned are not repeated.
    ///
    /// # Errors
    /// As [`Engine::step`]; it can be called again.
    pub fn run_to_end(&mut self) -> Result<Vec<Outcome>> {
        let mut outcomes: BTreeMap<RequestId, Result<BTreeMap<usize, _>>> = BTreeMap::new();
        while !self.is_idle() {
            for event in self.step()? {
                match event {
                    Event::Token { .. } => {}
                    Event::Finished {
                        request,
                        sample,
                        completion,
                        ..
                    } => {
                        let outcome = outcomes
                            .entry(request)
                            .or_insert_with(|| Ok(BTreeMap::new()));
                        if let Ok(completions) = outcome {
                            completions.insert(sample, completion);
                        }
                    }
                    Event::Failed { request, error } => {
                        outcomes.insert(request, Err(error));
                    }
                }
            }
        }
        let in_order = |completions: BTreeMap<usize, _>| completions.into_values().collect();
        Ok(outcomes
            .into_iter()
            .map(|(request, outcome)| (request, outcome.map(in_order)))
            .collect())
    }

    /// What it does and has done.
    pub fn statistics(&self) -> EngineStatistics {
        let counts = self.scheduler.counts;
        EngineStatistics {
            running: self.scheduler.running().len(),
            waiting: self.scheduler.waiting(),
            blocks_used: self.cache.used_blocks(),
            blocks: self.cache.num_blocks(),
            reused_tokens: counts.reused_tokens,
            preemptions: counts.preemptions,
            recomputed_tokens: counts.recomputed_tokens,
            time_to_first_token: self.first_tokens.summary(),
            ..self.counts.clone()
        }
    }

    /// The model.
    pub fn model(&self) -> &M {
        &self.model
    }

    /// The cache.
    pub fn cache(&self) -> &PagedCache {
        &self.cache
    }

    /// What a request may ask for.
    pub(super) fn limits(&self) -> RequestLimits {
        self.limits
    }

    /// Ends all requests with an error.
    pub(super) fn fail_all(&mut self, message: &str) -> Result<()> {
        for request in std::mem::take(&mut self.live).into_keys() {
            self.counts.failed += 1;
            let error = Error::EngineFailed {
                message: message.to_owned(),
            };
            self.events.push(Event::Failed { request, error });
        }
        self.settle(|_| true).map(|_| ())
    }

    /// Ends what waits, or is still being read, when its `max_time` is over.
    fn end_late(&mut self) -> Result<()> {
        for mut job in self.settle(|job| job.data.is_late())? {
            let siblings = std::mem::take(&mut job.data.siblings);
            for mut sample in std::iter::once(job.data).chain(siblings) {
                let completion = sample.complete(&job.tokens, FinishReason::TimeLimit);
                self.finish((sample.request, sample.number), completion);
            }
        }
        Ok(())
    }

    /// Runs the model over `parts`; the logits of those that reach the end of their text lie in
    /// `scores` afterwards, a row each. Returns which these are.
    fn forward(&mut self, parts: &[Part]) -> Result<Vec<usize>> {
        let running = self.scheduler.running();
        let text = |part: &Part| {
            let new = &running[part.job].tokens[part.start..part.end];
            Ok((self.scheduler.place(part.job)?, new))
        };
        let texts = parts.iter().map(text).collect::<Result<Vec<_>>>()?;
        let mut batch = self.cache.batch(&texts)?;
        let (ids, positions) = (batch.input_ids()?, batch.position_ids()?);
        let (mut ends, mut places) = (Vec::new(), Vec::new());
        for (part, place) in parts.iter().zip(batch.last_indices()) {
            if part.end == running[part.job].tokens.len() {
                ends.push(part.job);
                places.push(place);
            }
        }
        // A step that only reads prompts wants no logits; one row is a shape that every kernel knows.
        if places.is_empty() {
            places.push(ids.size()[1] - 1);
        }
        let places = Tensor::f_from_slice(&places)?.f_to_device(self.device)?;
        let logits = self.model.forward(RaggedStep {
            input_ids: &ids,
            position_ids: &positions,
            cache: &mut batch,
            places: &places,
        })?;
        self.limits.check_logits(&logits.size(), places.size()[0])?;
        if !ends.is_empty() {
            to_host(&logits, &mut self.scores)?;
        }
        batch.commit()?;
        Ok(ends)
    }

    /// Chooses the next token of the running texts `ends`, whose logits lie in `scores`.
    fn choose(&mut self, ends: &[usize]) -> Result<()> {
        let vocabulary = self.limits.vocab_size.unsigned_abs() as usize;
        let mut scores = std::mem::take(&mut self.scores);
        let mut ended: HashSet<Arrival> = HashSet::new();
        for (&index, scores) in ends.iter().zip(scores.chunks_exact_mut(vocabulary)) {
            match self.choose_one(index, scores) {
                Ok(false) => {}
                Ok(true) => {
                    ended.insert(self.scheduler.running()[index].arrival);
                }
                Err(error) => {
                    let request = self.scheduler.running()[index].data.request;
                    if self.live.remove(&request).is_some() {
                        self.counts.failed += 1;
                        self.events.push(Event::Failed { request, error });
                    }
                }
            }
        }
        self.scores = scores;
        let live = std::mem::take(&mut self.live);
        let settled = self
            .settle(|job| ended.contains(&job.arrival) || !live.contains_key(&job.data.request));
        self.live = live;
        settled.map(|_| ())
    }

    /// Chooses the next token of running text `index`; whether it has ended. Before the first token of
    /// a prompt its other continuations take theirs, and run or wait on their own from there.
    fn choose_one(&mut self, index: usize, scores: &mut [f32]) -> Result<bool> {
        let Some(job) = self.scheduler.job(index) else {
            return Err(Error::Scheduler("a text of the step is gone"));
        };
        let request = job.data.request;
        if !self.live.contains_key(&request) {
            return Ok(true); // Another of its continuations has failed in this step.
        }
        for mut sibling in std::mem::take(&mut job.data.siblings) {
            let Some(job) = self.scheduler.job(index) else {
                break;
            };
            let tokens = job.tokens.clone();
            let chosen = sibling.choose(&mut scores.to_vec(), &tokens)?;
            let (number, id) = (sibling.number, chosen.id);
            let finished = chosen.finished;
            self.push_token((request, number), chosen);
            match finished {
                Some(reason) => {
                    let completion = sibling.complete(&[tokens, vec![id]].concat(), reason);
                    self.finish((request, number), completion);
                }
                None => self
                    .scheduler
                    .fork(index, number, id, sibling, &mut self.cache)?,
            }
        }
        let Some(job) = self.scheduler.job(index) else {
            return Err(Error::Scheduler("a text of the step is gone"));
        };
        let is_first = job.data.first_token().is_none();
        let chosen = job.data.choose(scores, &job.tokens)?;
        job.tokens.push(chosen.id);
        if is_first && let Some(time) = job.data.first_token() {
            self.first_tokens.push(time);
        }
        let number = job.data.number;
        let completion = chosen
            .finished
            .map(|reason| job.data.complete(&job.tokens, reason));
        self.push_token((request, number), chosen);
        let has_ended = completion.is_some();
        if let Some(completion) = completion {
            self.finish((request, number), completion);
        }
        Ok(has_ended)
    }

    fn push_token(&mut self, (request, sample): (RequestId, usize), chosen: Chosen) {
        self.counts.generated_tokens += 1;
        self.events.push(Event::Token {
            request,
            sample,
            id: chosen.id,
            text: chosen.text,
            logprobs: chosen.logprobs,
        });
    }

    /// A continuation has ended.
    fn finish(&mut self, (request, sample): (RequestId, usize), completion: Completion) {
        let left = self.live.get_mut(&request).map_or(0, |left| {
            *left -= 1;
            *left
        });
        let is_last = left == 0;
        if is_last && self.live.remove(&request).is_some() {
            match completion.finish_reason {
                FinishReason::Stopped => self.counts.cancelled += 1,
                _ => self.counts.finished += 1,
            }
        }
        self.events.push(Event::Finished {
            request,
            sample,
            completion,
            is_last,
        });
    }

    fn settle(
        &mut self,
        gone: impl FnMut(&Job<SequenceId, Sample>) -> bool,
    ) -> Result<Vec<Job<SequenceId, Sample>>> {
        self.scheduler.settle(&mut self.cache, gone)
    }
}
