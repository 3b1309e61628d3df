use tch::Tensor;

use crate::attend::attend_to_view;
use crate::buffer::Buffer;
use crate::key_values::{KeyValues, check_truncation};
use crate::saved_state::{SavedState, name_of};
use crate::{AttendOptions, Error, KvCache, KvView, QkvRows, Result};

/// The options of a [`DynamicCache`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct DynamicCacheConfig {
    /// The number of tokens to allocate at the first append. Default 64. Set it to the final length (prompt
    /// and new tokens), if known, to avoid all later copies.
    pub initial_capacity: i64,
}

impl Default for DynamicCacheConfig {
    fn default() -> Self {
        DynamicCacheConfig {
            initial_capacity: 64,
        }
    }
}

/// An unbounded cache whose capacity doubles when it is full (transformers' `DynamicCache`).
///
/// Appending copies the new tokens only; a doubling copies a layer once, so `n` tokens cost fewer than
/// `2n` token copies in total. The capacity, and with it [`bytes`](KvCache::bytes), is at most twice the
/// contents (or the initial capacity).
#[derive(Debug)]
pub struct DynamicCache {
    config: DynamicCacheConfig,
    layers: Vec<Option<Layer>>,
}

#[derive(Debug)]
struct Layer {
    buffer: Buffer,
    len: i64,
}

impl DynamicCache {
    /// Creates an empty cache for a model of `layers` layers; memory is allocated at the first append.
    pub fn new(layers: usize) -> Self {
        DynamicCache::with_config(layers, DynamicCacheConfig::default())
    }

    /// Creates an empty cache that allocates memory for `tokens` tokens at the first append.
    pub fn with_capacity(layers: usize, tokens: i64) -> Self {
        DynamicCache::with_config(
            layers,
            DynamicCacheConfig {
                initial_capacity: tokens,
            },
        )
    }

    /// Creates an empty cache with the options of `config`.
    pub fn with_config(layers: usize, config: DynamicCacheConfig) -> Self {
        DynamicCache {
            config,
            layers: (0..layers).map(|_| None).collect(),
        }
    }

    /// Returns the number of tokens for which memory is allocated; 0 before the first append.
    pub fn capacity(&self) -> i64 {
        let capacities = self
            .layers
            .iter()
            .flatten()
            .map(|held| held.buffer.capacity);
        capacities.min().unwrap_or(0)
    }
}

impl KvCache for DynamicCache {
    fn append(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<KvView> {
        let layers = self.layers.len();
        let slot = self
            .layers
            .get_mut(layer)
            .ok_or(Error::NoSuchLayer { layer, layers })?;
        let new = KeyValues::new(layer, keys, values)?;
        let held = match slot {
            Some(held) => {
                held.buffer.spec.check_fit(layer, &new.spec)?;
                held.reserve(new.tokens)?;
                held
            }
            empty => {
                // At least 1: doubling an empty buffer would never grow it.
                let capacity = new.tokens.max(self.config.initial_capacity).max(1);
                empty.insert(Layer {
                    buffer: Buffer::new(new.spec, capacity)?,
                    len: 0,
                })
            }
        };
        held.buffer.write(held.len, &new, 0, new.tokens)?;
        held.len += new.tokens;
        let (keys, values) = held.buffer.view(0, held.len)?;
        Ok(KvView::new(keys, values))
    }

    fn attend_shared(
        &mut self,
        layer: usize,
        query: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        let Some(Some(held)) = self.layers.get(layer) else {
            return Err(Error::NotKept { layer });
        };
        let (keys, values) = held.buffer.view(0, held.len)?;
        attend_to_view(query, &KvView::new(keys, values), options)
    }

    fn attend_rows(
        &mut self,
        layer: usize,
        new: &QkvRows<'_>,
        options: &AttendOptions<'_>,
        output: &mut [f32],
    ) -> Result<bool> {
        let Some(Some(held)) = self.layers.get_mut(layer) else {
            return Ok(false);
        };
        if !held.buffer.takes_rows(new, options) {
            return Ok(false);
        }
        let tokens = new.tokens().and_then(|tokens| i64::try_from(tokens).ok());
        let tokens = tokens.unwrap_or(0);
        held.reserve(tokens)?;
        held.buffer.attend_rows(held.len, new, options, output)?;
        held.len += tokens;
        Ok(true)
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn len(&self) -> i64 {
        let lens = self
            .layers
            .iter()
            .map(|layer| layer.as_ref().map_or(0, |held| held.len));
        lens.min().unwrap_or(0)
    }

    fn truncate(&mut self, len: i64) -> Result<()> {
        check_truncation(len, self.len())?;
        for held in self.layers.iter_mut().flatten() {
            held.len = len;
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.layers.iter_mut().for_each(|layer| *layer = None);
    }

    fn reorder(&mut self, rows: &Tensor) -> Result<()> {
        // Computes everything before it replaces anything, so that an error leaves the cache unchanged.
        self.layers = self.map(|held| held.buffer.selected(rows, held.len))?;
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn KvCache>> {
        Ok(Box::new(DynamicCache {
            config: self.config.clone(),
            layers: self.map(|held| held.buffer.resized(held.buffer.capacity, held.len))?,
        }))
    }

    fn bytes(&self) -> u64 {
        self.layers
            .iter()
            .flatten()
            .map(|held| held.buffer.bytes())
            .sum()
    }

    fn bytes_per_token(&self) -> f64 {
        let layers = self.layers.iter().flatten();
        layers
            .map(|held| held.buffer.spec.bytes_per_token() as f64)
            .sum()
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        vec![
            // The name in the files that this cache writes; files of earlier versions stay readable.
            ("cache", "growing".to_owned()),
            ("layers", self.layers.len().to_string()),
        ]
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        let mut state = Vec::new();
        for (number, layer) in self.layers.iter().enumerate() {
            if let Some(held) = layer {
                let (keys, values) = held.buffer.view(0, held.len)?;
                state.push((name_of(number, "keys"), keys));
                state.push((name_of(number, "values"), values));
            }
        }
        Ok(state)
    }

    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<()> {
        let mut loaded = DynamicCache::with_config(self.layers.len(), self.config.clone());
        let mut saved = SavedState::new(state);
        for layer in 0..self.layers.len() {
            if let Some([keys, values]) = saved.take_all(layer, ["keys", "values"])? {
                loaded.append(layer, keys, values)?;
            }
        }
        saved.finish()?;
        *self = loaded;
        Ok(())
    }
}

impl DynamicCache {
    /// Returns the layers with their buffers replaced by the results of `to`; the lengths stay the same.
    fn map(&self, to: impl Fn(&Layer) -> Result<Buffer>) -> Result<Vec<Option<Layer>>> {
        let layer = |held: &Layer| -> Result<Layer> {
            Ok(Layer {
                buffer: to(held)?,
                len: held.len,
            })
        };
        let layers = self.layers.iter();
        layers
            .map(|held| held.as_ref().map(layer).transpose())
            .collect()
    }
}

impl Layer {
    /// Grows the buffer until `new` more tokens fit.
    fn reserve(&mut self, new: i64) -> Result<()> {
        let (needed, capacity) = (self.len + new, self.buffer.capacity);
        if needed > capacity {
            // With doubling, the copies of n tokens are a geometric series, below 2n; a step of more tokens
            // than that allocates exactly what it needs.
            self.buffer = self.buffer.resized(needed.max(2 * capacity), self.len)?;
        }
        Ok(())
    }
}
