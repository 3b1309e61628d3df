//! The block tables of all texts, without the blocks' content.

use std::collections::{HashMap, HashSet};

use super::pool::{BlockId, BlockPool};
use super::prefix::{Prefix, PrefixIndex};
use crate::{Error, Result};

/// Names a text in a [`PagedCache`](crate::PagedCache); never given out twice by one cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct SequenceId(u64);

impl std::fmt::Display for SequenceId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.0.fmt(f)
    }
}

/// What a [`PagedCache`](crate::PagedCache) has done since it was made.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub struct PagedStatistics {
    /// Tokens of added texts that were found in shared blocks.
    pub hits: u64,
    /// Tokens of added texts that were not.
    pub misses: u64,
    /// Idle blocks whose content was given up because their memory was needed.
    pub evictions: u64,
    /// Blocks copied because a text went on in one that others share.
    pub copies: u64,
    /// Blocks given back because another with the same content was there when they became full.
    pub merged: u64,
}

/// A text and the blocks that hold it.
#[derive(Debug, Clone, Default)]
struct Text {
    /// As many blocks as the tokens need.
    table: Vec<BlockId>,
    /// The tokens whose keys and values are in the blocks.
    tokens: Vec<i64>,
}

/// New tokens of a text and the blocks for them, which count only when committed.
#[derive(Debug)]
pub(super) struct Prepared {
    pub(super) id: SequenceId,
    pub(super) tokens: Vec<i64>,
    /// Tokens that the text has already.
    pub(super) past: usize,
    /// The text's table with the new blocks.
    pub(super) table: Vec<BlockId>,
    /// What was taken from the pool for it.
    taken: Vec<BlockId>,
    /// A shared block and the taken one that holds a copy of it in its place.
    pub(super) copy: Option<(BlockId, BlockId)>,
}

/// Texts, their tables and the blocks behind them.
#[derive(Debug)]
pub(super) struct Ledger {
    pool: BlockPool,
    index: PrefixIndex,
    texts: HashMap<SequenceId, Text>,
    next: u64,
    block_size: usize,
    share_prefixes: bool,
    statistics: PagedStatistics,
}

impl Ledger {
    pub(super) fn new(blocks: BlockId, block_size: usize, share_prefixes: bool) -> Ledger {
        Ledger {
            pool: BlockPool::new(blocks),
            index: PrefixIndex::new(blocks as usize),
            texts: HashMap::new(),
            next: 0,
            block_size,
            share_prefixes,
            statistics: PagedStatistics::default(),
        }
    }

    /// A new text that begins with the longest prefix of `tokens` in whole blocks that is known and
    /// leaves at least one token.
    pub(super) fn add(&mut self, tokens: &[i64]) -> (SequenceId, usize) {
        let table = self.known_blocks(tokens);
        let cached = table.len() * self.block_size;
        for block in &table {
            self.pool.retain(*block);
        }
        self.statistics.hits += cached as u64;
        self.statistics.misses += (tokens.len() - cached) as u64;
        let text = Text {
            table,
            tokens: tokens[..cached].to_vec(),
        };
        (self.insert(text), cached)
    }

    /// What [`add`](Ledger::add) would find.
    pub(super) fn known_blocks(&self, tokens: &[i64]) -> Vec<BlockId> {
        let mut before = Prefix::EMPTY;
        let usable = tokens.len().saturating_sub(1);
        let mut table = Vec::new();
        // Without sharing the index is empty.
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
        let text = self.text(id)?.clone();
        for block in &text.table {
            self.pool.retain(*block);
        }
        Ok(self.insert(text))
    }

    pub(super) fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        let held = self.len(id)?;
        if len > held {
            let signed = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
            return Err(Error::TruncateBeyondEnd {
                len: signed(len),
                held: signed(held),
            });
        }
        let keep = len.div_ceil(self.block_size);
        let text = self.text_mut(id)?;
        let dropped = text.table.split_off(keep);
        text.tokens.truncate(len);
        self.let_go(dropped);
        Ok(())
    }

    pub(super) fn release(&mut self, id: SequenceId) -> Result<()> {
        let text = self.texts.remove(&id).ok_or(Error::NoSuchSequence { id })?;
        self.let_go(text.table);
        Ok(())
    }

    pub(super) fn release_all(&mut self) {
        // Oldest first, so that the order of eviction does not depend on that of a hash map.
        let mut texts: Vec<_> = std::mem::take(&mut self.texts).into_iter().collect();
        texts.sort_unstable_by_key(|(id, _)| *id);
        for (_, text) in texts {
            self.let_go(text.table);
        }
    }

    /// Frees the idle blocks.
    pub(super) fn forget_prefixes(&mut self) {
        for block in self.pool.free_idle() {
            self.index.remove(block);
        }
    }

    /// Takes blocks for the new tokens of some texts, for all of them or for none.
    pub(super) fn prepare(&mut self, parts: &[(SequenceId, &[i64])]) -> Result<Vec<Prepared>> {
        let mut seen = HashSet::new();
        let mut needed = 0_usize;
        for (id, tokens) in parts {
            needed = needed.saturating_add(self.blocks_needed(*id, tokens.len())?);
            if !seen.insert(*id) {
                return Err(Error::SequenceTwice { id: *id });
            }
        }
        let free = self.pool.available();
        if needed > free {
            return Err(Error::OutOfBlocks { needed, free });
        }
        let mut all = Vec::with_capacity(parts.len());
        for (id, tokens) in parts {
            all.push(self.prepare_one(*id, tokens)?);
        }
        Ok(all)
    }

    /// Takes the blocks of one text; there are enough.
    fn prepare_one(&mut self, id: SequenceId, tokens: &[i64]) -> Result<Prepared> {
        let needed = self.blocks_needed(id, tokens.len())?;
        let shared = self.shared_last(id, tokens.len())?;
        let text = self.text(id)?;
        let (past, mut table) = (text.tokens.len(), text.table.clone());
        let mut taken = Vec::with_capacity(needed);
        for _ in 0..needed {
            let (index, statistics) = (&mut self.index, &mut self.statistics);
            let block = self.pool.take(|evicted| {
                index.remove(evicted);
                statistics.evictions += 1;
            });
            taken.extend(block);
        }
        let mut new = taken.iter().copied();
        let copy = match (shared, table.last_mut()) {
            // The text keeps its reference to the shared block until the commit, and so does every
            // other: none of them may write to what an undone step has to leave as it was.
            (Some(from), Some(last)) => new.next().map(|to| {
                *last = to;
                self.statistics.copies += 1;
                (from, to)
            }),
            _ => None,
        };
        if copy.is_none() && past % self.block_size != 0 && !tokens.is_empty() {
            // Cut short after it was full: it goes on with other tokens.
            if let Some(last) = table.last() {
                self.index.remove(*last);
            }
        }
        table.extend(new);
        Ok(Prepared {
            id,
            tokens: tokens.to_vec(),
            past,
            table,
            taken,
            copy,
        })
    }

    /// Gives back what a step took that did not happen.
    pub(super) fn cancel(&mut self, prepared: Vec<Prepared>) {
        for part in prepared.into_iter().rev() {
            for block in part.taken.into_iter().rev() {
                self.pool.release(block, false);
            }
        }
    }

    /// The new tokens count, and full blocks can be found by others.
    pub(super) fn commit(&mut self, prepared: Vec<Prepared>) {
        for part in prepared {
            let Some(text) = self.texts.get_mut(&part.id) else {
                debug_assert!(false, "a text went away during a step");
                continue;
            };
            text.table = part.table;
            text.tokens.extend(part.tokens);
            if let Some((from, _)) = part.copy {
                self.let_go(vec![from]);
            }
            if self.share_prefixes {
                self.register(part.id, part.past / self.block_size);
            }
        }
    }

    /// Adds the full blocks of a text from number `first` on to the index, or takes those in their
    /// place that are there already.
    fn register(&mut self, id: SequenceId, first: usize) {
        let Some(text) = self.texts.get_mut(&id) else {
            return;
        };
        let mut before = match first.checked_sub(1) {
            None => Prefix::EMPTY,
            Some(last) => match self.index.prefix(text.table[last]) {
                Some(prefix) => prefix,
                None => return,
            },
        };
        let full = text.tokens.chunks_exact(self.block_size);
        for (block, tokens) in text.table.iter_mut().zip(full).skip(first) {
            match self.index.find(before, tokens) {
                Some((known, prefix)) => {
                    if known != *block {
                        self.pool.retain(known);
                        self.pool.release(*block, false);
                        *block = known;
                        self.statistics.merged += 1;
                    }
                    before = prefix;
                }
                None => before = self.index.insert(before, tokens, *block),
            }
        }
    }

    /// One reference less to each block, the last first: what comes later in a text is then always
    /// evicted before what it needs in front of it.
    fn let_go(&mut self, table: Vec<BlockId>) {
        for block in table.into_iter().rev() {
            self.pool.release(block, self.index.contains(block));
        }
    }

    fn insert(&mut self, text: Text) -> SequenceId {
        let id = SequenceId(self.next);
        self.next += 1;
        self.texts.insert(id, text);
        id
    }

    pub(super) fn blocks_needed(&self, id: SequenceId, new_tokens: usize) -> Result<usize> {
        let text = self.text(id)?;
        let len = text.tokens.len().saturating_add(new_tokens);
        let more = len.div_ceil(self.block_size) - text.table.len();
        let copied = self.shared_last(id, new_tokens)?.is_some();
        Ok(more + usize::from(copied))
    }

    /// The last block of a text, if new tokens would be written to it and others refer to it too.
    fn shared_last(&self, id: SequenceId, new_tokens: usize) -> Result<Option<BlockId>> {
        let text = self.text(id)?;
        let open = new_tokens > 0 && text.tokens.len() % self.block_size != 0;
        let last = text.table.last().copied().filter(|_| open);
        Ok(last.filter(|block| self.pool.references(*block) > 1))
    }

    pub(super) fn len(&self, id: SequenceId) -> Result<usize> {
        Ok(self.text(id)?.tokens.len())
    }

    pub(super) fn tokens(&self, id: SequenceId) -> Result<&[i64]> {
        Ok(&self.text(id)?.tokens)
    }

    pub(super) fn table(&self, id: SequenceId) -> Result<&[BlockId]> {
        Ok(&self.text(id)?.table)
    }

    pub(super) fn texts(&self) -> usize {
        self.texts.len()
    }

    pub(super) fn blocks(&self) -> usize {
        self.pool.len()
    }

    pub(super) fn available(&self) -> usize {
        self.pool.available()
    }

    pub(super) fn idle(&self) -> usize {
        self.pool.idle()
    }

    pub(super) fn statistics(&self) -> PagedStatistics {
        self.statistics
    }

    fn text(&self, id: SequenceId) -> Result<&Text> {
        self.texts.get(&id).ok_or(Error::NoSuchSequence { id })
    }

    fn text_mut(&mut self, id: SequenceId) -> Result<&mut Text> {
        self.texts.get_mut(&id).ok_or(Error::NoSuchSequence { id })
    }

    /// Checks everything that has to hold between two steps; the error says what does not.
    pub(super) fn audit(&self) -> std::result::Result<(), String> {
        let mut references = vec![0; self.pool.len()];
        // What a block holds according to the first table that has it.
        let mut held: HashMap<BlockId, (usize, &[i64])> = HashMap::new();
        for (id, text) in &self.texts {
            if text.table.len() != text.tokens.len().div_ceil(self.block_size) {
                return Err(format!(
                    "text {id} of {} tokens has {} blocks",
                    text.tokens.len(),
                    text.table.len()
                ));
            }
            let chunks = text.tokens.chunks(self.block_size);
            for (place, (block, tokens)) in text.table.iter().zip(chunks).enumerate() {
                references[*block as usize] += 1;
                let (other_place, others) = *held.entry(*block).or_insert((place, tokens));
                let common = others.len().min(tokens.len());
                if other_place != place || others[..common] != tokens[..common] {
                    return Err(format!("block {block} is shared by texts that differ"));
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
        self.pool.audit(&references)?;
        self.index.audit()?;
        for block in 0..=BlockId::MAX {
            if block as usize >= self.pool.len() {
                break;
            }
            let known = self.index.contains(block);
            let (idle, used) = (self.pool.is_idle(block), references[block as usize] > 0);
            if idle && !known || known && !idle && !used {
                return Err(format!(
                    "block {block}: known {known}, idle {idle}, used {used}"
                ));
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests;
