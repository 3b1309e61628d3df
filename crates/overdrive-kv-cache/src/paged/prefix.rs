//! Which block holds which tokens after which others.

use std::collections::HashMap;
use std::sync::Arc;

use super::pool::BlockId;

/// Stands for all tokens from the beginning of a text to the end of a block.
///
/// Given out once and never again, to exactly one sequence of tokens: the number takes the place of a
/// hash of the whole prefix, and unlike a hash it cannot be the same for two.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(super) struct Prefix(u64);

impl Prefix {
    /// No tokens.
    pub(super) const EMPTY: Prefix = Prefix(0);
}

/// The tokens of a block and what comes before them. Equality compares the tokens themselves; their
/// hash only finds the place to look.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Content {
    before: Prefix,
    tokens: Arc<[i64]>,
}

/// Blocks by content.
#[derive(Debug)]
pub(super) struct PrefixIndex {
    blocks: HashMap<Content, (BlockId, Prefix)>,
    /// The other way round, for each block of the pool.
    contents: Vec<Option<(Content, Prefix)>>,
    last: u64,
}

impl PrefixIndex {
    /// For a pool of `blocks` blocks.
    pub(super) fn new(blocks: usize) -> PrefixIndex {
        PrefixIndex {
            blocks: HashMap::new(),
            contents: vec![None; blocks],
            last: 0,
        }
    }

    /// The block that holds `tokens` after `before`, and the prefix that ends with it.
    pub(super) fn find(&self, before: Prefix, tokens: &[i64]) -> Option<(BlockId, Prefix)> {
        let tokens = tokens.into();
        self.blocks.get(&Content { before, tokens }).copied()
    }

    /// The prefix that ends with `block`, if that is in the index.
    pub(super) fn prefix(&self, block: BlockId) -> Option<Prefix> {
        Some(self.contents[block as usize].as_ref()?.1)
    }

    pub(super) fn tokens(&self, block: BlockId) -> Option<&[i64]> {
        Some(&self.contents[block as usize].as_ref()?.0.tokens)
    }

    pub(super) fn contains(&self, block: BlockId) -> bool {
        self.contents[block as usize].is_some()
    }

    /// Adds a block whose content no other has; the prefix that ends with it.
    pub(super) fn insert(&mut self, before: Prefix, tokens: &[i64], block: BlockId) -> Prefix {
        self.last += 1;
        let prefix = Prefix(self.last);
        let tokens = tokens.into();
        let content = Content { before, tokens };
        let other = self.blocks.insert(content.clone(), (block, prefix));
        debug_assert!(other.is_none(), "two blocks of one content");
        self.contents[block as usize] = Some((content, prefix));
        prefix
    }

    /// Forgets a block. What the index knows to follow it can then not be reached any more.
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
