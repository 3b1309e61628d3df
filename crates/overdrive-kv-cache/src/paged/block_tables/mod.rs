//! The block tables of all sequences, without the blocks' contents.

use std::collections::{HashMap, HashSet};

use super::block_pool::{BlockId, BlockPool};
use super::prefix_index::{Prefix, PrefixIndex};
use crate::{Error, Result};

/// The id of a sequence in a [`PagedCache`](crate::PagedCache); a cache never reuses an id.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(u64);

impl std::fmt::Display for SequenceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// The counters of a [`PagedCache`](crate::PagedCache) since its creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PagedStatistics {
    /// The number of tokens of added sequences that were found in shared blocks.
    pub hits: u64,
    /// The number of tokens of added sequences that were not found in shared blocks.
    pub misses: u64,
    /// The number of evictable blocks whose contents were dropped because their memory was needed.
    pub evictions: u64,
    /// The number of blocks that were copied because a sequence appended to a shared block.
    pub copies: u64,
    /// The number of blocks that were freed when they became full because another block had the same
    /// contents.
    pub merged: u64,
}

/// A sequence and the blocks that hold it.
#[derive(Debug, Clone, Default)]
struct Sequence {
    /// The blocks that hold the tokens.
    table: Vec<BlockId>,
    /// The tokens whose keys and values are in the blocks.
    tokens: Vec<i64>,
    /// The namespace; only sequences of the same namespace share blocks by their tokens.
    namespace: u64,
    /// The difference between the position and the index of a new token.
    position_offset: i64,
}

/// The new tokens of a sequence and their blocks, which take effect when the step is committed.
#[derive(Debug)]
pub(super) struct PreparedSequence {
    pub(super) id: SequenceId,
    pub(super) tokens: Vec<i64>,
    /// The number of tokens before the step.
    pub(super) past: usize,
    /// The position of the first new token.
    pub(super) position: i64,
    /// The table of the sequence with the new blocks.
    pub(super) table: Vec<BlockId>,
    /// The blocks that were allocated for it.
    taken: Vec<BlockId>,
    /// A shared block and the new block that replaces it with a copy of its content.
    pub(super) copy: Option<(BlockId, BlockId)>,
}

/// Returns the error of a call that waits for [`BlockTables::land`].
fn launched(what: &'static str) -> Error {
    Error::Unsupported {
        cache: "a paged cache",
        what,
        hint: "call `land` first, which ends it",
    }
}

/// The sequences, their tables and the pool of blocks.
#[derive(Debug)]
pub(super) struct BlockTables {
    pool: BlockPool,
    index: PrefixIndex,
    sequences: HashMap<SequenceId, Sequence>,
    /// The new tokens of a launched step.
    launched: Vec<PreparedSequence>,
    next: u64,
    block_size: usize,
    share_prefixes: bool,
    statistics: PagedStatistics,
}

impl BlockTables {
    pub(super) fn new(blocks: BlockId, block_size: usize, share_prefixes: bool) -> BlockTables {
        BlockTables {
            pool: BlockPool::new(blocks),
            index: PrefixIndex::new(blocks as usize),
            sequences: HashMap::new(),
            launched: Vec::new(),
            next: 0,
            block_size,
            share_prefixes,
            statistics: PagedStatistics::default(),
        }
    }

    /// Adds a sequence that begins with the longest known prefix of `tokens` in its namespace, in whole
    /// blocks that leave at least one token. Returns its id and the length of that prefix.
    pub(super) fn add(&mut self, namespace: u64, tokens: &[i64]) -> (SequenceId, usize) {
        let table = self.cached_blocks(namespace, tokens);
        let cached = table.len() * self.block_size;
        for block in &table {
            self.pool.retain(*block);
        }
        self.statistics.hits += cached as u64;
        self.statistics.misses += (tokens.len() - cached) as u64;
        let sequence = Sequence {
            table,
            tokens: tokens[..cached].to_vec(),
            namespace,
            position_offset: 0,
        };
        (self.insert(sequence), cached)
    }

    /// Returns the blocks that [`add`](BlockTables::add) would find.
    pub(super) fn cached_blocks(&self, namespace: u64, tokens: &[i64]) -> Vec<BlockId> {
        let mut before = Prefix::Empty(namespace);
        // At least one token is left to compute, since the logits of the last one are needed.
        let usable = tokens.len().saturating_sub(1);
        let mut table = Vec::new();
        // If sharing is turned off, the index is empty.
        for tokens in tokens[..usable].chunks_exact(self.block_size) {
            let Some((block, prefix)) = self.index.find(before, tokens) else {
                break;
            };
            table.push(block);
            before = prefix;
        }
        table
    }

    pub(super) fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let sequence = self.sequence(id)?.clone();
        for block in &sequence.table {
            self.pool.retain(*block);
        }
        Ok(self.insert(sequence))
    }

    pub(super) fn set_position_offset(&mut self, id: SequenceId, offset: i64) -> Result<()> {
        self.sequence_mut(id)?.position_offset = offset;
        Ok(())
    }

    pub(super) fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        // The commit would give back its table of before.
        if self.launched.iter().any(|new| new.id == id) {
            return Err(launched("truncate a sequence of a launched step"));
        }
        let held = self.len(id)?;
        if len > held {
            let signed = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
            return Err(Error::TruncateBeyondEnd {
                len: signed(len),
                held: signed(held),
            });
        }
        let keep = len.div_ceil(self.block_size);
        let sequence = self.sequence_mut(id)?;
        let dropped = sequence.table.split_off(keep);
        sequence.tokens.truncate(len);
        let last = sequence.table.last().copied();
        self.release_blocks(dropped);
        // A block that was full is open now and will be written to: no other sequence may begin to share it, for which
        // the next step would need a copy that nobody has planned.
        if let Some(last) = last.filter(|_| !len.is_multiple_of(self.block_size))
            && self.pool.references(last) == 1
        {
            self.index.remove(last);
        }
        Ok(())
    }

    pub(super) fn release(&mut self, id: SequenceId) -> Result<()> {
        let sequence = self
            .sequences
            .remove(&id)
            .ok_or(Error::NoSuchSequence { id })?;
        self.release_blocks(sequence.table);
        Ok(())
    }

    pub(super) fn release_all(&mut self) {
        // Oldest first, so that the order of eviction does not depend on a hash map.
        let mut sequences: Vec<_> = std::mem::take(&mut self.sequences).into_iter().collect();
        sequences.sort_unstable_by_key(|(id, _)| *id);
        for (_, sequence) in sequences {
            self.release_blocks(sequence.table);
        }
    }

    /// Frees the evictable blocks.
    pub(super) fn forget_prefixes(&mut self) {
        for block in self.pool.free_evictable() {
            self.index.remove(block);
        }
    }

    /// Allocates blocks for the new tokens of some sequences. If there are too few blocks, allocates none.
    pub(super) fn prepare(
        &mut self,
        new_tokens: &[(SequenceId, &[i64])],
    ) -> Result<Vec<PreparedSequence>> {
        if !self.launched.is_empty() {
            return Err(launched("begin a step while another is launched"));
        }
        let mut seen = HashSet::new();
        let mut needed = 0_usize;
        for (id, tokens) in new_tokens {
            needed = needed.saturating_add(self.blocks_needed(*id, tokens.len())?);
            // Two entries for one sequence would both plan to fill the same open block.
            if !seen.insert(*id) {
                return Err(Error::SequenceTwice { id: *id });
            }
        }
        let free = self.pool.available();
        if needed > free {
            return Err(Error::OutOfBlocks { needed, free });
        }
        let mut all = Vec::with_capacity(new_tokens.len());
        for (id, tokens) in new_tokens {
            all.push(self.prepare_one(*id, tokens)?);
        }
        Ok(all)
    }

    /// Allocates the blocks of one sequence; the caller has checked that there are enough.
    fn prepare_one(&mut self, id: SequenceId, tokens: &[i64]) -> Result<PreparedSequence> {
        let needed = self.blocks_needed(id, tokens.len())?;
        let shared = self.shared_last_block(id, tokens.len())?;
        let sequence = self.sequence(id)?;
        let (past, mut table) = (sequence.tokens.len(), sequence.table.clone());
        let index = i64::try_from(past).unwrap_or(i64::MAX);
        // A negative position would be an index outside the tables of rotary positions.
        let position = index.saturating_add(sequence.position_offset).max(0);
        let mut taken = Vec::with_capacity(needed);
        for _ in 0..needed {
            let (index, statistics) = (&mut self.index, &mut self.statistics);
            // The contents of an evicted block are lost, so it is removed from the index first.
            let block = self.pool.take(|evicted| {
                index.remove(evicted);
                statistics.evictions += 1;
            });
            taken.extend(block);
        }
        let mut unused = taken.iter().copied();
        let copy = match (shared, table.last_mut()) {
            // Every sequence keeps its reference to the shared block until the commit, so none of them
            // writes to a block that an undone step must leave unchanged.
            (Some(from), Some(last)) => unused.next().map(|to| {
                *last = to;
                self.statistics.copies += 1;
                (from, to)
            }),
            _ => None,
        };
        if copy.is_none() && past % self.block_size != 0 && !tokens.is_empty() {
            // The block was full before a truncation; its tokens will differ from those in the index.
            if let Some(last) = table.last() {
                self.index.remove(*last);
            }
        }
        table.extend(unused);
        Ok(PreparedSequence {
            id,
            tokens: tokens.to_vec(),
            past,
            position,
            table,
            taken,
            copy,
        })
    }

    /// Frees the blocks of a step that is not committed.
    pub(super) fn cancel(&mut self, prepared: Vec<PreparedSequence>) {
        for new in prepared.into_iter().rev() {
            for block in new.taken.into_iter().rev() {
                self.pool.release(block, false);
            }
        }
    }

    /// Keeps a step until [`land`](BlockTables::land).
    pub(super) fn launch(&mut self, prepared: Vec<PreparedSequence>) {
        self.launched = prepared;
    }

    /// Commits the sequences of the launched step that get a token, and cancels the others.
    pub(super) fn land(&mut self, mut token: impl FnMut(SequenceId) -> Option<i64>) {
        let (mut done, mut undone) = (Vec::new(), Vec::new());
        for mut new in std::mem::take(&mut self.launched) {
            let token = token(new.id).filter(|_| self.sequences.contains_key(&new.id));
            match token {
                Some(token) => {
                    new.tokens = vec![token];
                    done.push(new);
                }
                None => undone.push(new),
            }
        }
        self.commit(done);
        self.cancel(undone);
    }

    /// Adds the new tokens to their sequences, and full blocks to the index.
    pub(super) fn commit(&mut self, prepared: Vec<PreparedSequence>) {
        for new in prepared {
            let Some(sequence) = self.sequences.get_mut(&new.id) else {
                // The batch borrows the cache, so that no sequence can be released during a step.
                debug_assert!(false, "a sequence was released during a step");
                continue;
            };
            sequence.table = new.table;
            sequence.tokens.extend(new.tokens);
            if let Some((from, _)) = new.copy {
                self.release_blocks(vec![from]);
            }
            if self.share_prefixes {
                self.register(new.id, new.past / self.block_size);
            }
        }
    }

    /// Adds the full blocks of a sequence, from block `first` on, to the index. Blocks whose contents are
    /// already indexed are replaced by the indexed blocks.
    fn register(&mut self, id: SequenceId, first: usize) {
        let Some(sequence) = self.sequences.get_mut(&id) else {
            return;
        };
        let mut before = match first.checked_sub(1) {
            None => Prefix::Empty(sequence.namespace),
            Some(last) => match self.index.prefix(sequence.table[last]) {
                Some(prefix) => prefix,
                None => return,
            },
        };
        let full = sequence.tokens.chunks_exact(self.block_size);
        for (block, tokens) in sequence.table.iter_mut().zip(full).skip(first) {
            match self.index.find(before, tokens) {
                Some((known, prefix)) => {
                    if known != *block {
                        self.pool.retain(known);
                        self.pool.release(*block, false);
                        *block = known;
                        // Two sequences with equal prefixes in one step compute the same block twice;
                        // one copy is enough.
                        self.statistics.merged += 1;
                    }
                    before = prefix;
                }
                None => before = self.index.insert(before, tokens, *block),
            }
        }
    }

    /// Removes a reference to each block, the last block first, so that later blocks of a sequence are evicted
    /// before the earlier blocks that are needed to find them.
    fn release_blocks(&mut self, table: Vec<BlockId>) {
        for block in table.into_iter().rev() {
            self.pool.release(block, self.index.contains(block));
        }
    }

    fn insert(&mut self, sequence: Sequence) -> SequenceId {
        let id = SequenceId(self.next);
        self.next += 1;
        self.sequences.insert(id, sequence);
        id
    }

    pub(super) fn blocks_needed(&self, id: SequenceId, new_tokens: usize) -> Result<usize> {
        let sequence = self.sequence(id)?;
        let len = sequence.tokens.len().saturating_add(new_tokens);
        let more = len.div_ceil(self.block_size) - sequence.table.len();
        let copied = self.shared_last_block(id, new_tokens)?.is_some();
        Ok(more + usize::from(copied))
    }

    /// Returns the last block of a sequence if new tokens would be written to it and other sequences share
    /// it.
    fn shared_last_block(&self, id: SequenceId, new_tokens: usize) -> Result<Option<BlockId>> {
        let sequence = self.sequence(id)?;
        let open = new_tokens > 0 && sequence.tokens.len() % self.block_size != 0;
        let last = sequence.table.last().copied().filter(|_| open);
        Ok(last.filter(|block| self.pool.references(*block) > 1))
    }

    pub(super) fn len(&self, id: SequenceId) -> Result<usize> {
        Ok(self.sequence(id)?.tokens.len())
    }

    pub(super) fn tokens(&self, id: SequenceId) -> Result<&[i64]> {
        Ok(&self.sequence(id)?.tokens)
    }

    pub(super) fn table(&self, id: SequenceId) -> Result<&[BlockId]> {
        Ok(&self.sequence(id)?.table)
    }

    pub(super) fn sequences(&self) -> usize {
        self.sequences.len()
    }

    pub(super) fn blocks(&self) -> usize {
        self.pool.len()
    }

    pub(super) fn available(&self) -> usize {
        self.pool.available()
    }

    pub(super) fn evictable(&self) -> usize {
        self.pool.evictable()
    }

    pub(super) fn statistics(&self) -> PagedStatistics {
        self.statistics
    }

    fn sequence(&self, id: SequenceId) -> Result<&Sequence> {
        self.sequences.get(&id).ok_or(Error::NoSuchSequence { id })
    }

    fn sequence_mut(&mut self, id: SequenceId) -> Result<&mut Sequence> {
        self.sequences
            .get_mut(&id)
            .ok_or(Error::NoSuchSequence { id })
    }

    /// Checks all invariants between two steps.
    pub(super) fn audit(&self) -> std::result::Result<(), String> {
        let mut references = vec![0; self.pool.len()];
        // The contents of each block according to the first table that has it.
        let mut held: HashMap<BlockId, (usize, &[i64])> = HashMap::new();
        for (id, sequence) in &self.sequences {
            if sequence.table.len() != sequence.tokens.len().div_ceil(self.block_size) {
                return Err(format!(
                    "sequence {id} of {} tokens has {} blocks",
                    sequence.tokens.len(),
                    sequence.table.len()
                ));
            }
            let chunks = sequence.tokens.chunks(self.block_size);
            for (position, (block, tokens)) in sequence.table.iter().zip(chunks).enumerate() {
                references[*block as usize] += 1;
                let (other_position, others) = *held.entry(*block).or_insert((position, tokens));
                let common = others.len().min(tokens.len());
                if other_position != position || others[..common] != tokens[..common] {
                    return Err(format!(
                        "block {block} is shared by sequences with other tokens"
                    ));
                }
                let full = tokens.len() == self.block_size;
                match self.index.tokens(*block) {
                    Some(known) if known[..tokens.len()] != *tokens => {
                        return Err(format!("block {block} holds {tokens:?}, not {known:?}"));
                    }
                    None if full && self.share_prefixes => {
                        return Err(format!("full block {block} cannot be found"));
                    }
                    _ => {}
                }
            }
        }
        for block in self.launched.iter().flat_map(|new| &new.taken) {
            references[*block as usize] += 1;
        }
        self.pool.audit(&references)?;
        self.index.audit()?;
        for block in 0..=BlockId::MAX {
            if block as usize >= self.pool.len() {
                break;
            }
            let known = self.index.contains(block);
            let (evictable, used) = (
                self.pool.is_evictable(block),
                references[block as usize] > 0,
            );
            if evictable && !known || known && !evictable && !used {
                return Err(format!(
                    "block {block}: known {known}, evictable {evictable}, used {used}"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
