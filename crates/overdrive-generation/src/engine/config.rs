use overdrive_core::{check_at_least, check_fraction, check_option};
use overdrive_kv_cache::{KvCacheDtype, PagedCacheConfig};

use crate::Result;

/// The options with which an [`Engine`](crate::Engine) shares its model and memory among requests, named
/// as in vLLM.
#[derive(Debug, Clone, PartialEq)]
pub struct EngineConfig {
    /// The largest number of sequences that are computed at once; more wait. Default 256. A request of
    /// `n` samples counts as `n` sequences once its prompt is read.
    pub max_num_seqs: usize,
    /// The token budget of one step, over all sequences, which limits how long a long prompt delays the
    /// others. At least `max_num_seqs`. Default 2048 on a GPU and 512 on a CPU, which takes some tenths of
    /// a second.
    pub max_num_batched_tokens: Option<usize>,
    /// The largest number of tokens of a prompt and its continuation. At most the model's context and one generated
    /// token, which the model does not read. Default `None`: that, or what the cache holds if that is less.
    pub max_model_len: Option<usize>,
    /// The number of tokens in a block of the cache. Default 16.
    pub block_size: usize,
    /// The number of blocks of the cache. Default `None`: as many as fit into `kv_cache_memory_bytes`.
    pub num_blocks: Option<usize>,
    /// The bytes of the cache if `num_blocks` is `None`. Default 1 GiB; more, up to 4 GiB, if one sequence of
    /// the full context needs it, and less if `max_num_seqs` of them take less. For a model with recurrent layers, at most
    /// half of a given number is for states, and as many sequences are computed at once as have theirs in it, at least one;
    /// by default, states are beside the blocks, for `max_num_seqs` sequences. The cache of a
    /// [draft model](crate::Engine::with_assistant) comes on top.
    pub kv_cache_memory_bytes: Option<u64>,
    /// The storage of keys and values. Default `auto`: in the model's dtype. With `int8` or `fp8` the same memory holds
    /// more tokens, 3.8 times as many as f32 with heads of 64 channels, 1.9 times as many as bf16, at some loss of
    /// accuracy. On a GPU they are dequantized in every layer and step, which takes longer, and steps are not captured.
    pub kv_cache_dtype: KvCacheDtype,
    /// If `true`, sequences with a common prefix share its blocks. Default `true`.
    pub enable_prefix_caching: bool,
    /// The fraction of the blocks, in [0, 1), that stays free when a sequence is admitted beside
    /// others, so that those can grow. Default 0.01.
    pub watermark: f64,
    /// If `true`, every step launches its operations one by one (vLLM's eager mode). Default `false`: on a GPU with the
    /// kernels of overdrive-gpu, steps in which every sequence gets its next token are captured in CUDA graphs and
    /// replayed. There is one graph each for 1, 2, 4, 8, 16, 24, … sequences, captured when the number first occurs (a
    /// tenth of a second). No effect on a CPU.
    pub enforce_eager: bool,
}

impl Default for EngineConfig {
    fn default() -> Self {
        EngineConfig {
            max_num_seqs: 256,
            max_num_batched_tokens: None,
            max_model_len: None,
            block_size: PagedCacheConfig::default().block_size.unsigned_abs() as usize,
            num_blocks: None,
            kv_cache_memory_bytes: None,
            kv_cache_dtype: KvCacheDtype::Auto,
            enable_prefix_caching: true,
            watermark: 0.01,
            enforce_eager: false,
        }
    }
}

// Small enough for a laptop beside the model; a server sets its own number.
const DEFAULT_CACHE_BYTES: u64 = 1 << 30;
// The context of Llama-2-7B in fp32; longer contexts would take more than many machines have.
const LARGEST_DEFAULT_CACHE_BYTES: u64 = 4 << 30;

impl EngineConfig {
    /// Checks every option against its range.
    ///
    /// # Errors
    /// An [option](overdrive_core::Error::InvalidOption) out of its range.
    pub fn validate(&self) -> Result<()> {
        let sequences = self.max_num_seqs;
        check_at_least("max_num_seqs", sequences, 1)?;
        let tokens = self.max_num_batched_tokens.unwrap_or(sequences);
        let expected = "at least max_num_seqs, so that every running sequence gets its token";
        check_option(
            tokens >= sequences,
            "max_num_batched_tokens",
            tokens,
            expected,
        )?;
        check_at_least("max_model_len", self.max_model_len.unwrap_or(1), 1)?;
        check_at_least("block_size", self.block_size, 1)?;
        check_at_least("num_blocks", self.num_blocks.unwrap_or(1), 1)?;
        Ok(check_fraction("watermark", self.watermark)?)
    }

    /// Returns the token budget of a step on a device.
    pub(super) fn step_tokens(&self, on_cpu: bool) -> usize {
        let default = if on_cpu { 512 } else { 2048 };
        self.max_num_batched_tokens
            .unwrap_or(default.max(self.max_num_seqs))
    }

    /// Returns the number of sequences that are computed at once in a cache of these sizes: as many as have states in half
    /// of the memory, at least one.
    pub(super) fn sequences(&self, sizes: &PagedCacheConfig) -> usize {
        let most = self.max_num_seqs;
        match self.kv_cache_memory_bytes {
            Some(bytes) if self.num_blocks.is_none() => {
                let beside_a_block = bytes.saturating_sub(sizes.bytes_per_block());
                let sequences = sizes.sequences_in((bytes / 2).min(beside_a_block));
                sequences.clamp(1, most)
            }
            _ => most,
        }
    }

    /// Returns the number of blocks of a cache of these sizes, beside the states of `sequences`, if a sequence has at most
    /// `context` tokens.
    pub(super) fn blocks(
        &self,
        sizes: &PagedCacheConfig,
        sequences: usize,
        context: usize,
    ) -> Result<usize> {
        if let Some(blocks) = self.num_blocks {
            return Ok(blocks);
        }
        let block_bytes = sizes.bytes_per_block().max(1);
        let states = sizes.bytes_of_states(sequences);
        // More blocks than that could never be used at once.
        let one = context.div_ceil(self.block_size) as u64;
        let useful = one.saturating_mul(self.max_num_seqs as u64);
        let blocks = match self.kv_cache_memory_bytes {
            Some(bytes) => bytes.saturating_sub(states) / block_bytes,
            None => (DEFAULT_CACHE_BYTES / block_bytes)
                .max(one.min(LARGEST_DEFAULT_CACHE_BYTES / block_bytes))
                .min(useful),
        };
        check_option(
            blocks > 0,
            "kv_cache_memory_bytes",
            self.kv_cache_memory_bytes.unwrap_or(DEFAULT_CACHE_BYTES),
            match states {
                0 => format!(
                    "at least {block_bytes}, the bytes of one block (`--cache-mib` in the examples)"
                ),
                _ => format!(
                    "at least {}, the bytes of one block and of the states of a sequence (`--cache-mib` in the \
                     examples)",
                    block_bytes.saturating_add(states)
                ),
            },
        )?;
        Ok(usize::try_from(blocks).unwrap_or(usize::MAX))
    }
}
