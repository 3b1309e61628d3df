use std::fmt;
use std::str::FromStr;

use tch::{Device, Kind};

use crate::{
    Error, GrowingCache, KvCache, QuantizedCache, QuantizedCacheConfig, Result, SlidingCache,
    SlidingCacheConfig, StaticCache, StaticCacheConfig,
};

/// A kind of cache by its name, as a flag or a config file gives it (transformers'
/// `cache_implementation`). [`PagedCache`](crate::PagedCache), which serves many texts, is made by itself.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
#[non_exhaustive]
pub enum CacheImplementation {
    /// `dynamic` or `growing`: [`GrowingCache`].
    #[default]
    Growing,
    /// `static`: [`StaticCache`].
    Static,
    /// `sliding_window` or `sliding`: [`SlidingCache`].
    Sliding,
    /// `int8`: [`QuantizedCache`] with 8 bits.
    Int8,
    /// `int4`, or `quantized`, whose bits are four in transformers: [`QuantizedCache`] with 4 bits.
    Int4,
}

/// What a cache is made for.
#[derive(Debug, Clone, PartialEq)]
pub struct CacheShape {
    /// For each layer of the model its window; `None` for a layer that sees everything. Default:
    /// none; there must be one for each layer.
    pub windows: Vec<Option<i64>>,
    /// Rows of a batch, beams and parallel samples included; the static cache takes memory for them.
    /// Default 1.
    pub batch: i64,
    /// Tokens of the longest text, prompt and answer; the static cache takes memory for them, the
    /// growing one avoids copies. Default `None`: unknown.
    pub max_len: Option<i64>,
    /// Key/value heads (for the static cache). Default 1.
    pub kv_heads: i64,
    /// Channels of a head (for the static cache). Default 64.
    pub head_dim: i64,
    /// Element type (for the static cache). Default f32.
    pub kind: Kind,
    /// Where it lies (for the static cache). Default the CPU.
    pub device: Device,
    /// For the sliding cache: the window of layers that have none of their own. Default `None`: they
    /// grow.
    pub window: Option<i64>,
    /// For the sliding cache: first tokens that are kept. Default 0.
    pub sinks: i64,
    /// For the sliding cache: [`SlidingCacheConfig::slack`]. Default 0.
    pub slack: i64,
    /// For the sliding cache: [`SlidingCacheConfig::inverse_frequencies`]. Default none.
    pub inverse_frequencies: Option<Vec<f64>>,
}

impl Default for CacheShape {
    fn default() -> Self {
        CacheShape {
            windows: Vec::new(),
            batch: 1,
            max_len: None,
            kv_heads: 1,
            head_dim: 64,
            kind: Kind::Float,
            device: Device::Cpu,
            window: None,
            sinks: 0,
            slack: 0,
            inverse_frequencies: None,
        }
    }
}

impl CacheImplementation {
    /// All kinds.
    pub const ALL: [CacheImplementation; 5] = [
        CacheImplementation::Growing,
        CacheImplementation::Static,
        CacheImplementation::Sliding,
        CacheImplementation::Int8,
        CacheImplementation::Int4,
    ];

    /// An empty cache of this kind.
    ///
    /// # Errors
    /// When a setting is out of range, the static cache is given no `max_len`, or memory runs out.
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
        let layers = shape.windows.len();
        Ok(match self {
            CacheImplementation::Growing => match shape.max_len {
                Some(tokens) => Box::new(GrowingCache::with_capacity(layers, tokens)),
                None => Box::new(GrowingCache::new(layers)),
            },
            CacheImplementation::Static => Box::new(StaticCache::new(StaticCacheConfig {
                layers,
                batch: shape.batch,
                max_len: shape.max_len.ok_or(Error::BadConfig {
                    key: "max_len",
                    found: "not given".to_owned(),
                    expected: "the tokens of the longest text, for which a static cache takes memory",
                })?,
                kv_heads: shape.kv_heads,
                head_dim: shape.head_dim,
                value_dim: None,
                kind: shape.kind,
                device: shape.device,
            })?),
            CacheImplementation::Sliding => {
                let own = shape.windows.iter();
                Box::new(SlidingCache::new(SlidingCacheConfig {
                    windows: own.map(|window| window.or(shape.window)).collect(),
                    sinks: shape.sinks,
                    slack: shape.slack,
                    inverse_frequencies: shape.inverse_frequencies.clone(),
                    ..SlidingCacheConfig::default()
                })?)
            }
            CacheImplementation::Int8 => {
                Box::new(QuantizedCache::new(QuantizedCacheConfig::int8(layers))?)
            }
            CacheImplementation::Int4 => {
                Box::new(QuantizedCache::new(QuantizedCacheConfig::int4(layers))?)
            }
        })
    }

    /// Its name in transformers, or, for the quantized ones, that of their codes.
    pub fn name(self) -> &'static str {
        match self {
            CacheImplementation::Growing => "dynamic",
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
            "dynamic" | "growing" => CacheImplementation::Growing,
            "static" => CacheImplementation::Static,
            "sliding_window" | "sliding" => CacheImplementation::Sliding,
            "int8" => CacheImplementation::Int8,
            "int4" | "quantized" => CacheImplementation::Int4,
            _ => {
                return Err(Error::UnknownImplementation {
                    name: name.to_owned(),
                    known: "dynamic (growing), static, sliding_window (sliding), int8, int4 (quantized)",
                });
            }
        })
    }
}
