use overdrive_attention::PagedSlots;
use tch::{Device, Tensor};

use super::batch::PagedBatch;
use super::config::PagedCacheConfig;
use super::ledger::{Ledger, PagedStatistics, Prepared, SequenceId};
use super::pool::BlockId;
use crate::{Error, KvView, Result};

/// The keys and values of many texts in one pool of blocks of equal size.
///
/// Each text has a table of the blocks that hold it. Memory is taken block by block, so that a text
/// wastes less than one block however long it gets; texts that begin alike share the blocks of their
/// common beginning; a fork shares all blocks and copies the last one when it goes on. The blocks of a
/// released text are kept while nobody needs their memory: a later text that begins with the same
/// tokens finds them ([`PagedCacheConfig::enable_prefix_caching`]), and the one let go longest ago is
/// taken first. Tokens are compared, not only their hashes: a text never gets keys of another.
///
/// Keys that depend on more than the tokens before them (another adapter, other positions, an image
/// behind a placeholder) need a cache of their own, or ids that tell them apart.
///
/// A step of the model goes through a [`PagedBatch`]. The pool is allocated once, keys and values
/// `(num_blocks, kv_heads, block_size, head_dim)` a layer; on a CPU its pages count as used memory only
/// once they are written, lowest first.
///
/// The method is vLLM's (Kwon et al. 2023, [arXiv:2309.06180](https://arxiv.org/abs/2309.06180)).
///
/// ```
/// use overdrive_kv_cache::{AttendOptions, KvCache, PagedCache, PagedCacheConfig};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut cache = PagedCache::new(PagedCacheConfig {
///     kv_heads: 2,
///     head_dim: 8,
///     block_size: 4,
///     num_blocks: 10,
///     ..PagedCacheConfig::default()
/// })?;
/// let prompt = [5, 6, 7, 8, 9];
/// let (first, cached) = cache.add(&prompt)?;
/// assert_eq!(cached, 0);
///
/// let (other, _) = cache.add(&[1, 2])?;
/// let random = |heads: i64| Tensor::randn([1, heads, 7, 8], (Kind::Float, Device::Cpu));
/// let mut step = cache.batch(&[(first, &prompt), (other, &[1, 2])])?; // 7 tokens in one row
/// let attended = step.attend(0, &random(4), &random(2), &random(2), &AttendOptions::default())?;
/// assert_eq!(attended.size(), [1, 4, 7, 8]);
/// step.commit()?; // without it the step has not happened
///
/// assert_eq!((cache.len(first)?, cache.len(other)?, cache.used_blocks()), (5, 2, 3));
/// let (_again, cached) = cache.add(&prompt)?;
/// assert_eq!(cached, 4); // the block of the first four tokens is shared
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct PagedCache {
    config: PagedCacheConfig,
    block_size: usize,
    ledger: Ledger,
    layers: Vec<LayerPool>,
}

/// Keys and values of a layer, `(num_blocks, H_kv, block_size, D)`: within a block, a head's tokens lie
/// side by side.
#[derive(Debug)]
pub(super) struct LayerPool {
    pub(super) keys: Tensor,
    pub(super) values: Tensor,
}

impl PagedCache {
    /// An empty cache; takes all its memory.
    ///
    /// # Errors
    /// [`Error::BadConfig`] for a config that does not [validate](PagedCacheConfig::validate),
    /// [`Error::Torch`] if there is not so much memory.
    pub fn new(config: PagedCacheConfig) -> Result<PagedCache> {
        config.validate()?;
        let (blocks, block_size) = (to_i64(config.num_blocks), config.block_size);
        let pool = |dim: i64| {
            let shape = [blocks, config.kv_heads, block_size, dim];
            Tensor::f_empty(shape, (config.kind, config.device))
        };
        let layers = (0..config.layers)
            .map(|_| {
                Ok(LayerPool {
                    keys: pool(config.head_dim)?,
                    values: pool(config.value_dim())?,
                })
            })
            .collect::<Result<_>>()?;
        // `validate` has seen that both fit.
        let blocks = BlockId::try_from(config.num_blocks).unwrap_or(BlockId::MAX);
        let block_size = usize::try_from(block_size).unwrap_or(1);
        Ok(PagedCache {
            ledger: Ledger::new(blocks, block_size, config.enable_prefix_caching),
            block_size,
            config,
            layers,
        })
    }

    /// A new text, and how many of its `tokens` are in shared blocks already: always fewer than all,
    /// so that there is one left to compute logits from. The others are given to
    /// [`batch`](PagedCache::batch), in one step or in several. Takes no memory but by holding on to
    /// the shared blocks.
    ///
    /// # Errors
    /// None at present.
    pub fn add(&mut self, tokens: &[i64]) -> Result<(SequenceId, usize)> {
        Ok(self.ledger.add(tokens))
    }

    /// How many of `tokens` [`add`](PagedCache::add) would find.
    pub fn cached_tokens(&self, tokens: &[i64]) -> usize {
        self.ledger.known_blocks(tokens).len() * self.block_size
    }

    /// A second text that goes its own way from here on. It shares all blocks; the last one is copied
    /// by the first of both to go on, if it is not full.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        self.ledger.fork(id)
    }

    /// Forgets all but the first `len` tokens of a text and gives back the blocks they filled.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`], [`Error::TruncateBeyondEnd`].
    pub fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        self.ledger.truncate(id, len)
    }

    /// Forgets a text. Its full blocks can be found by later texts until their memory is needed.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn release(&mut self, id: SequenceId) -> Result<()> {
        self.ledger.release(id)
    }

    /// Forgets every text; prefixes can still be found.
    pub fn release_all(&mut self) {
        self.ledger.release_all();
    }

    /// Forgets what no text holds: later texts find only the prefixes of those that are here. To be
    /// called, after [`release_all`](PagedCache::release_all), when the weights of the model change.
    pub fn forget_prefixes(&mut self) {
        self.ledger.forget_prefixes();
    }

    /// A step: takes the blocks that the new tokens of some texts need, for all or for none, and
    /// returns the [`KvCache`](crate::KvCache) to run the model with. The new tokens lie in one row in
    /// the order of `parts`. They count when the step is [committed](PagedBatch::commit).
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`], [`Error::NoSuchSequence`], [`Error::SequenceTwice`], or an error of
    /// libtorch; the cache is then as it was.
    pub fn batch<'a>(&'a mut self, parts: &[(SequenceId, &[i64])]) -> Result<PagedBatch<'a>> {
        let prepared = self.ledger.prepare(parts)?;
        match self.open(&prepared) {
            Ok(slots) => Ok(PagedBatch::new(self, prepared, slots)),
            Err(error) => {
                self.ledger.cancel(prepared);
                Err(error)
            }
        }
    }

    /// Copies shared blocks and says where each new token goes.
    fn open(&self, prepared: &[Prepared]) -> Result<PagedSlots> {
        for (from, to) in prepared.iter().filter_map(|part| part.copy) {
            for layer in &self.layers {
                for pool in [&layer.keys, &layer.values] {
                    let from = pool.f_select(0, from.into())?;
                    pool.f_select(0, to.into())?.f_copy_(&from)?;
                }
            }
        }
        let mut slots = Vec::new();
        for part in prepared {
            slots.extend((part.past..part.past + part.tokens.len()).map(|place| {
                let block = part.table[place / self.block_size] as usize;
                block * self.block_size + place % self.block_size
            }));
        }
        let device = self.config.device;
        Ok(PagedSlots::new(slots, self.block_size, device)?)
    }

    /// A dense copy of what a layer holds of a text, for any other attention: keys and values
    /// `(1, H_kv, len, D)`.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`], [`Error::NoSuchLayer`].
    pub fn gather(&self, id: SequenceId, layer: usize) -> Result<KvView> {
        let (table, len) = (self.ledger.table(id)?, self.ledger.len(id)?);
        let pool = self.layers.get(layer).ok_or(Error::NoSuchLayer {
            layer,
            layers: self.layers.len(),
        })?;
        let table: Vec<i64> = table.iter().map(|block| i64::from(*block)).collect();
        let table = Tensor::f_from_slice(&table)?.f_to_device(self.config.device)?;
        let dense = |blocks: &Tensor| -> Result<Tensor> {
            let rows = blocks.f_index_select(0, &table)?;
            let rows = rows.f_transpose(0, 1)?.f_flatten(1, 2)?;
            Ok(rows.f_narrow(1, 0, to_i64(len))?.f_unsqueeze(0)?)
        };
        Ok(KvView::new(dense(&pool.keys)?, dense(&pool.values)?))
    }

    /// Tokens of a text.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn len(&self, id: SequenceId) -> Result<usize> {
        self.ledger.len(id)
    }

    /// Whether no text is held.
    pub fn is_empty(&self) -> bool {
        self.sequences() == 0
    }

    /// The tokens of a text whose keys and values are held.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn tokens(&self, id: SequenceId) -> Result<&[i64]> {
        self.ledger.tokens(id)
    }

    /// How many texts are held.
    pub fn sequences(&self) -> usize {
        self.ledger.texts()
    }

    /// Blocks that a step with `new_tokens` of this text takes, a copy of a shared block included; 0
    /// for a text that is not here.
    pub fn blocks_needed(&self, id: SequenceId, new_tokens: usize) -> usize {
        self.ledger.blocks_needed(id, new_tokens).unwrap_or(0)
    }

    /// Blocks that a text of `tokens` tokens takes, if it shares none.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Blocks that a step can take: those never used or given back, and those that only wait to be
    /// found again.
    pub fn free_blocks(&self) -> usize {
        self.ledger.available()
    }

    /// The part of [`free_blocks`](PagedCache::free_blocks) that can be found again.
    pub fn evictable_blocks(&self) -> usize {
        self.ledger.idle()
    }

    /// Blocks that texts hold; one that several share counts once.
    pub fn used_blocks(&self) -> usize {
        self.num_blocks() - self.free_blocks()
    }

    /// Blocks of the pool.
    pub fn num_blocks(&self) -> usize {
        self.ledger.blocks()
    }

    /// Tokens a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Layers of the model.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// What the cache was made with.
    pub fn config(&self) -> &PagedCacheConfig {
        &self.config
    }

    /// Bytes of the pool.
    pub fn bytes(&self) -> u64 {
        self.num_blocks() as u64 * self.bytes_per_block()
    }

    /// Bytes of one block over all layers.
    pub fn bytes_per_block(&self) -> u64 {
        self.config.bytes_per_block()
    }

    /// Bytes that one token takes over all layers, in a full block.
    pub fn bytes_per_token(&self) -> f64 {
        self.bytes_per_block() as f64 / self.block_size as f64
    }

    /// What has happened since the cache was made.
    pub fn statistics(&self) -> PagedStatistics {
        self.ledger.statistics()
    }

    /// Checks the bookkeeping: every block is free, evictable or held by as many tables as it counts,
    /// and holds the tokens that its texts and the index of prefixes believe. For soak tests; reads
    /// every table.
    ///
    /// # Errors
    /// The first contradiction: a bug in this crate.
    pub fn audit(&self) -> std::result::Result<(), String> {
        self.ledger.audit()
    }

    pub(super) fn pools(&mut self) -> &mut [LayerPool] {
        &mut self.layers
    }

    pub(super) fn ledger(&mut self) -> &mut Ledger {
        &mut self.ledger
    }

    pub(super) fn device(&self) -> Device {
        self.config.device
    }
}

pub(super) fn to_i64(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
