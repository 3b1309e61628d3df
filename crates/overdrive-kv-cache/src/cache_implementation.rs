use std::fmt;
use std::str::FromStr;

use overdrive_core::check_option;
use tch::{Device, Kind};

use crate::{
    DynamicCache, Error, HybridCache, KvCache, LayerHeads, QuantizedCache, QuantizedCacheConfig,
    Result, SlidingCache, SlidingCacheConfig, StaticCache, StaticCacheConfig,
};

/// A kind of cache by its name in a flag or a config file (transformers' `cache_implementation`).
/// [`PagedCache`](crate::PagedCache), which serves many sequences, is not among them; create it directly.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum CacheImplementation {
    /// `dynamic`, also called `growing`: [`DynamicCache`].
    #[default]
    Dynamic,
    /// `static`: [`StaticCache`].
    Static,
    /// `sliding_window`, also called `sliding`: [`SlidingCache`].
    Sliding,
    /// `int8`: [`QuantizedCache`] with 8 bits.
    Int8,
    /// `int4`, also called `quantized` (4 bits are transformers' default): [`QuantizedCache`] with 4
    /// bits.
    Int4,
}

/// The model and the sequences for which a cache is built.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheShape {
    /// The window of each layer of the model, one entry for each layer; `None` for a layer that sees every
    /// token. Default empty.
    pub windows: Vec<Option<i64>>,
    /// `true` for each layer that has a state of fixed size in place of keys and values: an entry for each layer, or
    /// none. The cache is then a [`HybridCache`]. Default empty.
    pub recurrent: Vec<bool>,
    /// The number of bytes of the states of one sequence in all recurrent layers, from which a budget of memory is
    /// divided ([`PagedCacheConfig::state_bytes`](crate::PagedCacheConfig::state_bytes)). Default 0.
    pub state_bytes: u64,
    /// The number of rows of a batch, including beams and parallel samples, that the static cache
    /// allocates. Default 1.
    pub batch: i64,
    /// The length of the longest sequence, prompt and continuation. The static cache allocates it, and the
    /// dynamic and sliding caches use it to avoid copies. Default `None`: unknown.
    pub max_len: Option<i64>,
    /// The key/value heads (for the static cache). Default 1.
    pub kv_heads: i64,
    /// The channels of a head (for the static cache). Default 64.
    pub head_dim: i64,
    /// The heads of each layer of a model whose layers differ (for the static cache). Default empty: all layers have
    /// `kv_heads` heads of `head_dim` channels.
    pub layer_heads: Vec<LayerHeads>,
    /// The dtype (for the static cache). Default f32.
    pub kind: Kind,
    /// The device (for the static cache). Default the CPU.
    pub device: Device,
    /// The window of layers without a window in `windows` (for the sliding cache). Default `None`: they
    /// keep every token.
    pub window: Option<i64>,
    /// The number of first tokens that are kept as attention sinks (for the sliding cache). Default 0.
    pub sinks: i64,
    /// The number of last tokens that a truncation reaches: [`SlidingCacheConfig::slack`] (for the sliding cache) and
    /// [`HybridCache::with_slack`] (for recurrent layers). Default 0.
    pub slack: i64,
    /// [`SlidingCacheConfig::inverse_frequencies`] (for the sliding cache). Default `None`.
    pub inverse_frequencies: Option<Vec<f64>>,
    /// [`QuantizedCacheConfig::group_size`] (for the quantized caches). Default 64.
    pub group_size: i64,
    /// [`QuantizedCacheConfig::residual_length`] (for the quantized caches). Default 128.
    pub residual_length: i64,
}

impl Default for CacheShape {
    fn default() -> Self {
        let quantized = QuantizedCacheConfig::default();
        CacheShape {
            windows: Vec::new(),
            recurrent: Vec::new(),
            state_bytes: 0,
            batch: 1,
            max_len: None,
            kv_heads: 1,
            head_dim: 64,
            layer_heads: Vec::new(),
            kind: Kind::Float,
            device: Device::Cpu,
            window: None,
            sinks: 0,
            slack: 0,
            inverse_frequencies: None,
            group_size: quantized.group_size,
            residual_length: quantized.residual_length,
        }
    }
}

impl CacheShape {
    /// Returns the options of the sliding cache for this shape.
    pub fn sliding(&self) -> SlidingCacheConfig {
        let (own, default) = (self.windows.iter(), SlidingCacheConfig::default());
        SlidingCacheConfig {
            windows: own.map(|window| window.or(self.window)).collect(),
            sinks: self.sinks,
            slack: self.slack,
            inverse_frequencies: self.inverse_frequencies.clone(),
            initial_capacity: self.max_len.unwrap_or(default.initial_capacity),
        }
    }
}

impl CacheImplementation {
    /// All kinds of cache.
    pub const ALL: [CacheImplementation; 5] = [
        CacheImplementation::Dynamic,
        CacheImplementation::Static,
        CacheImplementation::Sliding,
        CacheImplementation::Int8,
        CacheImplementation::Int4,
    ];

    /// Builds an empty cache of this kind.
    ///
    /// # Errors
    /// If an option is out of range, `max_len` is missing for the static cache, or memory runs out.
    ///
    /// ```
    /// use overdrive_kv_cache::{CacheImplementation, CacheShape, KvCache};
    ///
    /// # fn main() -> overdrive_kv_cache::Result<()> {
    /// let kind: CacheImplementation = "sliding_window".parse()?;
    /// // Every second layer of the model has a window.
    /// let shape = CacheShape { windows: vec![Some(512), None], ..Default::default() };
    /// assert_eq!(kind.build(&shape)?.layers(), 2);
    /// # Ok(())
    /// # }
    /// ```
    pub fn build(self, shape: &CacheShape) -> Result<Box<dyn KvCache>> {
        if shape.recurrent.contains(&true) {
            return self.build_hybrid(shape);
        }
        let layers = shape.windows.len();
        let quantized = |options| -> Result<Box<dyn KvCache>> {
            Ok(Box::new(QuantizedCache::new(QuantizedCacheConfig {
                group_size: shape.group_size,
                residual_length: shape.residual_length,
                ..options
            })?))
        };
        Ok(match self {
            CacheImplementation::Dynamic => match shape.max_len {
                // The final length is known, so one allocation is enough and nothing is copied later.
                Some(tokens) => Box::new(DynamicCache::with_capacity(layers, tokens)),
                None => Box::new(DynamicCache::new(layers)),
            },
            CacheImplementation::Static => Box::new(StaticCache::new(StaticCacheConfig {
                layers,
                batch: shape.batch,
                max_len: shape.max_len.ok_or_else(|| {
                    let expected =
                        "the length of the longest sequence, which a static cache allocates";
                    overdrive_core::Error::option("max_len", "not given", expected)
                })?,
                kv_heads: shape.kv_heads,
                head_dim: shape.head_dim,
                value_dim: None,
                layer_heads: shape.layer_heads.clone(),
                kind: shape.kind,
                device: shape.device,
            })?),
            CacheImplementation::Sliding => Box::new(SlidingCache::new(shape.sliding())?),
            CacheImplementation::Int8 => quantized(QuantizedCacheConfig::int8(layers))?,
            CacheImplementation::Int4 => quantized(QuantizedCacheConfig::int4(layers))?,
        })
    }

    /// Builds a cache with states, and one of this kind for the layers without.
    fn build_hybrid(self, shape: &CacheShape) -> Result<Box<dyn KvCache>> {
        check_option(
            shape.recurrent.len() == shape.windows.len(),
            "recurrent",
            format!("{} entries", shape.recurrent.len()),
            format!(
                "{} entries, one for each layer, as `windows` has",
                shape.windows.len()
            ),
        )?;
        let windows = shape.windows.iter().zip(&shape.recurrent);
        let heads = shape.layer_heads.iter().zip(&shape.recurrent);
        let attending = CacheShape {
            windows: windows
                .filter_map(|(window, recurrent)| (!recurrent).then_some(*window))
                .collect(),
            layer_heads: heads
                .filter_map(|(heads, recurrent)| (!recurrent).then_some(*heads))
                .collect(),
            recurrent: Vec::new(),
            ..shape.clone()
        };
        let attention = self.build(&attending)?;
        let cache = HybridCache::new(attention, &shape.recurrent)?;
        Ok(Box::new(cache.with_slack(shape.slack)))
    }

    /// Returns the name in transformers or, for quantized caches, the name of the stored dtype.
    pub fn name(self) -> &'static str {
        match self {
            CacheImplementation::Dynamic => "dynamic",
            CacheImplementation::Static => "static",
            CacheImplementation::Sliding => "sliding_window",
            CacheImplementation::Int8 => "int8",
            CacheImplementation::Int4 => "int4",
        }
    }
}

impl fmt::Display for CacheImplementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for CacheImplementation {
    type Err = Error;

    fn from_str(name: &str) -> Result<CacheImplementation> {
        Ok(match name {
            "dynamic" | "growing" => CacheImplementation::Dynamic,
            "static" => CacheImplementation::Static,
            "sliding_window" | "sliding" => CacheImplementation::Sliding,
            "int8" => CacheImplementation::Int8,
            "int4" | "quantized" => CacheImplementation::Int4,
            _ => {
                let known = "one of dynamic (growing), static, sliding_window (sliding), int8, \
                             int4 (quantized)";
                let name = format!("{name:?}");
                return Err(
                    overdrive_core::Error::option("cache_implementation", name, known).into(),
                );
            }
        })
    }
}
