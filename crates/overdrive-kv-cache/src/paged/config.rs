use overdrive_core::{check_at_least, check_option};
use tch::{Device, Kind};

use crate::recurrent::StatePool;
use crate::{CacheShape, KvCacheDtype, LayerHeads, Result};

/// The sizes of a [`PagedCache`](crate::PagedCache).
#[derive(Debug, Clone, PartialEq)]
pub struct PagedCacheConfig {
    /// The layers of the model. Default 1.
    pub layers: usize,
    /// `true` for each layer that has a state of fixed size for a sequence in place of keys and values: an entry for each
    /// layer, or none. States are allocated as sequences need them, three for each. Default empty.
    pub recurrent: Vec<bool>,
    /// The number of bytes of the states of one sequence in all recurrent layers, for
    /// [`bytes_of_states`](PagedCacheConfig::bytes_of_states). Default 0.
    pub state_bytes: u64,
    /// The number of last tokens of a sequence that a truncation reaches in recurrent layers, over several steps. Default 0:
    /// those of the last step, if it had at most 64.
    pub slack: i64,
    /// The key/value heads of a layer. Default 1.
    pub kv_heads: i64,
    /// The channels of a key. Default 64.
    pub head_dim: i64,
    /// The channels of a value. Default `None`: those of a key.
    pub value_head_dim: Option<i64>,
    /// The heads of each layer, for a model whose layers differ. Default empty: all layers have `kv_heads` heads of
    /// `head_dim` channels.
    pub layer_heads: Vec<LayerHeads>,
    /// The number of tokens in a block. Default 16. A shared prefix is a whole number of blocks; the last block
    /// of a sequence is half empty on average.
    pub block_size: i64,
    /// The number of blocks in the pool, for all sequences together. Default 1024. A sequence of `n` tokens takes
    /// `n / block_size` blocks, rounded up.
    pub num_blocks: usize,
    /// The dtype of keys and values. Default f32.
    pub kind: Kind,
    /// The form in which they are stored. Default [`KvCacheDtype::Auto`]: as they are.
    pub kv_cache_dtype: KvCacheDtype,
    /// The device of the pool. Default the CPU.
    pub device: Device,
    /// If `true`, sequences share the full blocks of equal prefixes, and the blocks of released
    /// sequences are kept for later ones until their memory is needed. Default `true`.
    pub enable_prefix_caching: bool,
}

impl Default for PagedCacheConfig {
    fn default() -> Self {
        PagedCacheConfig {
            layers: 1,
            recurrent: Vec::new(),
            state_bytes: 0,
            slack: 0,
            kv_heads: 1,
            head_dim: 64,
            value_head_dim: None,
            layer_heads: Vec::new(),
            block_size: 16,
            num_blocks: 1024,
            kind: Kind::Float,
            kv_cache_dtype: KvCacheDtype::Auto,
            device: Device::Cpu,
            enable_prefix_caching: true,
        }
    }
}

impl PagedCacheConfig {
    /// Returns the configuration for a model with caches of this shape, with the default blocks. Prefixes are shared unless
    /// the model has recurrent layers.
    pub fn of(shape: &CacheShape) -> PagedCacheConfig {
        let is_recurrent = shape.recurrent.contains(&true);
        PagedCacheConfig {
            layers: shape.windows.len(),
            recurrent: if is_recurrent {
                shape.recurrent.clone()
            } else {
                Vec::new()
            },
            state_bytes: shape.state_bytes,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            layer_heads: shape.layer_heads.clone(),
            kind: shape.kind,
            device: shape.device,
            enable_prefix_caching: !is_recurrent,
            slack: shape.slack,
            ..PagedCacheConfig::default()
        }
    }

    /// Returns the number of bytes of the keys and values of one block, in all layers together.
    pub fn bytes_per_block(&self) -> u64 {
        let of_layer = |layer| {
            let heads = self.heads(layer);
            let of_row = heads.head_dim.saturating_add(self.value_dim(layer));
            let bytes_of_row = match self.kv_cache_dtype {
                KvCacheDtype::Auto => of_row.saturating_mul(self.kind.elt_size_in_bytes() as i64),
                // A byte for each element, and the scales of a key and a value in f32.
                KvCacheDtype::Int8 | KvCacheDtype::Fp8 => of_row.saturating_add(8),
            };
            [heads.kv_heads, self.block_size, bytes_of_row]
                .into_iter()
                .map(|size| u64::try_from(size).unwrap_or(0))
                .fold(1, u64::saturating_mul)
        };
        let attending = (0..self.layers).filter(|layer| !self.is_recurrent(*layer));
        attending.map(of_layer).fold(0, u64::saturating_add)
    }

    /// Returns the largest number of bytes that the states of so many sequences take, in all recurrent layers together:
    /// three for each, for the step that is computed and for truncations, rounded up to a power of two.
    pub fn bytes_of_states(&self, sequences: usize) -> u64 {
        StatePool::slots_of(sequences as u64).saturating_mul(self.state_bytes)
    }

    /// Returns the largest number of sequences whose states take at most `bytes`; any number has none in a model without
    /// recurrent layers.
    pub fn sequences_in(&self, bytes: u64) -> usize {
        match bytes.checked_div(self.state_bytes) {
            None => usize::MAX,
            Some(slots) => StatePool::sequences_of(slots),
        }
    }

    /// Returns the number of layers with keys and values.
    fn attending_layers(&self) -> usize {
        self.layers.saturating_sub(self.recurrent_layers())
    }

    /// Returns the number of layers with states.
    pub(super) fn recurrent_layers(&self) -> usize {
        self.recurrent
            .iter()
            .filter(|recurrent| **recurrent)
            .count()
    }

    /// Returns `true` if layer `layer` has a state.
    pub(super) fn is_recurrent(&self, layer: usize) -> bool {
        self.recurrent.get(layer).copied().unwrap_or(false)
    }

    /// Returns this configuration with the number of blocks that fit into `bytes`, at least one.
    #[must_use]
    pub fn with_memory(mut self, bytes: u64) -> Self {
        let blocks = bytes / self.bytes_per_block().max(1);
        self.num_blocks = usize::try_from(blocks).unwrap_or(usize::MAX).max(1);
        self
    }

    /// Returns the heads of a layer.
    pub(super) fn heads(&self, layer: usize) -> LayerHeads {
        let all = LayerHeads {
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
        };
        LayerHeads::of(&self.layer_heads, all, layer)
    }

    /// Returns the channels of a value in a layer.
    pub(super) fn value_dim(&self, layer: usize) -> i64 {
        self.value_head_dim.unwrap_or(self.heads(layer).head_dim)
    }

    /// Checks every option against its range.
    ///
    /// # Errors
    /// An [option](overdrive_core::Error::InvalidOption): a size that is not positive, more blocks than
    /// a `u32` or bytes than an `i64` can count, or a dtype that attention does not support.
    pub fn validate(&self) -> Result<()> {
        check_at_least("layers", self.layers, 1)?;
        check_option(
            self.recurrent.is_empty() || self.recurrent.len() == self.layers,
            "recurrent",
            format!("{} entries", self.recurrent.len()),
            format!("empty, or {} entries, one for each layer", self.layers),
        )?;
        check_option(
            self.recurrent_layers() == 0 || self.attending_layers() > 0,
            "recurrent",
            "true for all layers",
            "false for one layer at least, whose keys and values the blocks hold",
        )?;
        check_option(
            self.recurrent_layers() == 0 || !self.enable_prefix_caching,
            "enable_prefix_caching",
            true,
            "false with recurrent layers: a block does not hold the states after its tokens",
        )?;
        overdrive_core::check_non_negative("slack", self.slack)?;
        let positive = [
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("value_head_dim", self.value_head_dim.unwrap_or(1)),
            ("block_size", self.block_size),
        ];
        for (option, value) in positive {
            check_at_least(option, value, 1)?;
        }
        LayerHeads::check(&self.layer_heads, self.layers)?;
        let blocks = self.num_blocks as u64;
        let bytes = blocks.checked_mul(self.bytes_per_block());
        let countable = bytes.is_some_and(|bytes| i64::try_from(bytes).is_ok());
        // Block numbers are u32, and libtorch counts bytes in i64.
        let valid = blocks > 0 && u32::try_from(blocks).is_ok() && countable;
        let expected = "from 1 to 4294967295, with a pool size in bytes that fits an i64";
        check_option(valid, "num_blocks", blocks, expected)?;
        let valid = matches!(
            self.kind,
            Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16
        );
        let kind = format!("{:?}", self.kind);
        check_option(valid, "kind", &kind, "Float, Double, Half or BFloat16")?;
        let valid = self.kv_cache_dtype == KvCacheDtype::Auto || self.kind != Kind::Double;
        let expected = "Float, Half or BFloat16 if kv_cache_dtype is int8 or fp8";
        Ok(check_option(valid, "kind", kind, expected)?)
    }
}
