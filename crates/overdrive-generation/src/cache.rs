//! The caches by the names of `cache_implementation`.

use overdrive_kv_cache::{
    GrowingCache, KvCache, QuantizedCache, QuantizedCacheConfig, SlidingCache, SlidingCacheConfig,
    StaticCache, StaticCacheConfig,
};
use overdrive_transformer::CausalLm;

use crate::decoder::Need;
use crate::engine::{CacheShape, EngineModel};
use crate::{Error, GenerationConfig, Result};

/// What a model's cache holds for each token.
pub(crate) fn shape(model: &CausalLm) -> Result<CacheShape> {
    model.cache_shape()
}

/// The cache that `config` asks for, one tensor for all rows.
pub(crate) fn of(
    config: &GenerationConfig,
    model: &CausalLm,
    need: Need,
) -> Result<Box<dyn KvCache>> {
    let layers = model.num_layers();
    let (rows, places) = (need.rows as i64, need.places as i64);
    let name = config.cache_implementation.as_deref().unwrap_or("dynamic");
    Ok(match name {
        "static" => {
            let shape = shape(model)?;
            Box::new(StaticCache::new(StaticCacheConfig {
                layers,
                batch: rows,
                max_len: places,
                kv_heads: shape.kv_heads,
                head_dim: shape.head_dim,
                value_dim: None,
                kind: model.kind(),
                device: model.device(),
            })?)
        }
        "sliding_window" => {
            let windows = model.layer_windows();
            if windows.iter().all(Option::is_none) {
                return Err(Error::BadConfig {
                    key: "cache_implementation".to_owned(),
                    found: format!("{name:?}"),
                    expected: "another one, for no layer of this model has a window".to_owned(),
                });
            }
            Box::new(SlidingCache::new(SlidingCacheConfig {
                windows,
                // What a round of speculation may take back.
                slack: config
                    .prompt_lookup_num_tokens
                    .unwrap_or(0)
                    .max(2 * config.num_assistant_tokens) as i64,
                initial_capacity: places,
                ..SlidingCacheConfig::default()
            })?)
        }
        "quantized" | "int8" => Box::new(QuantizedCache::new(QuantizedCacheConfig::int8(layers))?),
        "int4" => Box::new(QuantizedCache::new(QuantizedCacheConfig::int4(layers))?),
        _ => Box::new(GrowingCache::with_capacity(layers, places)),
    })
}
