use std::collections::HashMap;

use overdrive_attention::{PagedLayout, PagedSlots};
use tch::{Device, Tensor};

use super::batch::{PagedBatch, PagedStep};
use super::block_pool::BlockId;
use super::block_tables::{BlockTables, PagedStatistics, PreparedSequence, SequenceId};
use super::config::PagedCacheConfig;
use super::layer_pool::LayerPool;
use crate::recurrent::{SequenceState, StatePool, StateStep};
use crate::{Error, KvView, Result};

/// The keys and values of many sequences in one pool of blocks of equal size.
///
/// Each sequence has a table of its blocks. Memory is allocated block by block, so a sequence of any length
/// wastes less than one block. Sequences with a common prefix share its blocks, and a fork shares all
/// blocks and copies the last one when either sequence appends to it. The blocks of a released sequence
/// are kept until their memory is needed, and a later sequence with the same prefix reuses them
/// ([`PagedCacheConfig::enable_prefix_caching`]); the block released first is evicted first. Tokens are
/// compared, not only their hashes, so a sequence never gets the keys of another
/// prefix.
///
/// Keys that depend on more than the preceding tokens (an adapter, other positions) need their own namespace: sequences
/// of different namespaces share no blocks ([`add_in`](PagedCache::add_in)). The cache only compares its tokens, so a
/// placeholder of an image may be any number here that follows from the image, and is shared with the same image alone.
///
/// A step of the model uses a [`PagedBatch`]. The pool is allocated once: keys and values
/// `(num_blocks, kv_heads, block_size, head_dim)` for each layer. On a CPU its pages use memory only once
/// they are written, lowest first. With [`PagedCacheConfig::kv_cache_dtype`] the pool holds codes of 8 bits.
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
    tables: BlockTables,
    /// The blocks of each layer; `None` for a recurrent layer.
    layers: Vec<Option<LayerPool>>,
    states: PagedStates,
}

/// The states of the sequences that have any, in recurrent layers.
#[derive(Debug)]
pub(super) struct PagedStates {
    pub(super) pool: StatePool,
    sequences: HashMap<SequenceId, SequenceState>,
}

impl PagedStates {
    /// Begins a step; `None` without recurrent layers.
    fn begin(&mut self, prepared: &[PreparedSequence]) -> Result<Option<StateStep>> {
        if self.pool.layers() == 0 {
            return Ok(None);
        }
        let with_tokens = || prepared.iter().filter(|new| !new.tokens.is_empty());
        for new in with_tokens() {
            self.sequences.entry(new.id).or_default();
        }
        let sequences = with_tokens().filter_map(|new| {
            let state = self.sequences.get(&new.id)?;
            Some((state, to_i64(new.tokens.len())))
        });
        self.pool.begin(sequences).map(Some)
    }

    /// Commits a step of `begin`.
    pub(super) fn commit(&mut self, step: StateStep, prepared: &[PreparedSequence]) -> Result<()> {
        let with_tokens = prepared.iter().filter(|new| !new.tokens.is_empty());
        let mut states: Vec<_> = with_tokens
            .filter_map(|new| Some((new.id, self.sequences.remove(&new.id)?)))
            .collect();
        let committed = self
            .pool
            .commit(step, states.iter_mut().map(|(_, state)| state));
        self.sequences.extend(states);
        committed
    }

    fn release(&mut self, id: SequenceId) {
        if let Some(state) = self.sequences.remove(&id) {
            self.pool.release(state);
        }
    }
}

impl PagedCache {
    /// Allocates an empty cache.
    ///
    /// # Errors
    /// An [option](overdrive_core::Error::InvalidOption) out of its range
    /// ([`PagedCacheConfig::validate`]); [`Error::Tch`] if memory runs out.
    pub fn new(config: PagedCacheConfig) -> Result<PagedCache> {
        config.validate()?;
        // One block more than the tables use: it belongs to the rows of a captured step without a sequence.
        let (blocks, block_size) = (to_i64(config.num_blocks) + 1, config.block_size);
        let layers = (0..config.layers)
            .map(|layer| match config.is_recurrent(layer) {
                true => Ok(None),
                false => LayerPool::empty(&config, layer, blocks).map(Some),
            })
            .collect::<Result<_>>()?;
        // `validate` has checked that both fit.
        let blocks = BlockId::try_from(config.num_blocks).unwrap_or(BlockId::MAX);
        let block_size = usize::try_from(block_size).unwrap_or(1);
        Ok(PagedCache {
            tables: BlockTables::new(blocks, block_size, config.enable_prefix_caching),
            block_size,
            states: PagedStates {
                pool: StatePool::new(config.recurrent_layers(), config.slack),
                sequences: HashMap::new(),
            },
            config,
            layers,
        })
    }

    /// Adds a sequence and returns its id and the number of its `tokens` that are already in shared blocks.
    /// At least one token is left to compute logits from. Pass the others to [`batch`](PagedCache::batch),
    /// in one step or several. This allocates no blocks; it only adds references to
    /// shared blocks.
    ///
    /// # Errors
    /// None at present.
    pub fn add(&mut self, tokens: &[i64]) -> Result<(SequenceId, usize)> {
        self.add_in(0, tokens)
    }

    /// Adds a sequence as [`add`](PagedCache::add) does, but shares blocks only with sequences of the same
    /// namespace. `add` uses namespace 0.
    ///
    /// # Errors
    /// None at present.
    pub fn add_in(&mut self, namespace: u64, tokens: &[i64]) -> Result<(SequenceId, usize)> {
        Ok(self.tables.add(namespace, tokens))
    }

    /// Returns the number of `tokens` that [`add`](PagedCache::add) would find in shared blocks.
    pub fn cached_tokens(&self, tokens: &[i64]) -> usize {
        self.tables.cached_blocks(0, tokens).len() * self.block_size
    }

    /// Forks a sequence: the copy shares all blocks. If the last one is not full, it is copied when
    /// either of the two appends to it.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn fork(&mut self, id: SequenceId) -> Result<SequenceId> {
        let state = self.states.sequences.get(&id);
        let state = state
            .map(|state| self.states.pool.fork(state))
            .transpose()?;
        let fork = self.tables.fork(id)?;
        if let Some(state) = state {
            self.states.sequences.insert(fork, state);
        }
        Ok(fork)
    }

    /// Drops all but the first `len` tokens of a sequence and frees the blocks of the others. States of recurrent layers
    /// reach any length within the last step of the sequence if that had at most 64 tokens, the length before it, 0, and the
    /// last [`slack`](PagedCacheConfig::slack) tokens.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`], [`Error::TruncateBeyondEnd`], [`Error::StateDropped`]; [`Error::Unsupported`] for a
    /// sequence of a step that was [launched](crate::PagedDecodeStep::launch), until [`land`](PagedCache::land).
    pub fn truncate(&mut self, id: SequenceId, len: usize) -> Result<()> {
        if let Some(state) = self.states.sequences.get_mut(&id) {
            self.states.pool.truncate(state, to_i64(len))?;
        }
        self.tables.truncate(id, len)
    }

    /// Removes a sequence. Later sequences can reuse its full blocks until their memory is needed.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn release(&mut self, id: SequenceId) -> Result<()> {
        self.states.release(id);
        self.tables.release(id)
    }

    /// Removes every sequence; prefixes can still be reused.
    pub fn release_all(&mut self) {
        for (_, state) in self.states.sequences.drain() {
            self.states.pool.release(state);
        }
        self.tables.release_all();
    }

    /// Drops the blocks that no sequence holds, so that later sequences reuse only prefixes of current
    /// sequences. Call it after [`release_all`](PagedCache::release_all) when the weights of the model
    /// change.
    pub fn forget_prefixes(&mut self) {
        self.tables.forget_prefixes();
    }

    /// Sets the difference between the position and the index of each further token of a sequence, such as the
    /// `rope_deltas` of a prompt with images; 0 for a new sequence. Forks have the same offset. Positions below 0 are 0.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn set_position_offset(&mut self, id: SequenceId, offset: i64) -> Result<()> {
        self.tables.set_position_offset(id, offset)
    }

    /// Begins a step: allocates the blocks for the new tokens of some sequences, for all or for none, and
    /// returns the [`KvCache`](crate::KvCache) with which to run the model. The new tokens are concatenated in
    /// the order of `new_tokens`. They take effect when the step is
    /// [committed](PagedBatch::commit).
    ///
    /// # Errors
    /// [`Error::OutOfBlocks`], [`Error::NoSuchSequence`], [`Error::SequenceTwice`], or an error of
    /// libtorch; the cache is then unchanged.
    pub fn batch<'a>(&'a mut self, new_tokens: &[(SequenceId, &[i64])]) -> Result<PagedBatch<'a>> {
        let step = self.step(new_tokens)?;
        let (slots, layout) = step.cache().tables_of(step.prepared())?;
        Ok(PagedBatch::new(step, slots, layout))
    }

    /// Ends the step that was [launched](crate::PagedDecodeStep::launch), if there is one. `token` returns the new
    /// token of each of its sequences, which is added to the sequence. If it returns `None`, or the sequence was
    /// released, the block of the new token is freed.
    pub fn land(&mut self, token: impl FnMut(SequenceId) -> Option<i64>) {
        self.tables.land(token);
    }

    /// Allocates the blocks for new tokens, and copies shared blocks.
    pub(super) fn step<'a>(
        &'a mut self,
        new_tokens: &[(SequenceId, &[i64])],
    ) -> Result<PagedStep<'a>> {
        let prepared = self.tables.prepare(new_tokens)?;
        let states = match self.states.begin(&prepared) {
            Ok(states) => states,
            Err(error) => {
                self.tables.cancel(prepared);
                return Err(error);
            }
        };
        let step = PagedStep::new(self, prepared, states);
        // Copies whole blocks although only their first tokens are filled: one copy per layer is
        // cheaper than two copies of narrowed tensors.
        for (from, to) in step.prepared().iter().filter_map(|new| new.copy) {
            for layer in step.cache().layers.iter().flatten() {
                layer.copy_block(from, to)?;
            }
        }
        Ok(step)
    }

    /// Returns the slot of each new token, and the blocks of all tokens.
    fn tables_of(&self, prepared: &[PreparedSequence]) -> Result<(PagedSlots, PagedLayout)> {
        let mut slots = Vec::new();
        for new in prepared {
            slots.extend((new.past..new.past + new.tokens.len()).map(|position| {
                let block = new.table[position / self.block_size] as usize;
                block * self.block_size + position % self.block_size
            }));
        }
        let device = self.config.device;
        let lengths = |of: fn(&PreparedSequence) -> usize| prepared.iter().map(of).collect();
        let layout = PagedLayout::new(
            prepared.iter().map(|new| new.table.clone()).collect(),
            lengths(|new| new.tokens.len()),
            lengths(|new| new.past + new.tokens.len()),
            self.block_size,
            device,
        )?;
        let slots = PagedSlots::new(slots, self.block_size, device)?;
        Ok((slots, layout))
    }

    /// Returns a dense copy of the tokens of a sequence in a layer, for another attention: keys and
    /// values `(1, H_kv, len, D)` in [`PagedCacheConfig::kind`].
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`], [`Error::NoSuchLayer`].
    pub fn gather(&self, id: SequenceId, layer: usize) -> Result<KvView> {
        let (table, len) = (self.tables.table(id)?, self.tables.len(id)?);
        let pool = self.pool(layer)?;
        let table: Vec<i64> = table.iter().map(|block| i64::from(*block)).collect();
        // `index_select` takes i64 indices on the device of the pool.
        let table = Tensor::f_from_slice(&table)?.f_to_device(self.config.device)?;
        let (len, kind) = (to_i64(len), self.config.kind);
        let keys = pool.keys.gather(&table, len, kind)?;
        Ok(KvView::new(keys, pool.values.gather(&table, len, kind)?))
    }

    /// Returns the number of tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn len(&self, id: SequenceId) -> Result<usize> {
        self.tables.len(id)
    }

    /// Returns `true` if the cache holds no sequences.
    pub fn is_empty(&self) -> bool {
        self.sequences() == 0
    }

    /// Returns the cached tokens of a sequence.
    ///
    /// # Errors
    /// [`Error::NoSuchSequence`].
    pub fn tokens(&self, id: SequenceId) -> Result<&[i64]> {
        self.tables.tokens(id)
    }

    /// Returns the number of sequences.
    pub fn sequences(&self) -> usize {
        self.tables.sequences()
    }

    /// Returns the number of blocks that a step with `new_tokens` of this sequence allocates, including the copy
    /// of a shared block; 0 for a sequence that is not in the cache.
    pub fn blocks_needed(&self, id: SequenceId, new_tokens: usize) -> usize {
        self.tables.blocks_needed(id, new_tokens).unwrap_or(0)
    }

    /// Returns the number of blocks of a sequence of `tokens` tokens that shares none.
    pub fn blocks_for(&self, tokens: usize) -> usize {
        tokens.div_ceil(self.block_size)
    }

    /// Returns the number of blocks that a step can allocate: free and evictable blocks.
    pub fn free_blocks(&self) -> usize {
        self.tables.available()
    }

    /// Returns the number of [`free_blocks`](PagedCache::free_blocks) whose contents later sequences can
    /// still reuse.
    pub fn evictable_blocks(&self) -> usize {
        self.tables.evictable()
    }

    /// Returns the number of blocks that sequences hold; a shared block counts once.
    pub fn used_blocks(&self) -> usize {
        self.num_blocks() - self.free_blocks()
    }

    /// Returns the number of blocks of the pool.
    pub fn num_blocks(&self) -> usize {
        self.tables.blocks()
    }

    /// Returns the number of tokens of a block.
    pub fn block_size(&self) -> usize {
        self.block_size
    }

    /// Returns the number of layers.
    pub fn layers(&self) -> usize {
        self.layers.len()
    }

    /// Returns the configuration of the cache.
    pub fn config(&self) -> &PagedCacheConfig {
        &self.config
    }

    /// Returns the size in bytes of the pool of blocks, and of the states that are allocated.
    pub fn bytes(&self) -> u64 {
        self.num_blocks() as u64 * self.bytes_per_block() + self.states.pool.bytes()
    }

    /// Returns the size of one block in bytes, in all layers together.
    pub fn bytes_per_block(&self) -> u64 {
        self.config.bytes_per_block()
    }

    /// Returns the number of bytes of one token of a full block, in all layers together.
    pub fn bytes_per_token(&self) -> f64 {
        self.bytes_per_block() as f64 / self.block_size as f64
    }

    /// Returns the counters since the creation of the cache.
    pub fn statistics(&self) -> PagedStatistics {
        self.tables.statistics()
    }

    /// Checks that every block is free, evictable or held by as many tables as its reference count says, and
    /// holds the tokens that its sequences and the prefix index assume. It reads every table and is meant for
    /// soak tests.
    ///
    /// # Errors
    /// A description of the first violated invariant, which is a bug in this crate.
    pub fn audit(&self) -> std::result::Result<(), String> {
        self.tables.audit()
    }

    /// Returns the blocks of a layer.
    pub(super) fn pool(&self, layer: usize) -> Result<&LayerPool> {
        match self.layers.get(layer) {
            Some(Some(pool)) => Ok(pool),
            Some(None) => Err(Error::Unsupported {
                cache: "a paged cache",
                what: "hold keys and values of a recurrent layer",
                hint: "create it with the layers of this model",
            }),
            None => Err(Error::NoSuchLayer {
                layer,
                layers: self.layers.len(),
            }),
        }
    }

    /// Returns the blocks of a layer.
    pub(super) fn pool_mut(&mut self, layer: usize) -> Result<&mut LayerPool> {
        // Asked first, because the error borrows the cache as well.
        self.pool(layer)?;
        let pool = self.layers.get_mut(layer).and_then(Option::as_mut);
        pool.ok_or_else(|| {
            overdrive_core::Error::internal("a layer of a paged cache is gone").into()
        })
    }

    pub(super) fn states(&mut self) -> &mut PagedStates {
        &mut self.states
    }

    pub(super) fn block_tables(&mut self) -> &mut BlockTables {
        &mut self.tables
    }

    pub(super) fn device(&self) -> Device {
        self.config.device
    }
}

pub(super) fn to_i64(n: usize) -> i64 {
    i64::try_from(n).unwrap_or(i64::MAX)
}
