//! What the scheduler has to know of the memory that texts take.

use overdrive_kv_cache::{PagedCache, SequenceId};

use crate::Result;

/// A pool of blocks of equal size, and texts in it.
pub(super) trait Blocks {
    /// Names a text.
    type Id: Copy + std::fmt::Debug;

    /// A new text of `tokens`, and how many of them are there already, which is fewer than all.
    fn add(&mut self, tokens: &[i64]) -> Result<(Self::Id, usize)>;

    /// A copy that shares all blocks.
    fn fork(&mut self, id: Self::Id) -> Result<Self::Id>;

    /// Gives a text's blocks back.
    fn release(&mut self, id: Self::Id) -> Result<()>;

    /// Blocks that `new` more tokens of a text would take. Grows with `new`.
    fn needed(&self, id: Self::Id, new: usize) -> usize;

    /// Blocks that can be had, those included that are kept only in case.
    fn free(&self) -> usize;
}

impl Blocks for PagedCache {
    type Id = SequenceId;

    fn add(&mut self, tokens: &[i64]) -> Result<(SequenceId, usize)> {
        Ok(PagedCache::add(self, tokens)?)
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
