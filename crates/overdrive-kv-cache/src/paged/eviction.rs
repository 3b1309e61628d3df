//! The order in which blocks that no sequence refers to are evicted.

use std::collections::BTreeMap;

use super::block_pool::BlockId;

/// The blocks that may be evicted: the one that was released first comes first.
#[derive(Debug)]
pub(super) struct EvictableBlocks {
    // Ordered, because a block may be removed from the middle when a sequence reuses it.
    by_release: BTreeMap<u64, BlockId>,
    /// The time of release of each block that is evictable.
    released_at: Vec<Option<u64>>,
    clock: u64,
}

impl EvictableBlocks {
    /// Creates the empty order of a pool of `count` blocks.
    pub(super) fn new(count: usize) -> Self {
        Self {
            by_release: BTreeMap::new(),
            released_at: vec![None; count],
            clock: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.by_release.len()
    }

    pub(super) fn contains(&self, block: BlockId) -> bool {
        self.released_at[block as usize].is_some()
    }

    /// Adds a block that has been released.
    pub(super) fn insert(&mut self, block: BlockId) {
        self.clock += 1;
        self.by_release.insert(self.clock, block);
        self.released_at[block as usize] = Some(self.clock);
    }

    /// Removes a block that is used again, if it is evictable.
    pub(super) fn remove(&mut self, block: BlockId) {
        if let Some(since) = self.released_at[block as usize].take() {
            self.by_release.remove(&since);
        }
    }

    /// Removes the block that is evicted next.
    pub(super) fn pop(&mut self) -> Option<BlockId> {
        let (_, block) = self.by_release.pop_first()?;
        self.released_at[block as usize] = None;
        Some(block)
    }

    /// Checks that both lists agree.
    pub(super) fn audit(&self) -> Result<(), String> {
        for (since, block) in &self.by_release {
            if self.released_at[*block as usize] != Some(*since) {
                return Err(format!(
                    "block {block} is evictable since {since} in one list only"
                ));
            }
        }
        if self.released_at.iter().flatten().count() != self.len() {
            return Err("a block is marked evictable and is not in the list".to_owned());
        }
        Ok(())
    }
}
