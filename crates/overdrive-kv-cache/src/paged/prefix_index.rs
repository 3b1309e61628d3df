//! The index of blocks by their tokens and all preceding tokens.

use std::collections::HashMap;
use std::sync::Arc;

use super::block_pool::BlockId;

/// Identifies all tokens from the beginning of a sequence to the end of a block.
///
/// It is used like a hash of the whole prefix, but it never collides.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) enum Prefix {
    /// The empty prefix of a namespace.
    Empty(u64),
    /// A unique number for exactly one sequence of tokens in one namespace.
    Tokens(u64),
}

/// The tokens of a block and the prefix before them. Equality compares the tokens themselves; their
/// hash only finds the bucket.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Content {
    before: Prefix,
    tokens: Arc<[i64]>,
}

/// The blocks by their contents.
#[derive(Debug)]
pub(super) struct PrefixIndex {
    blocks: HashMap<Content, (BlockId, Prefix)>,
    /// The contents of each block of the pool that is in the index.
    contents: Vec<Option<(Content, Prefix)>>,
    last: u64,
}

impl PrefixIndex {
    /// Returns the index of a pool of `blocks` blocks.
    pub(super) fn new(blocks: usize) -> PrefixIndex {
        PrefixIndex {
            blocks: HashMap::new(),
            contents: vec![None; blocks],
            last: 0,
        }
    }

    /// Returns the block that holds `tokens` after `before`, and the prefix that ends with it.
    pub(super) fn find(&self, before: Prefix, tokens: &[i64]) -> Option<(BlockId, Prefix)> {
        let tokens = tokens.into();
        self.blocks.get(&Content { before, tokens }).copied()
    }

    /// Returns the prefix that ends with `block`, if it is in the index.
    pub(super) fn prefix(&self, block: BlockId) -> Option<Prefix> {
        Some(self.contents[block as usize].as_ref()?.1)
    }

    pub(super) fn tokens(&self, block: BlockId) -> Option<&[i64]> {
        Some(&self.contents[block as usize].as_ref()?.0.tokens)
    }

    pub(super) fn contains(&self, block: BlockId) -> bool {
        self.contents[block as usize].is_some()
    }

    /// Adds a block with unique contents; returns the prefix that ends with it.
    pub(super) fn insert(&mut self, before: Prefix, tokens: &[i64], block: BlockId) -> Prefix {
        self.last += 1;
        let prefix = Prefix::Tokens(self.last);
        let tokens = tokens.into();
        let content = Content { before, tokens };
        let other = self.blocks.insert(content.clone(), (block, prefix));
        debug_assert!(other.is_none(), "two blocks of one content");
        self.contents[block as usize] = Some((content, prefix));
        prefix
    }

    /// Removes a block. Blocks that follow it can then no longer be found.
    pub(super) fn remove(&mut self, block: BlockId) {
        if let Some((content, _)) = self.contents[block as usize].take() {
            self.blocks.remove(&content);
        }
    }

    /// Checks that both directions agree.
    pub(super) fn audit(&self) -> Result<(), String> {
        let mut count = 0;
        for (block, entry) in (0..).zip(&self.contents) {
            let Some((content, prefix)) = entry else {
                continue;
            };
            count += 1;
            if self.blocks.get(content) != Some(&(block, *prefix)) {
                return Err(format!("the index does not find block {block}"));
            }
        }
        if count != self.blocks.len() {
            return Err(format!(
                "the index knows {} contents of {count} blocks",
                self.blocks.len()
            ));
        }
        Ok(())
    }
}
