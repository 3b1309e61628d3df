//! The caches by the names of `cache_implementation`.

use overdrive_kv_cache::{
    DynamicCache, KvCache, QuantizedCache, QuantizedCacheConfig, SlidingCache, SlidingCacheConfig,
    StaticCache, StaticCacheConfig,
};
use overdrive_transformer::{CausalLm, ModelConfig, RopeScaling};

use crate::decoder::DecoderSize;
use crate::engine::{CacheShape, EngineModel};
use crate::{GenerationConfig, Result};

/// Builds the cache that `config` asks for, with one tensor for all rows.
pub(crate) fn build(
    config: &GenerationConfig,
    model: &CausalLm,
    size: DecoderSize,
) -> Result<Box<dyn KvCache>> {
    if config.cache_implementation.as_deref() != Some("sliding_window") {
        return plain(config, &model.cache_shape()?, size);
    }
    let sliding = sliding(config, model);
    if sliding.windows.iter().all(Option::is_none) {
        let expected = "another cache, or have a `cache_config` with a window_length: no layer of this model has a \
                        window of its own";
        let (key, found) = ("cache_implementation", "\"sliding_window\"");
        return Err(overdrive_core::Error::option(key, found, expected).into());
    }
    Ok(Box::new(SlidingCache::new(SlidingCacheConfig {
        initial_capacity: size.positions as i64,
        ..sliding
    })?))
}

/// Builds a cache that keeps all tokens.
pub(crate) fn plain(
    config: &GenerationConfig,
    shape: &CacheShape,
    size: DecoderSize,
) -> Result<Box<dyn KvCache>> {
    let layers = shape.layers;
    let (rows, positions) = (size.rows as i64, size.positions as i64);
    let name = config.cache_implementation.as_deref().unwrap_or("dynamic");
    Ok(match name {
        "static" => Box::new(StaticCache::new(StaticCacheConfig {
            layers,
            batch: rows,
            max_len: positions,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            value_dim: None,
            kind: shape.kind,
            device: shape.device,
        })?),
        "quantized" | "int8" | "int4" => {
            let four = config
                .cache_config
                .nbits
                .map_or(name != "int8", |bits| bits == 4);
            let bits = if four {
                QuantizedCacheConfig::int4(layers)
            } else {
                QuantizedCacheConfig::int8(layers)
            };
            Box::new(QuantizedCache::new(QuantizedCacheConfig {
                group_size: config.cache_config.q_group_size,
                residual_length: config.cache_config.residual_length,
                ..bits
            })?)
        }
        _ => Box::new(DynamicCache::with_capacity(layers, positions)),
    })
}

/// Returns the largest number of positions of a sequence: the model's context, or no limit if the cache
/// guarantees that no two tokens which see each other are further apart.
pub(crate) fn context(model: &CausalLm, config: &GenerationConfig) -> usize {
    let context = model.config().max_position_embeddings();
    let span = slides(config)
        .then(|| SlidingCache::new(sliding(config, model)).ok()?.span())
        .flatten();
    match span {
        // Half of the largest number: lengths are added to it.
        Some(span) if span <= context => usize::MAX >> 1,
        _ => context.unsigned_abs() as usize,
    }
}

/// Returns `true` if the cache drops old tokens.
pub(crate) fn slides(config: &GenerationConfig) -> bool {
    config.use_cache && config.cache_implementation.as_deref() == Some("sliding_window")
}

/// Returns the largest number of tokens of a proposal over a cache that drops old tokens: it keeps so many more to be able to
/// take them back.
pub(crate) fn most_proposed(config: &GenerationConfig) -> usize {
    let lookup = config.prompt_lookup_num_tokens.unwrap_or(0);
    lookup.max(config.num_assistant_tokens.saturating_mul(2))
}

fn sliding(config: &GenerationConfig, model: &CausalLm) -> SlidingCacheConfig {
    let settings = &config.cache_config;
    let windows = model.layer_windows();
    SlidingCacheConfig {
        windows: windows
            .into_iter()
            .map(|window| window.or(settings.window_length))
            .collect(),
        sinks: settings.num_sink_tokens,
        slack: most_proposed(config) as i64,
        inverse_frequencies: frequencies(model),
        ..SlidingCacheConfig::default()
    }
}

/// Returns the rotary frequencies, if all layers share them and they do not change with the length.
fn frequencies(model: &CausalLm) -> Option<Vec<f64>> {
    if let ModelConfig::Llama(config) = model.config()
        && matches!(
            config.rope_scaling,
            RopeScaling::Dynamic { .. } | RopeScaling::LongRope(_)
        )
    {
        return None;
    }
    let first = model.rotary_inverse_frequencies(0)?;
    let same =
        (1..model.num_layers()).all(|layer| model.rotary_inverse_frequencies(layer) == Some(first));
    same.then(|| first.iter().map(|&f| f64::from(f)).collect())
}
