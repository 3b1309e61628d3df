//! The scheduler: chooses the tokens that the next step computes. Plain Rust, without tensors or a
//! model.
//!
//! The rules, in this order:
//!
//! 1. Every running sequence that decodes (has one token to compute) gets it. If blocks run short, the
//!    latest running sequence is preempted: its blocks are given back, it returns to its position among
//!    the waiting, and its tokens are computed again later.
//! 2. Running sequences whose prompt is still being read get the rest of the token budget, earliest
//!    first.
//! 3. Waiting sequences are admitted in order of arrival while there are seats, tokens, and blocks for
//!    the whole sequence, unless a sequence was preempted in this step.
//! 4. Decoding sequences for which tokens are proposed get as many of them verified as the rest of the token budget
//!    and of the blocks allows.
//!
//! The earliest sequence always makes progress: the blocks that it needs can be taken from later ones,
//! and a sequence that does not fit an empty pool is never submitted. So every sequence ends.

use std::borrow::Cow;
use std::collections::VecDeque;
use std::ops::Range;
use std::sync::Arc;

use super::block_allocator::BlockAllocator;
use crate::{Error, Result};

/// The order of arrival: the request, then the number of the sample.
pub(super) type Arrival = (u64, usize);

/// A sequence and its progress.
#[derive(Debug)]
pub(super) struct ScheduledSequence<I, T> {
    pub(super) arrival: Arrival,
    /// The tokens of prompt and continuation so far.
    pub(super) tokens: Vec<i64>,
    /// The ids by which the cache knows the first tokens, if they are not the tokens themselves: those of a prompt with
    /// images.
    keys: Option<Arc<[i64]>>,
    /// The namespace of the cache in which it shares blocks.
    namespace: u64,
    /// The number of tokens that are in the cache.
    pub(super) computed: usize,
    /// The sequence's id in the cache, while it runs.
    cache_id: Option<I>,
    /// The number of leading tokens that may be taken from the cache instead of being computed. Default: all.
    pub(super) reusable: usize,
    /// The number of tokens that are proposed to follow `tokens`.
    pub(super) proposed: usize,
    /// The number of tokens that had been computed before the last preemption.
    preempted_len: usize,
    /// The number of tokens that were in the cache when it was first admitted; that of its source for a fork.
    cached: Option<usize>,
    /// The data of the owner.
    pub(super) data: T,
}

impl<I, T> ScheduledSequence<I, T> {
    fn new(arrival: Arrival, namespace: u64, tokens: Vec<i64>, data: T) -> Self {
        ScheduledSequence {
            arrival,
            tokens,
            keys: None,
            namespace,
            computed: 0,
            cache_id: None,
            reusable: usize::MAX,
            proposed: 0,
            preempted_len: 0,
            cached: None,
            data,
        }
    }

    /// Returns the number of tokens of its prompt that other sequences had left in the cache.
    pub(super) fn cached_tokens(&self) -> usize {
        self.cached.unwrap_or(0)
    }

    /// Returns the ids by which the cache knows the tokens in `range`.
    pub(super) fn keys(&self, range: Range<usize>) -> Cow<'_, [i64]> {
        let Some(keys) = self.keys.as_ref().filter(|keys| range.start < keys.len()) else {
            return Cow::Borrowed(&self.tokens[range]);
        };
        let end = range.end.min(keys.len());
        let rest = &self.tokens[end..range.end];
        Cow::Owned([&keys[range.start..end], rest].concat())
    }

    fn rest(&self) -> usize {
        self.tokens.len() - self.computed
    }

    pub(super) fn is_decoding(&self) -> bool {
        self.rest() == 1
    }
}

/// The tokens of one running sequence that a step computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Chunk {
    /// The index among the running sequences.
    pub(super) sequence: usize,
    /// The first token.
    pub(super) start: usize,
    /// The end of the range, exclusive.
    pub(super) end: usize,
    /// The number of proposed tokens that follow the range, which is then the last token of its sequence.
    pub(super) proposed: usize,
}

impl Chunk {
    /// Returns the number of tokens that go through the model.
    pub(super) fn len(&self) -> usize {
        self.end - self.start + self.proposed
    }
}

/// The bounds of a step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Limits {
    /// The largest number of sequences that run at once.
    pub(super) max_sequences: usize,
    /// The token budget of a step; at least `max_sequences`.
    pub(super) tokens: usize,
    /// The number of blocks that stay free when a sequence is admitted beside others, so that the others can grow.
    pub(super) reserve: usize,
}

/// The counters since the scheduler was made.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Counts {
    pub(super) preemptions: u64,
    pub(super) recomputed_tokens: u64,
    pub(super) reused_tokens: u64,
}

/// The running and the waiting sequences, both in order of arrival.
#[derive(Debug)]
pub(super) struct Scheduler<I, T> {
    limits: Limits,
    running: Vec<ScheduledSequence<I, T>>,
    waiting: VecDeque<ScheduledSequence<I, T>>,
    pub(super) counts: Counts,
}

impl<I: Copy + std::fmt::Debug, T> Scheduler<I, T> {
    pub(super) fn new(limits: Limits) -> Self {
        Scheduler {
            limits,
            running: Vec::new(),
            waiting: VecDeque::new(),
            counts: Counts::default(),
        }
    }

    /// Returns the largest number of sequences that run at once.
    pub(super) fn max_sequences(&self) -> usize {
        self.limits.max_sequences
    }

    /// Submits a sequence; its first `reusable` tokens may be taken from the cache, which knows the first tokens by `keys`
    /// if there are any.
    pub(super) fn submit(
        &mut self,
        arrival: Arrival,
        namespace: u64,
        (tokens, reusable): (Vec<i64>, usize),
        keys: Option<Arc<[i64]>>,
        data: T,
    ) {
        let mut sequence = ScheduledSequence::new(arrival, namespace, tokens, data);
        sequence.reusable = reusable;
        sequence.keys = keys;
        self.wait(sequence);
    }

    pub(super) fn running(&self) -> &[ScheduledSequence<I, T>] {
        &self.running
    }

    pub(super) fn sequence(&mut self, index: usize) -> Option<&mut ScheduledSequence<I, T>> {
        self.running.get_mut(index)
    }

    pub(super) fn waiting(&self) -> usize {
        self.waiting.len()
    }

    /// Returns `true` if a waiting sequence could join the next step.
    pub(super) fn admits(&self) -> bool {
        !self.waiting.is_empty() && self.running.len() < self.limits.max_sequences
    }

    pub(super) fn is_empty(&self) -> bool {
        self.running.is_empty() && self.waiting.is_empty()
    }

    /// Returns the id in the cache of the running sequence `index`.
    pub(super) fn cache_id(&self, index: usize) -> Result<I> {
        self.running
            .get(index)
            .and_then(|sequence| sequence.cache_id)
            .ok_or(Error::Scheduler(
                "a running sequence has no id in the cache",
            ))
    }

    /// Chooses the tokens of the next step, in the order of the running sequences. Takes no blocks:
    /// those of all chunks together are free.
    pub(super) fn schedule(
        &mut self,
        blocks: &mut impl BlockAllocator<Id = I>,
    ) -> Result<Vec<Chunk>> {
        let mut plan = self.plan(blocks)?;
        // A sequence that was admitted may have begun to share a block to which another was planned to write: that one
        // needs a copy. The next plan knows it, and only a further admission could make another necessary.
        while self.needed(&plan, blocks)? > blocks.free() {
            plan = self.plan(blocks)?;
        }
        let mut chunks = Vec::with_capacity(self.running.len());
        for (sequence, (running, planned)) in self.running.iter().zip(&plan.planned).enumerate() {
            if planned.tokens > 0 {
                let start = running.computed;
                chunks.push(Chunk {
                    sequence,
                    start,
                    end: start + planned.tokens,
                    proposed: planned.proposed,
                });
            }
        }
        if chunks.is_empty() && !self.is_empty() {
            // There is no running sequence that could free blocks, and the first waiting sequence does not fit.
            return Err(Error::Scheduler(
                "no sequence can be computed although none holds the cache: blocks have been lost",
            ));
        }
        Ok(chunks)
    }

    /// Plans a step by the rules.
    fn plan(&mut self, blocks: &mut impl BlockAllocator<Id = I>) -> Result<StepPlan> {
        let mut plan = StepPlan::new(self.limits.tokens, self.running.len());
        let preemptions = self.counts.preemptions;
        self.decode(&mut plan, blocks)?;
        self.prefill(&mut plan, blocks)?;
        // A sequence admitted now would take the blocks for which another was just preempted, and be
        // preempted next.
        if self.counts.preemptions == preemptions {
            self.admit(&mut plan, blocks)?;
        }
        self.speculate(&mut plan, blocks)?;
        Ok(plan)
    }

    /// Returns the number of blocks that a planned step takes.
    fn needed(&self, plan: &StepPlan, blocks: &impl BlockAllocator<Id = I>) -> Result<usize> {
        let planned = plan.planned.iter().enumerate();
        let needed = planned.filter(|(_, planned)| planned.tokens > 0);
        needed
            .map(|(index, planned)| {
                let tokens = planned.tokens + planned.proposed;
                Ok(blocks.needed(self.cache_id(index)?, tokens))
            })
            .sum()
    }

    /// Records that the chunks of `schedule` have been computed.
    pub(super) fn computed(&mut self, chunks: &[Chunk]) {
        for chunk in chunks {
            if let Some(sequence) = self.running.get_mut(chunk.sequence) {
                let again = chunk
                    .end
                    .min(sequence.preempted_len)
                    .saturating_sub(chunk.start);
                self.counts.recomputed_tokens += again as u64;
                sequence.computed = chunk.end;
            }
        }
    }

    /// Forks the running sequence `index`; the copy shares its blocks, or waits if there is no seat.
    pub(super) fn fork(
        &mut self,
        index: usize,
        sample: usize,
        next: i64,
        data: T,
        blocks: &mut impl BlockAllocator<Id = I>,
    ) -> Result<()> {
        let cache_id = self.cache_id(index)?;
        let source = &self.running[index];
        let mut tokens = source.tokens.clone();
        tokens.push(next);
        let arrival = (source.arrival.0, sample);
        let mut copy = ScheduledSequence::new(arrival, source.namespace, tokens, data);
        copy.keys.clone_from(&source.keys);
        copy.cached = source.cached;
        if self.running.len() < self.limits.max_sequences {
            copy.computed = source.computed;
            copy.cache_id = Some(blocks.fork(cache_id)?);
            // At the end, so that the indices of the step's other chunks stay valid; `remove_where`
            // sorts.
            self.running.push(copy);
        } else {
            self.wait(copy);
        }
        Ok(())
    }

    /// Removes every sequence for which `gone` returns `true`, releases its blocks and returns it.
    /// Afterwards the running sequences are in order of arrival.
    pub(super) fn remove_where(
        &mut self,
        blocks: &mut impl BlockAllocator<Id = I>,
        gone: impl Fn(&ScheduledSequence<I, T>) -> bool,
    ) -> Result<Vec<ScheduledSequence<I, T>>> {
        let running = &mut self.running;
        let mut out: Vec<_> = running.extract_if(.., |sequence| gone(sequence)).collect();
        for sequence in &mut out {
            if let Some(cache_id) = sequence.cache_id.take() {
                blocks.release(cache_id)?;
            }
        }
        // Asked first: this is called in every step, and a long queue rarely loses a sequence.
        if self.waiting.iter().any(&gone) {
            // Both halves keep their order of arrival.
            let (gone, kept): (VecDeque<_>, VecDeque<_>) = self.waiting.drain(..).partition(gone);
            self.waiting = kept;
            out.extend(gone);
        }
        self.running.sort_by_key(|sequence| sequence.arrival);
        Ok(out)
    }

    /// Applies rule 1.
    fn decode(
        &mut self,
        plan: &mut StepPlan,
        blocks: &mut impl BlockAllocator<Id = I>,
    ) -> Result<()> {
        let mut index = 0;
        while index < self.running.len() {
            if self.running[index].is_decoding() {
                let cache_id = self.cache_id(index)?;
                // The sequence `index` may itself be the latest and be preempted; the loop then ends.
                while index < self.running.len() && !plan.add(index, cache_id, 1, blocks) {
                    if self.running.len() == 1 {
                        return Err(Error::Scheduler(
                            "a sequence that runs alone has no block left: blocks have been lost",
                        ));
                    }
                    self.preempt_latest(plan, blocks)?;
                }
            }
            index += 1;
        }
        Ok(())
    }

    /// Applies rule 2.
    fn prefill(
        &mut self,
        plan: &mut StepPlan,
        blocks: &mut impl BlockAllocator<Id = I>,
    ) -> Result<()> {
        for index in 0..self.running.len() {
            if !self.running[index].is_decoding() && plan.budget > 0 {
                let (cache_id, rest) = (self.cache_id(index)?, self.running[index].rest());
                plan.add_up_to(index, cache_id, rest, blocks);
            }
        }
        // No sequence makes progress, so none will end and free blocks: the later sequences are
        // preempted to make room for the first.
        while plan.is_empty() && !self.running.is_empty() {
            let (cache_id, rest) = (self.cache_id(0)?, self.running[0].rest());
            plan.add_up_to(0, cache_id, rest, blocks);
            if plan.is_empty() {
                if self.running.len() == 1 {
                    return Err(Error::Scheduler(
                        "a sequence that runs alone has no block left: blocks have been lost",
                    ));
                }
                self.preempt_latest(plan, blocks)?;
            }
        }
        Ok(())
    }

    /// Applies rule 3.
    fn admit(
        &mut self,
        plan: &mut StepPlan,
        blocks: &mut impl BlockAllocator<Id = I>,
    ) -> Result<()> {
        while plan.budget > 0 && self.running.len() < self.limits.max_sequences {
            let Some(mut sequence) = self.waiting.pop_front() else {
                break;
            };
            // The cache leaves the last of the tokens to be computed.
            let reusable = sequence.reusable.saturating_add(1);
            let known = sequence.keys(0..reusable.min(sequence.tokens.len()));
            let (cache_id, cached) = match blocks.add(sequence.namespace, &known) {
                Ok(added) => added,
                Err(error) => {
                    self.waiting.push_front(sequence);
                    return Err(error);
                }
            };
            let rest = sequence.tokens.len() - cached;
            // The first sequence may use the whole pool: no other sequence needs room to grow.
            let reserve = match self.running.is_empty() {
                true => 0,
                false => self.limits.reserve,
            };
            if blocks.needed(cache_id, rest) + reserve > plan.free(blocks) {
                self.waiting.push_front(sequence);
                blocks.release(cache_id)?;
                break;
            }
            // A preempted sequence finds its own tokens in the cache again, which saves nothing over the whole run.
            self.counts.reused_tokens += cached.saturating_sub(sequence.preempted_len) as u64;
            sequence.cached.get_or_insert(cached);
            sequence.cache_id = Some(cache_id);
            sequence.computed = cached;
            self.running.push(sequence);
            plan.planned.push(Planned::default());
            plan.add_up_to(self.running.len() - 1, cache_id, rest, blocks);
        }
        Ok(())
    }

    /// Applies rule 4.
    fn speculate(
        &mut self,
        plan: &mut StepPlan,
        blocks: &mut impl BlockAllocator<Id = I>,
    ) -> Result<()> {
        for (index, sequence) in self.running.iter().enumerate() {
            if sequence.is_decoding() && sequence.proposed > 0 && plan.planned[index].tokens == 1 {
                plan.propose_up_to(index, self.cache_id(index)?, sequence.proposed, blocks);
            }
        }
        Ok(())
    }

    fn preempt_latest(
        &mut self,
        plan: &mut StepPlan,
        blocks: &mut impl BlockAllocator<Id = I>,
    ) -> Result<()> {
        let Some(mut sequence) = self.running.pop() else {
            return Ok(());
        };
        plan.drop_latest(self.running.len());
        self.counts.preemptions += 1;
        sequence.preempted_len = sequence.preempted_len.max(sequence.computed);
        sequence.computed = 0;
        sequence.proposed = 0;
        let cache_id = sequence.cache_id.take();
        self.wait(sequence);
        cache_id.map_or(Ok(()), |cache_id| blocks.release(cache_id))
    }

    /// Inserts a sequence into the waiting sequences by its arrival.
    fn wait(&mut self, sequence: ScheduledSequence<I, T>) {
        let position = self
            .waiting
            .partition_point(|other| other.arrival < sequence.arrival);
        self.waiting.insert(position, sequence);
    }
}

/// The plan of a step.
#[derive(Debug)]
struct StepPlan {
    /// The number of tokens that can still be planned.
    budget: usize,
    /// The plan of each running sequence.
    planned: Vec<Planned>,
    /// The number of blocks of all planned tokens.
    blocks: usize,
}

#[derive(Debug, Clone, Copy, Default)]
struct Planned {
    tokens: usize,
    proposed: usize,
    blocks: usize,
}

impl StepPlan {
    fn new(budget: usize, running: usize) -> StepPlan {
        StepPlan {
            budget,
            planned: vec![Planned::default(); running],
            blocks: 0,
        }
    }

    fn is_empty(&self) -> bool {
        self.planned.iter().all(|planned| planned.tokens == 0)
    }

    fn free(&self, blocks: &impl BlockAllocator) -> usize {
        blocks.free().saturating_sub(self.blocks)
    }

    /// Plans `tokens` of sequence `index` if there are blocks; returns `true` if it did.
    fn add<B: BlockAllocator>(
        &mut self,
        index: usize,
        cache_id: B::Id,
        tokens: usize,
        blocks: &B,
    ) -> bool {
        let needed = blocks.needed(cache_id, tokens);
        if needed > self.free(blocks) || tokens > self.budget {
            return false;
        }
        self.budget -= tokens;
        self.blocks += needed;
        self.planned[index] = Planned {
            tokens,
            proposed: 0,
            blocks: needed,
        };
        true
    }

    /// Plans as many of the `most` proposed tokens after the one of a decoding sequence as budget and blocks allow,
    /// which may be none.
    fn propose_up_to<B: BlockAllocator>(
        &mut self,
        index: usize,
        cache_id: B::Id,
        most: usize,
        blocks: &B,
    ) {
        let free = self.free(blocks) + self.planned[index].blocks;
        let mut proposed = most.min(self.budget);
        while proposed > 0 && blocks.needed(cache_id, 1 + proposed) > free {
            proposed -= 1;
        }
        let planned = &mut self.planned[index];
        let needed = blocks.needed(cache_id, 1 + proposed);
        // Fewer than were planned if a preempted sequence has shared the last block.
        self.blocks = self.blocks - planned.blocks + needed;
        self.budget -= proposed;
        (planned.proposed, planned.blocks) = (proposed, needed);
    }

    /// Plans as many of the `rest` tokens as budget and blocks allow, which may be none.
    fn add_up_to<B: BlockAllocator>(
        &mut self,
        index: usize,
        cache_id: B::Id,
        rest: usize,
        blocks: &B,
    ) {
        let free = self.free(blocks);
        let fits = |tokens| blocks.needed(cache_id, tokens) <= free;
        let mut most = rest.min(self.budget);
        if !fits(most) {
            // The largest number that fits, by bisection: `needed` grows with the tokens.
            let (mut low, mut high) = (0, most);
            while high - low > 1 {
                let middle = low.midpoint(high);
                match fits(middle) {
                    true => low = middle,
                    false => high = middle,
                }
            }
            most = low;
        }
        if most > 0 {
            self.add(index, cache_id, most, blocks);
        }
    }

    /// Drops the plans of the sequences from `running` on.
    fn drop_latest(&mut self, running: usize) {
        for planned in self.planned.drain(running..) {
            self.budget += planned.tokens + planned.proposed;
            self.blocks -= planned.blocks;
        }
    }
}

#[cfg(test)]
mod tests;
