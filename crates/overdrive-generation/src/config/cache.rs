use serde::{Deserialize, Serialize};

/// The settings of the cache that `cache_implementation` names (transformers' `cache_config`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CacheConfig {
    /// The bits of a value in a `quantized` cache, 4 or 8. Default `None`: those of the name, and 4 for
    /// `quantized`, as in transformers.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub nbits: Option<u8>,
    /// The number of values that share a scale in a quantized cache. Default 64.
    pub q_group_size: i64,
    /// The number of last tokens that a quantized cache keeps in full precision. Default 128.
    pub residual_length: i64,
    /// The number of tokens that a `sliding_window` cache keeps in layers without a window of their
    /// own. Default `None`: all.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub window_length: Option<i64>,
    /// The number of first tokens that a `sliding_window` cache keeps besides, as attention sinks.
    /// Default 0. With a few of them and a `window_length` within its context, a model with rotary
    /// positions can generate without end (Xiao et al. 2023, arXiv:2309.17453). All prompts of a batch must
    /// then have one length.
    pub num_sink_tokens: i64,
}

impl Default for CacheConfig {
    fn default() -> Self {
        CacheConfig {
            nbits: None,
            q_group_size: 64,
            residual_length: 128,
            window_length: None,
            num_sink_tokens: 0,
        }
    }
}
