//! Caches of quantized keys and values.

mod attend;
mod codec;
mod config;
mod gpu;
mod kernel;
mod layer;
mod store;

use tch::Tensor;

use crate::attend::attend_to_view;
use crate::buffer::Buffer;
use crate::key_values::{KeyValues, Spec, check_truncation};
use crate::saved_state::{SavedState, name_of};
use crate::{AttendOptions, Error, KvCache, KvView, Result};

use attend::{attend_to_codes, fits_kernel};
pub use codec::{QuantizationAxis, QuantizationBits};
pub use config::QuantizedCacheConfig;
use gpu::attend_on_gpu;
use layer::{Layer, Recent};
use store::Store;

/// A cache that quantizes all but the last tokens to 8 or 4 bits.
///
/// A group of values shares a scale and a minimum (asymmetric quantization): keys of one channel over a
/// group of tokens, and values of one token, the best choice according to KIVI (Liu et al. 2024,
/// [arXiv:2402.02750]; transformers' `QuantizedCache`). At least the last `residual_length` tokens stay in
/// full precision, and a step sees its own new tokens in full precision, so a prompt that is processed in
/// one step has exact outputs.
///
/// | from f32, heads of 64 | bytes per token, head and layer | relative size |
/// |---|---|---|
/// | f32 | 512 | 1 |
/// | INT8 | 144 | 1/3.6 |
/// | INT4 | 80 | 1/6.4 |
///
/// On a CPU, [`attend`](KvCache::attend) with few queries reads the codes directly, block by block. With many
/// queries, or on other devices, it dequantizes one layer into memory that all layers share, and so does
/// [`append`](KvCache::append), which returns a view of that memory. On a GPU each step does this: one operator for
/// INT8 or four for INT4 read the codes and write keys, or values, in the dtype of the cache. On Hopper, and elsewhere
/// with `OVERDRIVE_GPU_KERNELS=1`, a kernel of overdrive-gpu reads INT8 codes directly, for up to 16 queries, heads of
/// 64, 128 or 256 channels (f32: 64 or 128) and the default groups and axes.
///
/// # Error bound
///
/// With `s_k` and `s_v` the largest steps (`(max - min) / 255` of a group, or `/ 15`) of keys and
/// values, a score is off by at most `e = scale · ‖q‖₁ · s_k / 2`, a weight by a factor of at most
/// `exp(±2e)`, and so each element of the output by at most
///
/// ```text
/// (exp(2e) - 1) · (max v - min v) / 2  +  s_v / 2
/// ```
///
/// with the extremes of that channel of the values. [`truncate`](KvCache::truncate) into the quantized
/// tokens dequantizes the tokens of a cut block; quantizing them again later adds half a step.
///
/// [arXiv:2402.02750]: https://arxiv.org/abs/2402.02750
///
/// ```
/// use overdrive_kv_cache::{AttendOptions, KvCache, QuantizedCache, QuantizedCacheConfig};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut cache = QuantizedCache::new(QuantizedCacheConfig::int4(1))?;
/// let random = |heads: i64, tokens: i64| Tensor::randn([1, heads, tokens, 64], (Kind::Float, Device::Cpu));
/// for tokens in [1000, 1] {
///     let (query, keys, values) = (random(8, tokens), random(2, tokens), random(2, tokens));
///     let mixed = cache.attend(0, &query, &keys, &values, &AttendOptions::default())?;
///     assert_eq!(mixed.size(), [1, 8, tokens, 64]);
/// }
/// assert_eq!(cache.bytes_per_token(), 2.0 * 80.0);
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct QuantizedCache {
    config: QuantizedCacheConfig,
    layers: Vec<Option<Layer>>,
    /// The dequantized keys and values of one layer.
    dense: Option<[Tensor; 2]>,
    /// The keys and values that each layer attended to in its last step, if other layers share them.
    kept: Vec<Option<KvView>>,
}

impl QuantizedCache {
    /// Creates an empty cache; memory is allocated at the first append.
    ///
    /// # Errors
    /// If an option is out of range.
    pub fn new(config: QuantizedCacheConfig) -> Result<QuantizedCache> {
        config.validate()?;
        Ok(QuantizedCache {
            layers: (0..config.layers).map(|_| None).collect(),
            dense: None,
            kept: (0..config.layers).map(|_| None).collect(),
            config,
        })
    }

    /// Returns the options of the cache.
    pub fn config(&self) -> &QuantizedCacheConfig {
        &self.config
    }

    /// Returns the number of quantized tokens; all others are in full precision.
    pub fn quantized_len(&self) -> i64 {
        let layers = self.layers.iter();
        let coded = layers.map(|layer| layer.as_ref().map_or(0, |held| held.quantized));
        coded.min().unwrap_or(0)
    }

    fn push(&mut self, layer: usize, new: &KeyValues<'_>) -> Result<Recent> {
        let layers = self.layers.len();
        let slot = self
            .layers
            .get_mut(layer)
            .ok_or(Error::NoSuchLayer { layer, layers })?;
        let held = match slot {
            Some(held) => {
                held.spec.check_fit(layer, &new.spec)?;
                held
            }
            empty => empty.insert(self.config.layer(&new.spec, 0)?),
        };
        held.push(new)
    }

    fn forget_kept(&mut self) {
        self.kept.iter_mut().for_each(|view| *view = None);
    }

    /// Returns all tokens of a layer in full precision, in order.
    fn dense(&mut self, layer: usize, recent: &Recent) -> Result<KvView> {
        let Some(held) = &self.layers[layer] else {
            return Ok(KvView::new(
                recent.keys.shallow_clone(),
                recent.values.shallow_clone(),
            ));
        };
        let (coded, spec) = (recent.quantized, &held.spec);
        let count = recent.keys.size()[2];
        let fits = |dense: &[Tensor; 2]| {
            let of = |dense: &Tensor, dim| {
                let size = dense.size();
                size[..2] == [spec.batch, spec.heads]
                    && size[2] >= coded + count
                    && size[3] == dim
                    && (dense.kind(), dense.device()) == (spec.kind, spec.device)
            };
            of(&dense[0], spec.key_dim) && of(&dense[1], spec.value_dim)
        };
        // Layers run one after another, so one buffer serves all of them: a dequantized copy of each
        // would take the memory that quantization saves.
        let dense = match self.dense.take().filter(fits) {
            Some(dense) => dense,
            None => {
                // A quarter more than needed: a growing sequence does not allocate at every step.
                let room = (coded + count) * 5 / 4;
                let empty = |dim| {
                    let size = [spec.batch, spec.heads, room, dim];
                    Tensor::f_empty(size, (spec.kind, spec.device))
                };
                [empty(spec.key_dim)?, empty(spec.value_dim)?]
            }
        };
        let sources = [(&held.keys, &recent.keys), (&held.values, &recent.values)];
        for (dense, (store, recent)) in dense.iter().zip(sources) {
            store.dequantize_into(coded, dense)?;
            dense.f_narrow(2, coded, count)?.f_copy_(recent)?;
        }
        let view = |dense: &Tensor| dense.f_narrow(2, 0, coded + count);
        let view = KvView::new(view(&dense[0])?, view(&dense[1])?);
        self.dense = Some(dense);
        Ok(view)
    }
}

impl QuantizedCacheConfig {
    /// Returns an empty layer with capacity for `capacity` quantized tokens.
    fn layer(&self, spec: &Spec, capacity: i64) -> Result<Layer> {
        let [keys, values] = self.formats(spec)?;
        Ok(Layer {
            spec: *spec,
            keys: Store::new(spec, keys, capacity)?,
            values: Store::new(spec, values, capacity)?,
            quantized: 0,
            tail: Buffer::new(*spec, self.residual_length + self.group_size)?,
            tail_len: 0,
            block: self.group_size,
            residual: self.residual_length,
        })
    }
}

impl KvCache for QuantizedCache {
    fn append(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<KvView> {
        let new = KeyValues::new(layer, keys, values)?;
        let recent = self.push(layer, &new)?;
        match recent.quantized {
            0 => Ok(KvView::new(recent.keys, recent.values)),
            _ => self.dense(layer, &recent),
        }
    }

    fn attend(
        &mut self,
        layer: usize,
        query: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        let new = KeyValues::new(layer, keys, values)?;
        let recent = self.push(layer, &new)?;
        if options.keep {
            let view = match recent.quantized {
                0 => KvView::new(recent.keys, recent.values),
                _ => self.dense(layer, &recent)?,
            };
            // The next layer must not write to its memory.
            self.dense = None;
            self.kept[layer] = Some(view.share());
            return attend_to_view(query, &view, options);
        }
        // Nothing is quantized yet: attention reads the tail, in full precision.
        if recent.quantized == 0 {
            return attend_to_view(query, &KvView::new(recent.keys, recent.values), options);
        }
        // The kernels take the queries to be the last tokens; other shapes take the general path.
        let are_last = query.size().get(2) == Some(&new.tokens);
        if let Some(held) = &self.layers[layer]
            && are_last
            && let Some(output) = attend_on_gpu(query, held, &recent, options)?
        {
            return Ok(output);
        }
        let tokens = recent.quantized + recent.keys.size()[2];
        if let Some(held) = &self.layers[layer]
            && fits_kernel(query, held, options, tokens)
            && are_last
        {
            return attend_to_codes(query, held, &recent, options);
        }
        attend_to_view(query, &self.dense(layer, &recent)?, options)
    }

    fn attend_shared(
        &mut self,
        layer: usize,
        query: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        match self.kept.get(layer) {
            Some(Some(view)) => attend_to_view(query, view, options),
            _ => Err(Error::NotKept { layer }),
        }
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn len(&self) -> i64 {
        let lens = self
            .layers
            .iter()
            .map(|layer| layer.as_ref().map_or(0, Layer::len));
        lens.min().unwrap_or(0)
    }

    fn truncate(&mut self, len: i64) -> Result<()> {
        check_truncation(len, self.len())?;
        for held in self.layers.iter_mut().flatten() {
            held.truncate(len)?;
        }
        self.forget_kept();
        Ok(())
    }

    fn reset(&mut self) {
        self.layers.iter_mut().for_each(|layer| *layer = None);
        self.dense = None;
        self.forget_kept();
    }

    fn reorder(&mut self, rows: &Tensor) -> Result<()> {
        let layers = self.layers.iter();
        let layer = |held: &Layer| held.selected(rows);
        self.layers = layers
            .map(|held| held.as_ref().map(layer).transpose())
            .collect::<Result<_>>()?;
        self.forget_kept();
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn KvCache>> {
        let layers = self.layers.iter();
        let layers = layers.map(|held| held.as_ref().map(Layer::copy).transpose());
        Ok(Box::new(QuantizedCache {
            layers: layers.collect::<Result<_>>()?,
            dense: None,
            kept: self.kept.iter().map(|_| None).collect(),
            config: self.config.clone(),
        }))
    }

    /// Returns the number of bytes of codes, scales, tails and the memory that layers share, including free
    /// capacity.
    fn bytes(&self) -> u64 {
        let layers = self.layers.iter().flatten();
        let held = layers.map(|held| held.keys.bytes() + held.values.bytes() + held.tail.bytes());
        let kept = self.kept.iter().flatten();
        let kept = kept.flat_map(|view| [&view.keys, &view.values]);
        let dense = self.dense.iter().flatten().chain(kept);
        let dense = dense.map(|t| (t.numel() * t.kind().elt_size_in_bytes()) as u64);
        held.sum::<u64>() + dense.sum::<u64>()
    }

    /// Returns the bytes of a quantized token.
    fn bytes_per_token(&self) -> f64 {
        let layers = self.layers.iter().flatten();
        let bytes = |held: &Layer| {
            let row = held.keys.format.bytes_per_row() + held.values.format.bytes_per_row();
            row * held.spec.heads as f64
        };
        layers.map(bytes).sum()
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let config = &self.config;
        vec![
            ("cache", "quantized".to_owned()),
            ("layers", self.layers.len().to_string()),
            ("nbits", config.bits.count().to_string()),
            ("q_group_size", config.group_size.to_string()),
            ("residual_length", config.residual_length.to_string()),
            ("axis_key", format!("{:?}", config.axis_keys)),
            ("axis_value", format!("{:?}", config.axis_values)),
        ]
    }

    /// Returns, for each layer, the codes and scales of keys and values (`key_codes`, `key_scales`, …)
    /// and the tail (`keys`, `values`).
    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        let mut state = Vec::new();
        for (number, layer) in self.layers.iter().enumerate() {
            let Some(held) = layer else { continue };
            let [key_codes, key_lines] = held.keys.filled(held.quantized)?;
            let [value_codes, value_lines] = held.values.filled(held.quantized)?;
            let (keys, values) = held.tail.view(0, held.tail_len)?;
            let tensors = [key_codes, key_lines, value_codes, value_lines, keys, values];
            for (name, tensor) in STATE.iter().zip(tensors) {
                state.push((name_of(number, name), tensor));
            }
        }
        Ok(state)
    }

    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<()> {
        let mut saved = SavedState::new(state);
        let mut layers = Vec::new();
        for number in 0..self.layers.len() {
            let layer = match saved.take_all(number, STATE)? {
                None => None,
                Some(tensors) => Some(self.config.restored(number, tensors)?),
            };
            layers.push(layer);
        }
        saved.finish()?;
        (self.layers, self.dense) = (layers, None);
        self.forget_kept();
        Ok(())
    }
}

/// The names of the tensors of a layer in a saved state.
const STATE: [&str; 6] = [
    "key_codes",
    "key_scales",
    "value_codes",
    "value_scales",
    "keys",
    "values",
];

impl QuantizedCacheConfig {
    fn restored(&self, number: usize, tensors: [&Tensor; 6]) -> Result<Layer> {
        let [key_codes, key_lines, value_codes, value_lines, keys, values] = tensors;
        let tail = KeyValues::new(number, keys, values)?;
        let coded = key_codes.size().get(2).copied().unwrap_or(0);
        let mut layer = self.layer(&tail.spec, coded)?;
        let bad = |name: &str, tensor: &Tensor| Error::BadState {
            name: name_of(number, name),
            found: format!("{:?} of shape {:?}", tensor.kind(), tensor.size()),
        };
        if coded % self.group_size != 0 {
            return Err(bad("key_codes", key_codes));
        }
        if tail.tokens > layer.tail.capacity {
            return Err(bad("keys", keys));
        }
        let targets = [layer.keys.filled(coded)?, layer.values.filled(coded)?];
        let sources = [key_codes, key_lines, value_codes, value_lines];
        for ((mut to, from), name) in targets.into_iter().flatten().zip(sources).zip(STATE) {
            if to.size() != from.size() || to.kind() != from.kind() {
                return Err(bad(name, from));
            }
            to.f_copy_(from)?;
        }
        layer.tail.write(0, &tail, 0, tail.tokens)?;
        (layer.quantized, layer.tail_len) = (coded, tail.tokens);
        Ok(layer)
    }
}
