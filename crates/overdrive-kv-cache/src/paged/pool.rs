//! Blocks without what is in them: who refers to which, which are free, which may be taken back.

use std::collections::BTreeMap;

/// Number of a block in its pool.
pub(super) type BlockId = u32;

/// A block is free, or idle (nobody refers to it, but its content may be wanted again), or used.
#[derive(Debug)]
pub(super) struct BlockPool {
    references: Vec<u32>,
    free: Vec<BlockId>,
    /// Idle blocks by when they were let go: the first is the one to take back.
    idle: BTreeMap<u64, BlockId>,
    /// When each block was let go, where it is idle.
    idle_since: Vec<Option<u64>>,
    clock: u64,
}

impl BlockPool {
    /// All free; low numbers are given out first, so that a pool that is never full leaves its end
    /// untouched.
    pub(super) fn new(blocks: BlockId) -> BlockPool {
        let count = blocks as usize;
        BlockPool {
            references: vec![0; count],
            free: (0..blocks).rev().collect(),
            idle: BTreeMap::new(),
            idle_since: vec![None; count],
            clock: 0,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.references.len()
    }

    /// Blocks that can be taken: free and idle ones.
    pub(super) fn available(&self) -> usize {
        self.free.len() + self.idle.len()
    }

    pub(super) fn idle(&self) -> usize {
        self.idle.len()
    }

    pub(super) fn references(&self, block: BlockId) -> u32 {
        self.references[block as usize]
    }

    pub(super) fn is_idle(&self, block: BlockId) -> bool {
        self.idle_since[block as usize].is_some()
    }

    /// A block with one reference: a free one, else the one that has been idle longest, of which
    /// `evicted` is told.
    pub(super) fn take(&mut self, evicted: impl FnOnce(BlockId)) -> Option<BlockId> {
        let block = match self.free.pop() {
            Some(block) => block,
            None => {
                let (_, block) = self.idle.pop_first()?;
                self.idle_since[block as usize] = None;
                evicted(block);
                block
            }
        };
        self.references[block as usize] = 1;
        Some(block)
    }

    /// One reference more, to a used or an idle block.
    pub(super) fn retain(&mut self, block: BlockId) {
        if let Some(since) = self.idle_since[block as usize].take() {
            self.idle.remove(&since);
        }
        self.references[block as usize] += 1;
    }

    /// One reference less; after the last one the block is idle if it is to be kept, else free.
    pub(super) fn release(&mut self, block: BlockId, keep: bool) {
        let references = &mut self.references[block as usize];
        debug_assert!(*references > 0, "block {block} was released twice");
        *references = references.saturating_sub(1);
        if *references > 0 {
            return;
        }
        if keep {
            self.clock += 1;
            self.idle.insert(self.clock, block);
            self.idle_since[block as usize] = Some(self.clock);
        } else {
            self.free.push(block);
        }
    }

    /// Frees every idle block and returns them.
    pub(super) fn free_idle(&mut self) -> Vec<BlockId> {
        let blocks: Vec<BlockId> = std::mem::take(&mut self.idle).into_values().collect();
        for block in &blocks {
            self.idle_since[*block as usize] = None;
        }
        self.free.extend(blocks.iter().rev());
        blocks
    }

    /// Checks itself against `expected`, the references that tables hold to each block.
    pub(super) fn audit(&self, expected: &[u32]) -> Result<(), String> {
        let mut free = vec![false; self.len()];
        for block in &self.free {
            if std::mem::replace(&mut free[*block as usize], true) {
                return Err(format!("block {block} is free twice"));
            }
        }
        for (since, block) in &self.idle {
            if self.idle_since[*block as usize] != Some(*since) {
                return Err(format!("block {block} is idle at {since} in one list only"));
            }
        }
        if self.idle_since.iter().flatten().count() != self.idle.len() {
            return Err("a block believes itself idle that is not".to_owned());
        }
        for (block, (references, expected)) in self.references.iter().zip(expected).enumerate() {
            if references != expected {
                return Err(format!(
                    "block {block} counts {references} references and tables hold {expected}"
                ));
            }
            let idle = self.idle_since[block].is_some();
            let states =
                usize::from(free[block]) + usize::from(idle) + usize::from(*references > 0);
            if states != 1 {
                return Err(format!(
                    "block {block}: free {}, idle {idle}, {references} references",
                    free[block]
                ));
            }
        }
        Ok(())
    }
}
