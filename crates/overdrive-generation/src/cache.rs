//! The caches by the names of `cache_implementation`.

use overdrive_kv_cache::CacheImplementation::{self, Int4, Int8, Sliding};
use overdrive_kv_cache::{CacheShape, KvCache, SlidingCache};
use overdrive_transformer::{CausalLm, ModelConfig, RopeScaling};

use crate::decoder::DecoderSize;
use crate::{GenerationConfig, Result};

/// Builds the cache that `config` asks for, with one tensor for all rows; `shape` is that of the model.
pub(crate) fn build(
    config: &GenerationConfig,
    shape: CacheShape,
    size: DecoderSize,
) -> Result<Box<dyn KvCache>> {
    let settings = &config.cache_config;
    let named = match &config.cache_implementation {
        Some(name) => name.parse()?,
        None => CacheImplementation::default(),
    };
    let kind = match (named, settings.nbits) {
        // `nbits` takes precedence over the name.
        (Int8 | Int4, Some(4)) => Int4,
        (Int8 | Int4, Some(_)) => Int8,
        (named, _) => named,
    };
    let has_window = shape.window.is_some() || shape.windows.iter().any(Option::is_some);
    if kind == Sliding && !has_window {
        let expected = "another cache, or be used with a window_length in `cache_config`: no layer of this model has a \
                        window of its own";
        let (key, found) = ("cache_implementation", "\"sliding_window\"");
        return Err(overdrive_core::Error::option(key, found, expected).into());
    }
    Ok(kind.build(&CacheShape {
        batch: size.rows as i64,
        max_len: Some(size.positions as i64),
        // Of a sliding cache, whose shape has it, or of recurrent layers.
        slack: match kind {
            Sliding => shape.slack,
            _ => size.slack as i64,
        },
        group_size: settings.q_group_size,
        residual_length: settings.residual_length,
        ..shape
    })?)
}

/// Returns the shape of a decoder's cache, with the sizes that a sliding cache needs.
pub(crate) fn shape(config: &GenerationConfig, model: &CausalLm) -> CacheShape {
    let settings = &config.cache_config;
    CacheShape {
        window: settings.window_length,
        sinks: settings.num_sink_tokens,
        slack: most_proposed(config) as i64,
        inverse_frequencies: frequencies(model),
        ..model.cache_shape()
    }
}

/// Returns the largest number of positions of a sequence: the model's context, or no limit if the cache
/// guarantees that tokens never attend over a greater distance.
pub(crate) fn context(model: &CausalLm, config: &GenerationConfig) -> usize {
    let context = model.config().max_position_embeddings();
    let span = slides(config)
        .then(|| {
            SlidingCache::new(shape(config, model).sliding())
                .ok()?
                .span()
        })
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

/// Returns the maximum number of proposed tokens with a cache that drops old tokens; the cache keeps this many
/// extra tokens so that it can roll back.
pub(crate) fn most_proposed(config: &GenerationConfig) -> usize {
    let lookup = config.prompt_lookup_num_tokens.unwrap_or(0);
    lookup.max(config.num_assistant_tokens.saturating_mul(2))
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
    // Queries of layers that share keys see the first tokens where the layer of the keys sees them.
    if model.cache_layers() < model.num_layers() {
        return None;
    }
    // A sliding cache rotates keys by halves of a head, starting with the first channel.
    if matches!(model.config(), ModelConfig::Llama(config) if config.rotates_neighbours() || config.mla.is_some())
    {
        return None;
    }
    let first = model.rotary_inverse_frequencies(0)?;
    let same =
        (1..model.num_layers()).all(|layer| model.rotary_inverse_frequencies(layer) == Some(first));
    same.then(|| first.iter().map(|&f| f64::from(f)).collect())
}
