//! The flags for the key/value cache.

use anyhow::{Result, bail, ensure};
use clap::{Args, ValueEnum};
use overdrive::generation::GenerationConfig;
use overdrive::transformer::CausalLm;

/// The kind of key/value cache, and the size of a sliding cache.
#[derive(Debug, Clone, Args)]
pub struct CacheFlags {
    /// Kind of key/value cache [default: growing; paged for prompts of different lengths]
    #[arg(long, value_enum)]
    pub cache: Option<Cache>,
    /// Number of tokens in a sliding cache, for a model without its own window
    #[arg(long)]
    pub window: Option<i64>,
    /// Number of initial tokens that a sliding cache also keeps [default: the model's, else 0]; a few of them allow
    /// endless generation
    #[arg(long)]
    pub sinks: Option<i64>,
}

/// The kinds of key/value cache; with `none`, all keys and values are recomputed for each token.
#[derive(Debug, Clone, Copy, ValueEnum)]
#[allow(missing_docs, reason = "the names are those of overdrive-kv-cache")]
pub enum Cache {
    Growing,
    Static,
    Sliding,
    Int8,
    Int4,
    Paged,
    None,
}

impl CacheFlags {
    /// Writes the given flags into `config`.
    ///
    /// # Errors
    /// When a size of a sliding cache is given for another kind of cache.
    pub fn apply(&self, config: &mut GenerationConfig) -> Result<()> {
        if let Some(kind) = self.cache {
            let name = match kind {
                Cache::Growing => Some("dynamic"),
                Cache::Static => Some("static"),
                Cache::Sliding => Some("sliding_window"),
                Cache::Int8 => Some("int8"),
                Cache::Int4 => Some("int4"),
                Cache::Paged => Some("paged"),
                Cache::None => None,
            };
            config.use_cache = name.is_some();
            if let Some(name) = name {
                config.cache_implementation = Some(name.to_owned());
            }
        }
        let slides = slides(config);
        for (flag, size) in [("--window", self.window), ("--sinks", self.sinks)] {
            if let Some(size) = size.filter(|_| !slides) {
                bail!(
                    "`{flag}` is {size}, and the cache is not a sliding one; add `--cache sliding`"
                );
            }
        }
        let cache = &mut config.cache_config;
        cache.window_length = self.window.or(cache.window_length);
        cache.num_sink_tokens = self.sinks.unwrap_or(cache.num_sink_tokens);
        Ok(())
    }

    /// Checks that a sliding cache has a window.
    ///
    /// # Errors
    /// When neither the flags nor a layer of `model` have one.
    pub fn check(config: &GenerationConfig, model: &CausalLm) -> Result<()> {
        let windows = model.cache_shape().windows;
        let has_window =
            config.cache_config.window_length.is_some() || windows.iter().any(Option::is_some);
        ensure!(
            has_window || !slides(config),
            "a sliding cache needs a window, and no layer of this model has one of its own; add `--window N`, or choose \
             another `--cache`"
        );
        Ok(())
    }
}

fn slides(config: &GenerationConfig) -> bool {
    config.use_cache && config.cache_implementation.as_deref() == Some("sliding_window")
}
