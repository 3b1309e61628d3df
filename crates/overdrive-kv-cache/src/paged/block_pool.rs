//! The states of the blocks of a pool, without their contents.

use super::eviction::EvictableBlocks;

/// The number of a block in its pool.
pub(super) type BlockId = u32;

/// A pool whose blocks are free, evictable (no sequence refers to them, but their contents may be
/// reused), or used.
#[derive(Debug)]
pub(super) struct BlockPool {
    references: Vec<u32>,
    free: Vec<BlockId>,
    evictable: EvictableBlocks,
}

impl BlockPool {
    /// Creates a pool of free blocks. Low block ids are allocated first, so that the end of a pool that is
    /// never full stays untouched.
    pub(super) fn new(blocks: BlockId) -> BlockPool {
        let count = blocks as usize;
        BlockPool {
            references: vec![0; count],
            // `take` pops from the end.
            free: (0..blocks).rev().collect(),
            evictable: EvictableBlocks::new(count),
        }
    }

    pub(super) fn len(&self) -> usize {
        self.references.len()
    }

    /// Returns the number of blocks that can be allocated: free and evictable blocks.
    pub(super) fn available(&self) -> usize {
        self.free.len() + self.evictable.len()
    }

    pub(super) fn evictable(&self) -> usize {
        self.evictable.len()
    }

    pub(super) fn references(&self, block: BlockId) -> u32 {
        self.references[block as usize]
    }

    pub(super) fn is_evictable(&self, block: BlockId) -> bool {
        self.evictable.contains(block)
    }

    /// Allocates a block with one reference: a free block, else the evictable block that was released first,
    /// with which `evicted` is called.
    pub(super) fn take(&mut self, evicted: impl FnOnce(BlockId)) -> Option<BlockId> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let block = self.evictable.pop()?;
                evicted(block);
                block
            }
        };
        self.references[block as usize] = 1;
        Some(block)
    }

    /// Adds a reference to a used or an evictable block.
    pub(super) fn retain(&mut self, block: BlockId) {
        self.evictable.remove(block);
        self.references[block as usize] += 1;
    }

    /// Removes a reference. Without references, the block is evictable if `keep` is `true`, else free.
    pub(super) fn release(&mut self, block: BlockId, keep: bool) {
        let references = &mut self.references[block as usize];
        debug_assert!(*references > 0, "block {block} was released twice");
        *references = references.saturating_sub(1);
        if *references > 0 {
            return;
        }
        if keep {
            self.evictable.insert(block);
        } else {
            self.free.push(block);
        }
    }

    /// Frees every evictable block and returns them.
    pub(super) fn free_evictable(&mut self) -> Vec<BlockId> {
        let blocks: Vec<BlockId> = std::iter::from_fn(|| self.evictable.pop()).collect();
        self.free.extend(blocks.iter().rev());
        blocks
    }

    /// Checks the pool against `expected`, the number of references that tables hold to each block.
    pub(super) fn audit(&self, expected: &[u32]) -> Result<(), String> {
        let mut free = vec![false; self.len()];
        for block in &self.free {
            if std::mem::replace(&mut free[*block as usize], true) {
                return Err(format!("block {block} is free twice"));
            }
        }
        self.evictable.audit()?;
        for (block, (references, expected)) in self.references.iter().zip(expected).enumerate() {
            if references != expected {
                return Err(format!(
                    "block {block} counts {references} references and tables hold {expected}"
                ));
            }
            let evictable = self.is_evictable(block as BlockId);
            let states =
                usize::from(free[block]) + usize::from(evictable) + usize::from(*references > 0);
            if states != 1 {
                return Err(format!(
                    "block {block}: free {}, evictable {evictable}, {references} references",
                    free[block]
                ));
            }
        }
        Ok(())
    }
}
