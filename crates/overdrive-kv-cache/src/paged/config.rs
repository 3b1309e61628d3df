use tch::{Device, Kind};

use crate::{Error, Result};

/// Sizes of a [`PagedCache`](crate::PagedCache).
#[derive(Debug, Clone, PartialEq)]
pub struct PagedCacheConfig {
    /// Layers of the model; default 1.
    pub layers: usize,
    /// Key/value heads of a layer; default 1.
    pub kv_heads: i64,
    /// Channels of a key; default 64.
    pub head_dim: i64,
    /// Channels of a value; default `None`: as a key.
    pub value_head_dim: Option<i64>,
    /// Tokens a block; default 16. A shared prefix is a whole number of blocks; the last block of a
    /// text is half empty on average.
    pub block_size: i64,
    /// Blocks of the pool, all texts together; default 1024. A text of `n` tokens takes
    /// `n / block_size` of them, rounded up.
    pub num_blocks: usize,
    /// Element type; default f32.
    pub kind: Kind,
    /// Where the pool lies; default the CPU.
    pub device: Device,
    /// Whether full blocks of equal texts are shared, and kept for later texts until their memory is
    /// needed; default true.
    pub enable_prefix_caching: bool,
}

impl Default for PagedCacheConfig {
    fn default() -> Self {
        PagedCacheConfig {
            layers: 1,
            kv_heads: 1,
            head_dim: 64,
            value_head_dim: None,
            block_size: 16,
            num_blocks: 1024,
            kind: Kind::Float,
            device: Device::Cpu,
            enable_prefix_caching: true,
        }
    }
}

impl PagedCacheConfig {
    /// Bytes of keys and values of one block, over all layers.
    pub fn bytes_per_block(&self) -> u64 {
        let row = self.head_dim.saturating_add(self.value_dim());
        [self.kv_heads, self.block_size, row]
            .into_iter()
            .map(|size| u64::try_from(size).unwrap_or(0))
            .fold(self.layers as u64, u64::saturating_mul)
            .saturating_mul(self.kind.elt_size_in_bytes() as u64)
    }

    /// The same with as many blocks as `bytes` hold, at least one.
    #[must_use]
    pub fn with_memory(mut self, bytes: u64) -> Self {
        let blocks = bytes / self.bytes_per_block().max(1);
        self.num_blocks = usize::try_from(blocks).unwrap_or(usize::MAX).max(1);
        self
    }

    pub(super) fn value_dim(&self) -> i64 {
        self.value_head_dim.unwrap_or(self.head_dim)
    }

    /// # Errors
    /// [`Error::BadConfig`] for a size that is not positive, more blocks than a `u32` or memory than
    /// an `i64` counts, or an element type that attention does not take.
    pub fn validate(&self) -> Result<()> {
        let bad = |key, found: String, expected| {
            Err(Error::BadConfig {
                key,
                found,
                expected,
            })
        };
        let positive = [
            ("layers", i64::try_from(self.layers).unwrap_or(i64::MAX)),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("value_head_dim", self.value_dim()),
            ("block_size", self.block_size),
        ];
        for (key, value) in positive {
            if value < 1 {
                return bad(key, value.to_string(), "at least 1");
            }
        }
        let blocks = self.num_blocks as u64;
        let bytes = blocks.checked_mul(self.bytes_per_block());
        let countable = bytes.is_some_and(|bytes| i64::try_from(bytes).is_ok());
        if blocks == 0 || u32::try_from(blocks).is_err() || !countable {
            let expected = "at least 1, at most 4294967295, and no more bytes than an i64 counts";
            return bad("num_blocks", blocks.to_string(), expected);
        }
        if !matches!(
            self.kind,
            Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16
        ) {
            let expected = "Float, Double, Half or BFloat16";
            return bad("kind", format!("{:?}", self.kind), expected);
        }
        Ok(())
    }
}
