//! Steps that a device computes while the host does something else.

use overdrive_kv_cache::SequenceId;
use overdrive_sys::transfer::to_device;
use tch::Tensor;

use super::Engine;
use super::model::EngineModel;
use super::scheduler::Chunk;
use super::step_logits::{StepEnd, StepLogits, StepPlans};
use crate::Result;
use crate::captured::Replayed;
use crate::device_sampling::{Ahead, DeviceStep, stays_on_device};
use crate::host_copy::HostCopy;

/// A replayed step whose results have not been read: the next token of each of some sequences.
#[derive(Debug)]
pub(super) struct Flight {
    sequences: Vec<SequenceId>,
    /// The index of the adapter of each sequence.
    adapters: Vec<Option<usize>>,
    /// The logits `(N, V)`, until the next replay.
    logits: Tensor,
    /// The token with the largest logit of each row, i32 `(N,)` on the device.
    likeliest: Tensor,
    best: HostCopy,
    /// The tokens with which the step began before the host knew them; empty if it knew them.
    expected: Vec<i64>,
}

/// The results of a flight.
struct Results {
    logits: Tensor,
    likeliest: Tensor,
    best: HostCopy,
    /// The rows whose sequences still run, if not all do.
    kept: Option<Vec<i64>>,
}

impl Flight {
    fn new(
        replayed: Replayed<'_>,
        sequences: Vec<SequenceId>,
        adapters: Vec<Option<usize>>,
    ) -> Result<Flight> {
        // A separate copy, because the next replay overwrites the tensor.
        let best = replayed
            .best
            .f_to_dtype(replayed.best.f_kind()?, false, true)?;
        let likeliest = best.f_select(1, 1)?;
        let best = HostCopy::begin(best)?;
        replayed.step.launch();
        Ok(Flight {
            likeliest,
            best,
            sequences,
            adapters,
            logits: replayed.logits,
            expected: Vec::new(),
        })
    }
}

impl<M: EngineModel> Engine<M> {
    /// Launches a step in which every chunk is the last token of a sequence. Returns `None` for any other step, or if
    /// the step cannot be replayed.
    pub(super) fn launch(&mut self, chunks: &[Chunk]) -> Result<Option<Flight>> {
        let Some(captured) = &mut self.captured else {
            return Ok(None);
        };
        let running = self.scheduler.running();
        let decodes = |chunk: &Chunk| {
            let is_last = chunk.end == running[chunk.sequence].tokens.len();
            is_last && chunk.len() == 1
        };
        if !chunks.iter().all(decodes) {
            return Ok(None);
        }
        let new_token = |chunk: &Chunk| {
            let id = self.scheduler.cache_id(chunk.sequence)?;
            Ok((id, running[chunk.sequence].tokens[chunk.start]))
        };
        let new_tokens = chunks.iter().map(new_token).collect::<Result<Vec<_>>>()?;
        let adapter = |chunk: &Chunk| running[chunk.sequence].data.adapter;
        let adapters: Vec<Option<usize>> = chunks.iter().map(adapter).collect();
        let (model, cache) = (&self.model, &mut self.cache);
        let replayed = captured.run(model, cache, &new_tokens, None, &adapters)?;
        let sequences = new_tokens.into_iter().map(|(id, _)| id).collect();
        replayed
            .map(|replayed| Flight::new(replayed, sequences, adapters))
            .transpose()
    }

    /// Reads the results of a flight, and lets those of its sequences that still run choose their tokens. If the
    /// next step follows from this one, it is launched before the host waits.
    pub(super) fn land(&mut self, flight: Flight) -> Result<usize> {
        let Flight {
            sequences,
            adapters,
            logits,
            likeliest,
            best,
            expected: _,
        } = flight;
        let count = self.scheduler.running().len();
        let ids = (0..count).map(|index| self.scheduler.cache_id(index));
        let ids = ids.collect::<Result<Vec<SequenceId>>>()?;
        let mut kept: Vec<i64> = Vec::with_capacity(sequences.len());
        let mut ends = Vec::with_capacity(sequences.len());
        for (row, sequence) in sequences.iter().enumerate() {
            // The sequences are in the same order as before, at most with others between them.
            let from = ends.last().map_or(0, |last| last + 1);
            let found = |index: &usize| ids[*index] == *sequence;
            if let Some(index) = (from..count).chain(0..from).find(found) {
                kept.push(row as i64);
                ends.push(index);
            }
        }
        let running = self.scheduler.running();
        // Committed before the results are known: the keys are written regardless of the results, and the next step
        // needs them.
        self.cache.land(|id| {
            let index = ends.iter().find(|index| ids[**index] == id)?;
            running[*index].tokens.last().copied()
        });
        if ends.is_empty() {
            return Ok(0);
        }
        let chunks: Vec<Chunk> = ends
            .iter()
            .map(|&sequence| {
                let end = running[sequence].tokens.len();
                Chunk {
                    sequence,
                    start: end - 1,
                    end,
                    proposed: 0,
                }
            })
            .collect();
        let results = Results {
            logits,
            likeliest,
            best,
            kept: (kept.len() < sequences.len()).then_some(kept),
        };
        match self.read(results, &ends, &sequences, &adapters) {
            Ok(logits) => self.logits = logits,
            Err(error) => {
                // The step is undone, so that the next one computes the same.
                self.flight = None;
                self.cache.land(|_| None);
                for chunk in &chunks {
                    self.cache.truncate(ids[chunk.sequence], chunk.start)?;
                }
                return Err(error);
            }
        }
        self.scheduler.computed(&chunks);
        let ends: Vec<StepEnd> = ends.into_iter().map(StepEnd::of).collect();
        self.choose(&ends)?;
        self.discard_unexpected()?;
        Ok(ends.len())
    }

    /// Discards the step that was launched ahead if a sequence has chosen another token than the device expected.
    fn discard_unexpected(&mut self) -> Result<()> {
        let Some(flight) = &self.flight else {
            return Ok(());
        };
        for (index, sequence) in self.scheduler.running().iter().enumerate() {
            let id = self.scheduler.cache_id(index)?;
            let row = flight.sequences.iter().position(|own| *own == id);
            let expected = row.and_then(|row| flight.expected.get(row));
            if expected.is_some() && expected != sequence.tokens.last() {
                self.flight = None;
                self.cache.land(|_| None);
                self.look_ahead.missed();
                self.counts.steps_discarded += 1;
                return Ok(());
            }
        }
        Ok(())
    }

    /// Returns the logits of the running sequences `ends`, or the results that their samples need.
    fn read(
        &mut self,
        results: Results,
        ends: &[usize],
        sequences: &[SequenceId],
        adapters: &[Option<usize>],
    ) -> Result<StepLogits> {
        let vocabulary = self.limits.vocab_size;
        let logits = match &results.kept {
            None => results.logits,
            Some(kept) => {
                let kept = to_device(Tensor::f_from_slice(kept)?, self.device)?;
                results.logits.f_index_select(0, &kept)?
            }
        };
        if results.kept.is_some() || !stays_on_device(&logits) {
            let last = std::mem::take(&mut self.logits);
            return last.read(&logits, vocabulary, ends, &mut self.scheduler);
        }
        let plans = StepPlans::new(vocabulary, ends, &mut self.scheduler);
        let looks_ahead =
            plans.has_one_each() && self.look_ahead.is_wanted() && self.next_follows(ends)?;
        let step = if plans.are_greedy() {
            if looks_ahead {
                self.flight = self.follow(sequences, &results.likeliest, adapters)?;
            }
            DeviceStep::greedy(&logits, vocabulary, plans.rows, results.best.words()?)
        } else {
            let mut ahead = |tokens: &Tensor| {
                self.flight = self.follow(sequences, &tokens.f_flatten(0, -1)?, adapters)?;
                Ok(())
            };
            let ahead: Option<Ahead<'_>> = looks_ahead.then_some(&mut ahead);
            DeviceStep::before_reading(&logits, vocabulary, plans.rows, ahead)?
        };
        if let Some(flight) = &mut self.flight {
            flight.expected = step.expected().unwrap_or_default();
            self.counts.steps_ahead += 1;
        }
        Ok(StepLogits::Device(Box::new(step), plans.first))
    }

    /// Returns `true` if the next step has the same sequences regardless of their tokens. A sequence may still end
    /// with its token; its row of the next step is then discarded.
    fn next_follows(&self, ends: &[usize]) -> Result<bool> {
        let running = self.scheduler.running();
        if ends.len() != running.len() || self.scheduler.admits() {
            return Ok(false);
        }
        let mut blocks = 0;
        for (index, sequence) in running.iter().enumerate() {
            if sequence.tokens.len() + 1 >= sequence.data.row.limit.0 {
                return Ok(false);
            }
            blocks += self.cache.blocks_needed(self.scheduler.cache_id(index)?, 1);
        }
        Ok(blocks <= self.cache.free_blocks())
    }

    /// Launches the next step with tokens that only the device knows so far.
    fn follow(
        &mut self,
        sequences: &[SequenceId],
        likeliest: &Tensor,
        adapters: &[Option<usize>],
    ) -> Result<Option<Flight>> {
        let Some(captured) = &mut self.captured else {
            return Ok(None);
        };
        if !captured.knows(adapters) {
            return Ok(None);
        }
        let new_tokens: Vec<(SequenceId, i64)> = sequences.iter().map(|id| (*id, 0)).collect();
        let (model, cache) = (&self.model, &mut self.cache);
        let replayed = captured.run(model, cache, &new_tokens, Some(likeliest), adapters)?;
        replayed
            .map(|replayed| Flight::new(replayed, sequences.to_vec(), adapters.to_vec()))
            .transpose()
    }
}
