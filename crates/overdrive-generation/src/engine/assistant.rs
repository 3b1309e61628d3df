//! A draft model that proposes tokens to the sequences of an engine.

use std::collections::HashMap;
use std::fmt;

use overdrive_kv_cache::{Error as CacheError, PagedCache, PagedCacheConfig, SequenceId};
use overdrive_sys::transfer::to_device;
use tch::{Device, Kind, Tensor};

use super::model::{EngineModel, RaggedStep};
use super::scheduler::Arrival;
use crate::speculation::MOST_PROPOSED;
use crate::{GenerationConfig, NumAssistantTokensSchedule, Result};

/// The number of tokens that a pass of the draft model reads, over all sequences; longer prompts take several steps.
const PASS_TOKENS: usize = 512;

/// A smaller model with a cache of its own. It continues all sequences together by the likeliest tokens.
pub(super) struct Assistant {
    model: Box<dyn EngineModel + Send>,
    device: Device,
    vocabulary: i64,
    context: usize,
    cache: PagedCache,
    drafts: HashMap<Arrival, Draft>,
}

/// The state of a sequence in the draft model.
#[derive(Debug)]
struct Draft {
    id: SequenceId,
    /// The number of tokens to propose at once.
    tokens: usize,
}

/// A sequence that tokens are proposed to.
pub(super) struct Drafted<'a> {
    pub(super) arrival: Arrival,
    /// The prompt and the continuation.
    pub(super) tokens: &'a [i64],
    /// The largest number of tokens to propose.
    pub(super) most: usize,
    pub(super) config: &'a GenerationConfig,
}

impl Assistant {
    /// Returns an assistant whose cache has as many blocks of `block_size` tokens as that of the engine.
    pub(super) fn new(
        model: Box<dyn EngineModel + Send>,
        block_size: usize,
        num_blocks: usize,
    ) -> Result<Assistant> {
        let shape = model.cache_shape()?;
        let cache = PagedCache::new(PagedCacheConfig {
            block_size: block_size as i64,
            num_blocks,
            slack: MOST_PROPOSED as i64 + 1,
            ..PagedCacheConfig::of(&shape)
        })?;
        Ok(Assistant {
            device: shape.device,
            vocabulary: model.vocab_size() as i64,
            context: model.context(),
            model,
            cache,
            drafts: HashMap::new(),
        })
    }

    /// Returns the proposals for the sequences, in their order. A sequence that the draft model has not read yet, or for
    /// which its cache has no blocks, gets none in this step.
    pub(super) fn propose(&mut self, sequences: &[Drafted<'_>]) -> Result<Vec<Vec<i64>>> {
        let mut proposals = vec![Vec::new(); sequences.len()];
        let mut budget = PASS_TOKENS;
        let (mut free, mut step, mut ready) = (self.cache.free_blocks(), Vec::new(), Vec::new());
        for (number, sequence) in sequences.iter().enumerate() {
            // Its embedding has no row for ids beyond its own vocabulary.
            let known = sequence
                .tokens
                .iter()
                .all(|id| (0..self.vocabulary).contains(id));
            if sequence.most == 0 || !known || sequence.tokens.len() > self.context {
                continue;
            }
            let id = self.draft(sequence)?;
            let read = self.cache.len(id)?;
            let rest = &sequence.tokens[read..];
            let new = &rest[..rest.len().min(budget)];
            let needed = self.cache.blocks_needed(id, new.len());
            if new.is_empty() || needed > free {
                continue;
            }
            budget -= new.len();
            free -= needed;
            step.push((id, new));
            ready.push((new.len() == rest.len()).then_some(number));
        }
        // Sequences that were added above may share a block to which one before them writes.
        let needed = step
            .iter()
            .map(|(id, new)| self.cache.blocks_needed(*id, new.len()));
        if needed.sum::<usize>() > self.cache.free_blocks() {
            return Ok(proposals);
        }
        let mut chosen = self.read(&step)?;
        let ids: Vec<SequenceId> = step.iter().map(|(id, _)| *id).collect();
        loop {
            let mut next = Vec::new();
            for ((id, number), (token, confidence)) in ids.iter().zip(&mut ready).zip(chosen) {
                let Some(at) = *number else { continue };
                let (sequence, proposal) = (&sequences[at], &mut proposals[at]);
                proposal.push(token);
                let wanted = self.drafts.get(&sequence.arrival);
                let most = wanted.map_or(0, |draft| draft.tokens).min(sequence.most);
                let length = sequence.tokens.len() + proposal.len();
                let ends = proposal.len() >= most
                    || length > self.context
                    || confidence < sequence.config.assistant_confidence_threshold
                    || sequence.config.eos_token_id.contains(&token)
                    || self.cache.blocks_needed(*id, 1) > self.cache.free_blocks();
                match ends {
                    true => *number = None,
                    false => next.push((*id, token)),
                }
            }
            // Each of them was found to have a block, but all together may not.
            let needed = next.iter().map(|(id, _)| self.cache.blocks_needed(*id, 1));
            if next.is_empty() || needed.sum::<usize>() > self.cache.free_blocks() {
                return Ok(proposals);
            }
            let tokens: Vec<[i64; 1]> = next.iter().map(|(_, token)| [*token]).collect();
            let step = next
                .iter()
                .zip(&tokens)
                .map(|((id, _), token)| (*id, &token[..]));
            let read = self.read(&step.collect::<Vec<_>>())?;
            let mut read = read.into_iter();
            // One for each of the sequences of the first pass; those that have ended take no part.
            let none = (0, 0.0);
            chosen = ready
                .iter()
                .map(|number| number.and_then(|_| read.next()).unwrap_or(none))
                .collect();
        }
    }

    /// Returns the id of a sequence, whose cache then holds a part of its tokens, and never the last one.
    fn draft(&mut self, sequence: &Drafted<'_>) -> Result<SequenceId> {
        let Some(draft) = self.drafts.get(&sequence.arrival) else {
            let (id, _) = self.cache.add(sequence.tokens)?;
            let tokens = sequence.config.num_assistant_tokens;
            self.drafts.insert(sequence.arrival, Draft { id, tokens });
            return Ok(id);
        };
        let held = self.cache.tokens(draft.id)?;
        let common = held.iter().zip(sequence.tokens).take_while(|(a, b)| a == b);
        // The last token is read again, because its logits are needed.
        let common = common.count().min(sequence.tokens.len() - 1);
        match self.cache.truncate(draft.id, common) {
            // The step after the last proposal has failed, and a state does not reach so far back: all is read again.
            Err(CacheError::StateDropped { .. }) => self.cache.truncate(draft.id, 0)?,
            other => other?,
        }
        Ok(draft.id)
    }

    /// Reads tokens of some sequences; returns the likeliest next token of each, with its probability.
    fn read(&mut self, new: &[(SequenceId, &[i64])]) -> Result<Vec<(i64, f64)>> {
        if new.is_empty() {
            return Ok(Vec::new());
        }
        let mut batch = self.cache.batch(new)?;
        let (ids, positions) = (batch.input_ids()?, batch.position_ids()?);
        let last = to_device(Tensor::f_from_slice(&batch.last_indices())?, self.device)?;
        let step = RaggedStep {
            input_ids: &ids,
            position_ids: &positions,
            position_bound: batch.longest(),
            cache: &mut batch,
            logits_indices: &last,
            images: None,
            adapters: None,
        };
        let logits = self.model.forward(step)?;
        batch.commit()?;
        let (most, tokens) = logits.f_softmax(-1, Kind::Float)?.f_max_dim(1, false)?;
        let most: Vec<f64> = Vec::try_from(most.f_to_kind(Kind::Double)?)?;
        let tokens: Vec<i64> = Vec::try_from(tokens)?;
        Ok(tokens.into_iter().zip(most).collect())
    }

    /// Adapts the number of tokens that are proposed to a sequence at once, as transformers' assisted generation does.
    pub(super) fn update(
        &mut self,
        arrival: Arrival,
        config: &GenerationConfig,
        (proposed, accepted): (usize, usize),
    ) {
        if let Some(draft) = self.drafts.get_mut(&arrival)
            && config.num_assistant_tokens_schedule == NumAssistantTokensSchedule::Heuristic
        {
            draft.tokens = match accepted == proposed {
                true => draft.tokens.saturating_add(2),
                false => draft.tokens.saturating_sub(1).max(1),
            };
        }
    }

    /// Releases the sequences for which `runs` returns `false`.
    pub(super) fn retain(&mut self, runs: impl Fn(Arrival) -> bool) -> Result<()> {
        let cache = &mut self.cache;
        let mut outcome = Ok(());
        self.drafts.retain(|arrival, draft| {
            let stays = runs(*arrival);
            if !stays && outcome.is_ok() {
                outcome = cache.release(draft.id);
            }
            stays
        });
        Ok(outcome?)
    }

    /// Returns the cache.
    pub(super) fn cache(&self) -> &PagedCache {
        &self.cache
    }
}

impl fmt::Debug for Assistant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Assistant")
            .field("drafts", &self.drafts)
            .finish_non_exhaustive()
    }
}
