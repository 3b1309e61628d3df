//! One step of an engine: the proposals, the rows of the model, the choice of tokens.

use std::collections::HashSet;

use overdrive_kv_cache::SequenceId;
use overdrive_sys::transfer::to_device;
use tch::Tensor;

use super::Engine;
use super::assistant::Drafted;
use super::model::{EngineModel, RaggedStep, StepAdapters};
use super::prompt_logprobs::{ScoredPosition, score_in_blocks};
use super::request::{Event, RequestId};
use super::sample::Sample;
use super::scheduler::{Arrival, Chunk};
use super::step_images::StepImages;
use super::step_logits::{SequenceLogits, StepEnd, StepLogits};
use crate::rows::ChosenToken;
use crate::{Error, Result, TokenLogprobs};

impl<M: EngineModel> Engine<M> {
    /// Computes the next step; returns the number of its tokens.
    pub(super) fn compute(&mut self) -> Result<usize> {
        self.propose()?;
        let chunks = self.schedule()?;
        if chunks.is_empty() {
            return Ok(0);
        }
        if !self.encode_images(&chunks)? {
            return Ok(0);
        }
        if let Some(flight) = self.launch(&chunks)? {
            return self.land(flight);
        }
        self.compute_chunks(&chunks)?;
        Ok(chunks.iter().map(Chunk::len).sum())
    }

    /// Computes the sequences of the next step one after another, because together they have failed, and fails the
    /// requests of those that fail alone, too.
    ///
    /// # Errors
    /// Those of the cache and the scheduler, after which no request can be computed.
    pub(super) fn compute_separately(&mut self) -> Result<()> {
        let _no_grad = tch::no_grad_guard();
        // The draft model may be what has failed.
        for index in 0..self.scheduler.running().len() {
            if let Some(sequence) = self.scheduler.sequence(index) {
                sequence.proposed = 0;
            }
        }
        let chunks = self.schedule()?;
        let running = self.scheduler.running();
        let arrivals = chunks.iter().map(|chunk| running[chunk.sequence].arrival);
        for (chunk, arrival) in chunks.iter().zip(arrivals.collect::<Vec<_>>()) {
            // Sequences have other indices after one before them has ended.
            let mut running = self.scheduler.running().iter();
            let Some(sequence) = running.position(|other| other.arrival == arrival) else {
                continue; // Another sample of its request has failed.
            };
            let request = self.scheduler.running()[sequence].data.request;
            let chunk = [Chunk { sequence, ..*chunk }];
            if self.encode_images(&chunk)?
                && let Err(error) = self.compute_chunks(&chunk)
            {
                let message = error.to_string();
                self.fail(request, Error::EngineFailed { message });
                self.remove_settled(&HashSet::new())?;
            }
        }
        Ok(())
    }

    /// Returns the chunks of the next step.
    fn schedule(&mut self) -> Result<Vec<Chunk>> {
        let mut chunks = self.scheduler.schedule(&mut self.cache)?;
        // The rows of each adapter are adjacent, so that one matmul computes all of them.
        let running = self.scheduler.running();
        chunks.sort_by_key(|chunk| running[chunk.sequence].data.adapter);
        Ok(chunks)
    }

    /// Encodes the images that `chunks` read. Returns `false` if a request has failed, whose sequences are then gone.
    fn encode_images(&mut self, chunks: &[Chunk]) -> Result<bool> {
        for chunk in chunks {
            let Sample {
                images, request, ..
            } = &self.scheduler.running()[chunk.sequence].data;
            if let Some(images) = images {
                let id = self.scheduler.cache_id(chunk.sequence)?;
                self.cache.set_position_offset(id, images.delta())?;
                // Large images may need more memory than there is: an error of their request alone.
                if let Err(error) = images.encode(&(chunk.start..chunk.end), &self.model) {
                    self.fail(*request, error);
                    self.remove_settled(&HashSet::new())?;
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    /// Computes `chunks`, and chooses the next token of the sequences that end in them.
    fn compute_chunks(&mut self, chunks: &[Chunk]) -> Result<()> {
        let ends = self.forward(chunks)?;
        self.scheduler.computed(chunks);
        for chunk in chunks {
            let sequence = &self.scheduler.running()[chunk.sequence];
            if let Some(images) = &sequence.data.images {
                images.forget(chunk.end);
            }
        }
        self.choose(&ends)
    }

    /// Proposes tokens to follow those of the sequences that decode.
    fn propose(&mut self) -> Result<()> {
        let context = self.limits.context;
        let mut without = Vec::new();
        for index in 0..self.scheduler.running().len() {
            if let Some(sequence) = self.scheduler.sequence(index) {
                let decodes = sequence.is_decoding();
                if decodes && !sequence.data.look_up(&sequence.tokens, context) {
                    without.push(index);
                }
                sequence.proposed = if decodes {
                    sequence.data.proposal.len()
                } else {
                    0
                };
            }
        }
        let Some(assistant) = &mut self.assistant else {
            return Ok(());
        };
        let running = self.scheduler.running();
        let drafted = without.iter().map(|&index| {
            let sequence = &running[index];
            Drafted {
                arrival: sequence.arrival,
                tokens: &sequence.tokens,
                most: sequence.data.most_proposed(sequence.tokens.len(), context),
                config: sequence.data.row.sampler.config(),
            }
        });
        let proposals = assistant.propose(&drafted.collect::<Vec<_>>())?;
        for (index, proposal) in without.into_iter().zip(proposals) {
            if let Some(sequence) = self.scheduler.sequence(index) {
                sequence.proposed = proposal.len();
                sequence.data.proposal = proposal;
            }
        }
        Ok(())
    }

    /// Runs the model over `chunks`. The logits of the sequences whose last token is among them are in
    /// `logits` afterwards; returns those sequences.
    fn forward(&mut self, chunks: &[Chunk]) -> Result<Vec<StepEnd>> {
        let running = self.scheduler.running();
        let new_tokens = |chunk: &Chunk| {
            let sequence = &running[chunk.sequence];
            let mut new = sequence.keys(chunk.start..chunk.end).into_owned();
            new.extend(sequence.data.proposal.iter().take(chunk.proposed));
            Ok((self.scheduler.cache_id(chunk.sequence)?, new))
        };
        let new_tokens = chunks.iter().map(new_tokens).collect::<Result<Vec<_>>>()?;
        let step = new_tokens.iter().map(|(id, new)| (*id, new.as_slice()));
        let step: Vec<(SequenceId, &[i64])> = step.collect();
        let mut batch = self.cache.batch(&step)?;
        let sequence = |chunk: &Chunk| &running[chunk.sequence];
        let images = StepImages::of(chunks, sequence, self.device)?;
        let (ids, positions, images) = match images {
            None => (batch.input_ids()?, batch.position_ids()?, None),
            Some(images) => (images.input_ids, images.position_ids, images.tokens),
        };
        let (mut ends, mut logits_indices) = (Vec::new(), Vec::new());
        let (mut scored, mut scored_indices) = (Vec::new(), Vec::new());
        for (chunk, index) in chunks.iter().zip(batch.last_indices()) {
            let sequence = &running[chunk.sequence];
            if chunk.end == sequence.tokens.len() {
                ends.push(StepEnd {
                    sequence: chunk.sequence,
                    proposed: chunk.proposed,
                });
                logits_indices.extend(index - chunk.proposed as i64..=index);
            }
            for position in sequence.data.scored_positions(chunk, &sequence.tokens) {
                let before_last = chunk.end - 1 - position.position;
                scored_indices.push(index - before_last as i64);
                scored.push(position);
            }
        }
        logits_indices.extend(scored_indices);
        // A step that only reads prompts needs no logits; one row is a shape that every kernel
        // supports.
        if logits_indices.is_empty() {
            logits_indices.push(ids.size()[1] - 1);
        }
        let scored_rows = scored.iter().map(|position| position.sequence);
        let end_rows = |end: &StepEnd| std::iter::repeat_n(end.sequence, end.rows());
        let end_rows: Vec<usize> = ends.iter().flat_map(end_rows).collect();
        let rows: Vec<usize> = end_rows.iter().copied().chain(scored_rows).collect();
        let adapter = |sequence: usize| {
            let index = running[sequence].data.adapter?;
            self.limits.adapters.get(index).cloned()
        };
        let adapters = StepAdapters::of(chunks, &rows, adapter);
        let logits_indices = to_device(Tensor::f_from_slice(&logits_indices)?, self.device)?;
        let step = RaggedStep {
            input_ids: &ids,
            position_ids: &positions,
            position_bound: batch.longest(),
            cache: &mut batch,
            logits_indices: &logits_indices,
            images: images.as_ref(),
            adapters: adapters.as_ref(),
        };
        let vocabulary = self.limits.vocab_size;
        let (logits, scores) = if scored.is_empty() {
            let logits = self.model.forward(step)?;
            self.limits
                .check_logits(&logits.size(), logits_indices.size()[0])?;
            (Some(logits), Vec::new())
        } else {
            let limits = &self.limits;
            score_in_blocks(&self.model, step, end_rows.len(), &scored, limits)?
        };
        if let Some(logits) = logits.filter(|_| !ends.is_empty()) {
            let last = std::mem::take(&mut self.logits);
            self.logits = last.read(&logits, vocabulary, &end_rows, &mut self.scheduler)?;
        }
        // Committed last: an error above leaves the cache in its state before the step, and the step
        // is computed again.
        batch.commit()?;
        self.record_scores(&scored, scores);
        Ok(ends)
    }

    /// Adds the log-probabilities of prompts that a step has computed to their sequences.
    fn record_scores(&mut self, scored: &[ScoredPosition], scores: Vec<TokenLogprobs>) {
        let mut scores = scores.into_iter();
        for run in scored.chunk_by(|a, b| a.sequence == b.sequence) {
            let new = scores.by_ref().take(run.len()).collect();
            let Some(sequence) = self.scheduler.sequence(run[0].sequence) else {
                continue;
            };
            let request = sequence.data.request;
            let whole = sequence.data.extend_scores(new);
            sequence.reusable = sequence.data.reusable();
            if let Some(logprobs) = whole {
                self.events.push(Event::Prompt { request, logprobs });
            }
        }
    }

    /// Chooses the next tokens of the running sequences `ends`, whose logits are in `logits`.
    pub(super) fn choose(&mut self, ends: &[StepEnd]) -> Result<()> {
        let vocabulary = self.limits.vocab_size;
        let mut logits = std::mem::take(&mut self.logits);
        let mut ended: HashSet<Arrival> = HashSet::new();
        let mut first_row = 0;
        for end in ends {
            let index = end.sequence;
            let chosen = self.choose_run(*end, &mut logits, (first_row, vocabulary));
            first_row += end.rows();
            match chosen {
                Ok(false) => {}
                Ok(true) => {
                    ended.insert(self.scheduler.running()[index].arrival);
                }
                Err(error) => {
                    self.fail(self.scheduler.running()[index].data.request, error);
                }
            }
        }
        self.logits = logits.reusable();
        self.remove_settled(&ended)
    }

    /// Records the error of a request.
    fn fail(&mut self, request: RequestId, error: Error) {
        if self.live.remove(&request).is_some() {
            self.counts.failed += 1;
            self.events.push(Event::Failed { request, error });
        }
    }

    /// Removes the sequences that have ended, and those of requests that have failed.
    fn remove_settled(&mut self, ended: &HashSet<Arrival>) -> Result<()> {
        // `remove_where` borrows the whole engine, so the map is moved out during the call.
        let live = std::mem::take(&mut self.live);
        let settled = self.remove_where(|sequence| {
            ended.contains(&sequence.arrival) || !live.contains_key(&sequence.data.request)
        });
        self.live = live;
        settled.map(|_| ())
    }

    /// Chooses the next token of a sequence, and the tokens after it as long as they are the proposed ones: those that it
    /// would have without proposals. Returns `true` if the sequence has ended.
    fn choose_run(
        &mut self,
        end: StepEnd,
        logits: &mut StepLogits,
        (first_row, vocabulary): (usize, usize),
    ) -> Result<bool> {
        let mut accepted = 0;
        loop {
            let Some(row) = logits.of(first_row + accepted, vocabulary) else {
                return Err(Error::Scheduler("a sequence of the step has no logits"));
            };
            let has_ended = self.choose_one(end.sequence, row)?;
            let Some(sequence) = self.scheduler.sequence(end.sequence) else {
                return Ok(has_ended);
            };
            let proposed = sequence.data.proposal.get(accepted);
            let follows = accepted < end.proposed && proposed == sequence.tokens.last();
            accepted += usize::from(follows);
            if !follows || has_ended {
                // The keys of the tokens that were not accepted are dropped.
                sequence.computed += accepted;
                let computed = sequence.computed;
                self.counts.proposed_tokens += end.proposed as u64;
                self.counts.accepted_tokens += accepted as u64;
                if let Some(assistant) = &mut self.assistant {
                    let config = sequence.data.row.sampler.config();
                    let outcome = (end.proposed, accepted);
                    assistant.update(sequence.arrival, config, outcome);
                }
                if accepted < end.proposed {
                    let id = self.scheduler.cache_id(end.sequence)?;
                    self.cache.truncate(id, computed)?;
                }
                return Ok(has_ended);
            }
        }
    }

    /// Chooses the next token of the running sequence `index`; returns `true` if it has ended. Before
    /// the first token of a prompt, the other samples of the request choose theirs, and run or wait on
    /// their own from then on.
    fn choose_one(&mut self, index: usize, mut logits: SequenceLogits<'_>) -> Result<bool> {
        let Some(sequence) = self.scheduler.sequence(index) else {
            return Err(Error::Scheduler("a sequence of the step is gone"));
        };
        let request = sequence.data.request;
        if !self.live.contains_key(&request) {
            return Ok(true); // Another sample of the request has failed in this step.
        }
        // The prompt was read for its log-probabilities alone.
        if sequence.data.is_full(sequence.tokens.len()) {
            let reason = sequence.data.row.limit.1;
            let cached = sequence.cached_tokens();
            let completions = sequence.data.complete_all(&sequence.tokens, cached, reason);
            self.finish_all(request, completions);
            return Ok(true);
        }
        for mut sibling in std::mem::take(&mut sequence.data.siblings) {
            let Some(sequence) = self.scheduler.sequence(index) else {
                break;
            };
            let (tokens, cached) = (sequence.tokens.clone(), sequence.cached_tokens());
            let chosen = logits.choose(&mut sibling, &tokens, false)?;
            let (number, id) = (sibling.number, chosen.id);
            let finished = chosen.finished;
            self.push_token((request, number), chosen);
            match finished {
                Some(reason) => {
                    let completion = sibling.complete(&[tokens, vec![id]].concat(), cached, reason);
                    self.finish((request, number), completion);
                }
                None => self
                    .scheduler
                    .fork(index, number, id, sibling, &mut self.cache)?,
            }
        }
        let Some(sequence) = self.scheduler.sequence(index) else {
            return Err(Error::Scheduler("a sequence of the step is gone"));
        };
        let is_first = sequence.data.first_token().is_none();
        let chosen = logits.choose(&mut sequence.data, &sequence.tokens, true)?;
        sequence.tokens.push(chosen.id);
        // Counted once per request and not per sample: forks choose their first token in the same step.
        if is_first && let Some(time) = sequence.data.first_token() {
            self.first_tokens.push(time);
        }
        let (number, cached) = (sequence.data.number, sequence.cached_tokens());
        let completion = chosen
            .finished
            .map(|reason| sequence.data.complete(&sequence.tokens, cached, reason));
        self.push_token((request, number), chosen);
        let has_ended = completion.is_some();
        if let Some(completion) = completion {
            self.finish((request, number), completion);
        }
        Ok(has_ended)
    }

    fn push_token(&mut self, (request, sample): (RequestId, usize), chosen: ChosenToken) {
        self.counts.generated_tokens += 1;
        self.events.push(Event::Token {
            request,
            sample,
            id: chosen.id,
            text: chosen.text,
            logprobs: chosen.logprobs,
        });
    }
}
