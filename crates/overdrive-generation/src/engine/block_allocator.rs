//! The scheduler's view of the memory of sequences.

use overdrive_kv_cache::{PagedCache, SequenceId};

use crate::Result;

/// A pool of blocks of equal size, and the sequences in it.
pub(super) trait BlockAllocator {
    /// The id of a sequence.
    type Id: Copy + std::fmt::Debug;

    /// Adds a sequence of `tokens` that shares blocks with sequences of its namespace; returns its id and
    /// the number of tokens that are cached already, which is less than all.
    fn add(&mut self, namespace: u64, tokens: &[i64]) -> Result<(Self::Id, usize)>;

    /// Forks a sequence; the copy shares all blocks.
    fn fork(&mut self, id: Self::Id) -> Result<Self::Id>;

    /// Releases the blocks of a sequence.
    fn release(&mut self, id: Self::Id) -> Result<()>;

    /// Returns the number of blocks that `new` more tokens of a sequence take. Grows with `new`.
    fn needed(&self, id: Self::Id, new: usize) -> usize;

    /// Returns the number of blocks that can be taken, evictable ones included.
    fn free(&self) -> usize;
}

impl BlockAllocator for PagedCache {
    type Id = SequenceId;

    fn add(&mut self, namespace: u64, tokens: &[i64]) -> Result<(SequenceId, usize)> {
        Ok(PagedCache::add_in(self, namespace, tokens)?)
    }

    fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        Ok(PagedCache::fork(self, id)?)
    }

    fn release(&mut self, id: SequenceId) -> Result<()> {
        Ok(PagedCache::release(self, id)?)
    }

    fn needed(&self, id: SequenceId, new: usize) -> usize {
        self.blocks_needed(id, new)
    }

    fn free(&self) -> usize {
        self.free_blocks()
    }
}
