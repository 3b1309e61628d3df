use crate::{Error, Result};

/// How an [`Engine`](crate::Engine) shares its model and memory among requests, in vLLM's words.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct EngineConfig {
    /// Texts that are computed at once; more wait. Default 256. A request of `n` samples takes `n`
    /// seats once its prompt is read.
    pub max_num_seqs: usize,
    /// Tokens of one step, over all texts: the most that a long prompt holds up the others. At least
    /// `max_num_seqs`. Default 2048 on a GPU and 512 on a CPU, which take some tenths of a second for
    /// them.
    pub max_num_batched_tokens: Option<usize>,
    /// The most tokens of a prompt and its continuation; default `None`: the model's context.
    pub max_model_len: Option<usize>,
    /// Tokens of one block of the cache; default 16.
    pub block_size: usize,
    /// Blocks of the cache; default `None`: as many as `kv_cache_memory_bytes` holds.
    pub num_blocks: Option<usize>,
    /// Bytes of the cache where `num_blocks` is `None`; default 1 GiB, or fewer where `max_num_seqs`
    /// texts of the full context take less.
    pub kv_cache_memory_bytes: Option<u64>,
    /// Texts that begin alike share the blocks of their beginning; default true.
    pub enable_prefix_caching: bool,
    /// Share of the blocks, in [0, 1), that stays free when a text is admitted beside others, so that
    /// those can grow; default 0.01.
    pub watermark: f64,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            max_num_seqs: 256,
            max_num_batched_tokens: None,
            max_model_len: None,
            block_size: 16,
            num_blocks: None,
            kv_cache_memory_bytes: None,
            enable_prefix_caching: true,
            watermark: 0.01,
        }
    }
}

const DEFAULT_CACHE_BYTES: u64 = 1 << 30;

impl EngineConfig {
    /// Checks every value against its range.
    ///
    /// # Errors
    /// [`Error::BadConfig`] naming the key, its value and the range.
    pub fn validate(&self) -> Result<()> {
        let check = |fits: bool, key: &str, found: &dyn std::fmt::Display, expected: &str| {
            if fits {
                return Ok(());
            }
            Err(Error::BadConfig {
                key: key.to_owned(),
                found: found.to_string(),
                expected: expected.to_owned(),
            })
        };
        let positive = "at least 1";
        let seats = self.max_num_seqs;
        check(seats > 0, "max_num_seqs", &seats, positive)?;
        let tokens = self.max_num_batched_tokens.unwrap_or(seats);
        let expected = "at least max_num_seqs, so that every running text gets its token";
        check(tokens >= seats, "max_num_batched_tokens", &tokens, expected)?;
        let length = self.max_model_len.unwrap_or(1);
        check(length > 0, "max_model_len", &length, positive)?;
        check(
            self.block_size > 0,
            "block_size",
            &self.block_size,
            positive,
        )?;
        let blocks = self.num_blocks.unwrap_or(1);
        check(blocks > 0, "num_blocks", &blocks, positive)?;
        let free = (0.0..1.0).contains(&self.watermark);
        check(free, "watermark", &self.watermark, "at least 0 and under 1")
    }

    /// The token budget of a step on a device.
    pub(super) fn step_tokens(&self, on_cpu: bool) -> usize {
        let default = if on_cpu { 512 } else { 2048 };
        self.max_num_batched_tokens
            .unwrap_or(default.max(self.max_num_seqs))
    }

    /// The number of blocks, where one token takes `token_bytes` and a text has `context` at most.
    pub(super) fn blocks(&self, token_bytes: u64, context: usize) -> Result<usize> {
        if let Some(blocks) = self.num_blocks {
            return Ok(blocks);
        }
        let block_bytes = (token_bytes * self.block_size as u64).max(1);
        let useful = self
            .max_num_seqs
            .saturating_mul(context.div_ceil(self.block_size));
        let blocks = match self.kv_cache_memory_bytes {
            Some(bytes) => bytes / block_bytes,
            None => (DEFAULT_CACHE_BYTES / block_bytes).min(useful as u64),
        };
        if blocks == 0 {
            return Err(Error::BadConfig {
                key: "kv_cache_memory_bytes".to_owned(),
                found: self
                    .kv_cache_memory_bytes
                    .unwrap_or(DEFAULT_CACHE_BYTES)
                    .to_string(),
                expected: format!("at least {block_bytes}, the bytes of one block"),
            });
        }
        Ok(usize::try_from(blocks).unwrap_or(usize::MAX))
    }
}
