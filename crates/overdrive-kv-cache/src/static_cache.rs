use overdrive_attention::{DeviceLengths, attention_at_lengths};
use overdrive_core::{check_at_least, check_non_negative};
use tch::{Device, Kind, Tensor};

use crate::attend::attend_to_view;
use crate::buffer::Buffer;
use crate::copy::copy_tokens;
use crate::key_values::{KeyValues, Spec, check_truncation};
use crate::saved_state::{SavedState, name_of};
use crate::{AttendOptions, Error, KvCache, KvView, LayerHeads, Result};

/// The sizes of a [`StaticCache`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StaticCacheConfig {
    /// The layers of the model. Default 1.
    pub layers: usize,
    /// The largest number of rows of a batch. Default 1.
    pub batch: i64,
    /// The largest number of tokens of a row (transformers' `max_cache_len`). Default 2048.
    pub max_len: i64,
    /// The key/value heads of a layer. Default 1.
    pub kv_heads: i64,
    /// The channels of a key. Default 64.
    pub head_dim: i64,
    /// The channels of a value. Default `None`: those of a key.
    pub value_dim: Option<i64>,
    /// The heads of each layer, for a model whose layers differ. Default empty: all layers have `kv_heads` heads of
    /// `head_dim` channels.
    pub layer_heads: Vec<LayerHeads>,
    /// The dtype. Default f32.
    pub kind: Kind,
    /// The device. Default the CPU.
    pub device: Device,
}

impl Default for StaticCacheConfig {
    fn default() -> Self {
        StaticCacheConfig {
            layers: 1,
            batch: 1,
            max_len: 2048,
            kv_heads: 1,
            head_dim: 64,
            value_dim: None,
            layer_heads: Vec::new(),
            kind: Kind::Float,
            device: Device::Cpu,
        }
    }
}

/// A cache at fixed addresses, allocated once for the largest batch and the longest sequence.
///
/// The addresses, shapes and strides of its tensors stay the same for its lifetime, through
/// [`reset`](KvCache::reset), [`truncate`](KvCache::truncate), [`reorder`](KvCache::reorder) and
/// [`load_state`](KvCache::load_state); appending beyond its end fails with [`Error::Full`]. Like
/// transformers' `StaticCache`, it allocates `2 · layers · batch · max_len · kv_heads · head_dim` elements
/// when it is created, so no step waits for memory.
///
/// # Captured steps
///
/// A CUDA graph replays a step with the addresses, shapes and kernel arguments of its capture, so a
/// captured step must not depend on values of the host, such as [`len`](KvCache::len) or the size of a
/// view. [`at`](StaticCache::at) returns a cache that writes at positions given by a tensor on the device,
/// returns its whole length, and hides the tokens after each position with a mask that is computed on the
/// device. Capture one step with it; then, for each token, write the token and its position into the
/// captured tensors, replay, and count the token with [`advance`](StaticCache::advance).
///
/// ```
/// use overdrive_kv_cache::{AttendOptions, KvCache, StaticCache, StaticCacheConfig};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let config = StaticCacheConfig { max_len: 16, kv_heads: 2, head_dim: 8, ..Default::default() };
/// let mut cache = StaticCache::new(config)?;
/// let random = |tokens: i64| Tensor::randn([1, 2, tokens, 8], (Kind::Float, Device::Cpu));
/// cache.append(0, &random(5), &random(5))?; // the prompt
///
/// let mut position = Tensor::from_slice(&[5i64]);
/// let (query, keys, values) = (random(1), random(1), random(1));
/// let captured = cache.at(&position)?.attend(0, &query, &keys, &values, &AttendOptions::default())?;
/// cache.advance(1)?;
/// assert_eq!((captured.size(), cache.len()), (vec![1, 2, 1, 8], 6));
/// position.f_copy_(&Tensor::from_slice(&[6i64]))?; // and the next replay writes token 6
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct StaticCache {
    config: StaticCacheConfig,
    layers: Vec<Layer>,
    /// The number of rows in use; `None` before the first append, which sets it.
    batch: Option<i64>,
    /// The positions `0..max_len`, i64, for masks.
    columns: Tensor,
}

#[derive(Debug)]
struct Layer {
    buffer: Buffer,
    len: i64,
}

impl StaticCache {
    /// Allocates a cache of zeros with the sizes of `config`.
    ///
    /// # Errors
    /// If a size is less than 1, or memory runs out.
    pub fn new(config: StaticCacheConfig) -> Result<StaticCache> {
        config.validate()?;
        let layer = |layer| -> Result<Layer> {
            let buffer = Buffer::new(config.spec(layer), config.max_len)?;
            // Masked columns must hold finite values: the kernel multiplies them by 0, and 0 · NaN is
            // NaN.
            for tensor in [&buffer.keys, &buffer.values] {
                let _same = tensor.shallow_clone().f_zero_()?;
            }
            Ok(Layer { buffer, len: 0 })
        };
        Ok(StaticCache {
            layers: (0..config.layers).map(layer).collect::<Result<_>>()?,
            batch: None,
            columns: Tensor::f_arange(config.max_len, (Kind::Int64, config.device))?,
            config,
        })
    }

    /// Returns the sizes of the cache.
    pub fn config(&self) -> &StaticCacheConfig {
        &self.config
    }

    /// Returns the whole keys and values of `layer`, `(batch, H, max_len, D)`.
    ///
    /// # Errors
    /// If `layer` does not exist.
    pub fn buffers(&self, layer: usize) -> Result<(&Tensor, &Tensor)> {
        let held = self.layer(layer)?;
        Ok((&held.buffer.keys, &held.buffer.values))
    }

    /// Writes the new keys and values of `layer` at `positions` (i64, on the cache's device), `(T,)`
    /// for all rows or `(B, T)` for rows of different lengths, and returns a view of the whole length.
    /// The host reads no element of `positions`, so the step can be captured; [`len`](KvCache::len) does not
    /// change until [`advance`](StaticCache::advance).
    ///
    /// A position outside `0..max_len` is an error on a CPU and undefined on a GPU, as for
    /// `index_copy_`.
    ///
    /// # Errors
    /// If shapes, dtypes or devices do not fit.
    pub fn append_at(
        &mut self,
        layer: usize,
        keys: &Tensor,
        values: &Tensor,
        positions: &Tensor,
    ) -> Result<KvView> {
        let spec = self.layer(layer)?.buffer.spec;
        let new = KeyValues::new(layer, keys, values)?;
        let batch = self.check_rows(layer, &spec, &new)?;
        self.check_positions(positions, batch, new.tokens)?;
        // `append` may process a prompt first; from then on the number of rows is fixed until a
        // reset.
        let held = &self.layers[layer].buffer;
        let rows = |tensor: &Tensor| tensor.f_narrow(0, 0, batch);
        for (to, from) in [(&held.keys, new.keys), (&held.values, new.values)] {
            let mut to = rows(to)?;
            // `index_copy_` and `scatter_` take the positions as a tensor: a CUDA graph replays them
            // with new values.
            let _same = match positions.dim() {
                1 => to.f_index_copy_(2, positions, from)?,
                _ => {
                    let positions = positions.f_view([batch, 1, new.tokens, 1])?;
                    to.f_scatter_(2, &positions.f_expand(from.size(), false)?, from)?
                }
            };
        }
        self.batch = Some(batch);
        self.view(layer, self.config.max_len)
    }

    /// Returns the mask of the whole length for queries at `positions`, bool: `(T, max_len)`, or `(B,
    /// 1, T, max_len)` for positions `(B, T)`. With a `window`, a query sees only the last `window`
    /// tokens.
    ///
    /// # Errors
    /// An error of libtorch.
    pub(crate) fn mask_at(&self, positions: &Tensor, window: Option<i64>) -> Result<Tensor> {
        let positions = match positions.dim() {
            2 => positions.f_unsqueeze(1)?.f_unsqueeze(-1)?,
            _ => positions.f_unsqueeze(-1)?,
        };
        let seen = self.columns.f_le_tensor(&positions)?;
        match window {
            None => Ok(seen),
            Some(window) => {
                let first = positions.f_sub_scalar(window)?;
                Ok(seen.f_logical_and(&self.columns.f_gt_tensor(&first)?)?)
            }
        }
    }

    /// Returns this cache as a [`KvCache`] for one step whose tokens are at `positions`; see
    /// [`append_at`](StaticCache::append_at). The model must be given the same positions for its rotary
    /// embedding.
    ///
    /// # Errors
    /// If `positions` is not i64 `(T,)` or `(B, T)` on the cache's device.
    pub fn at(&mut self, positions: &Tensor) -> Result<StaticStep<'_>> {
        let size = positions.size();
        let (batch, tokens) = match *size.as_slice() {
            [tokens] => (1, tokens),
            [batch, tokens] => (batch, tokens),
            _ => (0, 0),
        };
        self.check_positions(positions, batch, tokens)?;
        Ok(StaticStep {
            positions: positions.shallow_clone(),
            masks: Vec::new(),
            lengths: Vec::new(),
            cache: self,
        })
    }

    /// Adds to the length the `tokens` that [`append_at`](StaticCache::append_at) has written.
    ///
    /// # Errors
    /// If they do not fit.
    pub fn advance(&mut self, tokens: i64) -> Result<()> {
        let held = self.len();
        check_non_negative("tokens", tokens)?;
        self.check_room(held, tokens)?;
        self.layers
            .iter_mut()
            .for_each(|layer| layer.len = held + tokens);
        Ok(())
    }

    fn layer(&self, layer: usize) -> Result<&Layer> {
        let layers = self.layers.len();
        self.layers
            .get(layer)
            .ok_or(Error::NoSuchLayer { layer, layers })
    }

    /// Returns a view of the first `len` tokens of a layer in the rows in use.
    fn view(&self, layer: usize, len: i64) -> Result<KvView> {
        let batch = self.batch.ok_or(Error::NotKept { layer })?;
        let (keys, values) = self.layer(layer)?.buffer.view(0, len)?;
        if batch == self.config.batch {
            return Ok(KvView::new(keys, values));
        }
        let rows = |tensor: Tensor| tensor.f_narrow(0, 0, batch);
        Ok(KvView::new(rows(keys)?, rows(values)?))
    }

    fn check_room(&self, held: i64, new: i64) -> Result<()> {
        // A sum could exceed an `i64`.
        if new > self.config.max_len - held {
            return Err(Error::Full {
                capacity: self.config.max_len,
                held,
                new,
            });
        }
        Ok(())
    }

    /// Returns the number of rows of `new`, after checking that it equals the number in use or, if none are in
    /// use, that it is at most that of the cache.
    fn check_rows(&self, layer: usize, spec: &Spec, new: &KeyValues<'_>) -> Result<i64> {
        let batch = match self.batch {
            Some(batch) => batch,
            None => new.spec.batch.min(spec.batch),
        };
        Spec { batch, ..*spec }.check_fit(layer, &new.spec)?;
        Ok(batch)
    }

    fn check_positions(&self, positions: &Tensor, batch: i64, tokens: i64) -> Result<()> {
        let size = positions.size();
        let fits = size == [tokens] || size == [batch, tokens];
        if !fits || positions.kind() != Kind::Int64 || positions.device() != self.config.device {
            let (kind, device) = (positions.kind(), positions.device());
            let found = format!("{kind:?} of shape {size:?} on {device:?}");
            let expected = "i64 of shape (T,) or (B, T) on the device of the cache";
            return Err(overdrive_core::Error::option("positions", found, expected).into());
        }
        Ok(())
    }
}

impl StaticCacheConfig {
    fn validate(&self) -> Result<()> {
        let value_dim = self.value_dim.unwrap_or(self.head_dim);
        let sizes = [
            ("batch", self.batch),
            ("max_len", self.max_len),
            ("kv_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("value_dim", value_dim),
        ];
        for (option, size) in sizes {
            check_at_least(option, size, 1)?;
        }
        LayerHeads::check(&self.layer_heads, self.layers)
    }

    fn spec(&self, layer: usize) -> Spec {
        let all = LayerHeads {
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
        };
        let heads = LayerHeads::of(&self.layer_heads, all, layer);
        Spec {
            batch: self.batch,
            heads: heads.kv_heads,
            key_dim: heads.head_dim,
            value_dim: self.value_dim.unwrap_or(heads.head_dim),
            kind: self.kind,
            device: self.device,
        }
    }
}

impl KvCache for StaticCache {
    fn append(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<KvView> {
        let held = self.layer(layer)?;
        let (spec, len) = (held.buffer.spec, held.len);
        let new = KeyValues::new(layer, keys, values)?;
        let batch = self.check_rows(layer, &spec, &new)?;
        self.check_room(len, new.tokens)?;
        self.batch = Some(batch);
        let held = &mut self.layers[layer];
        held.buffer.write(len, &new, 0, new.tokens)?;
        held.len += new.tokens;
        let filled = held.len;
        self.view(layer, filled)
    }

    fn attend_shared(
        &mut self,
        layer: usize,
        query: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        let filled = self.layer(layer)?.len;
        attend_to_view(query, &self.view(layer, filled)?, options)
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn len(&self) -> i64 {
        let lens = self.layers.iter().map(|layer| layer.len);
        lens.min().unwrap_or(0)
    }

    fn max_len(&self) -> Option<i64> {
        Some(self.config.max_len)
    }

    fn truncate(&mut self, len: i64) -> Result<()> {
        check_truncation(len, self.len())?;
        self.layers.iter_mut().for_each(|layer| layer.len = len);
        Ok(())
    }

    fn reset(&mut self) {
        self.layers.iter_mut().for_each(|layer| layer.len = 0);
        self.batch = None;
    }

    fn reorder(&mut self, rows: &Tensor) -> Result<()> {
        let Some(held) = self.batch else {
            return Ok(());
        };
        let most = self.config.batch;
        let batch = i64::try_from(rows.numel()).unwrap_or(i64::MAX);
        if batch > most {
            let expected = format!("at most ({most},), the `batch` of the cache");
            return Err(overdrive_core::Error::shape("rows", rows.size(), expected).into());
        }
        // An index out of range fails in the first layer, before anything is written.
        for layer in &self.layers {
            for buffer in [&layer.buffer.keys, &layer.buffer.values] {
                let filled = buffer.f_narrow(2, 0, layer.len)?;
                // `index_select` copies, so a row that another still needs may be overwritten.
                let picked = filled.f_narrow(0, 0, held)?.f_index_select(0, rows)?;
                filled.f_narrow(0, 0, batch)?.f_copy_(&picked)?;
            }
        }
        self.batch = Some(batch);
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn KvCache>> {
        let mut fork = StaticCache::new(self.config.clone())?;
        for (to, from) in fork.layers.iter_mut().zip(&self.layers) {
            let (keys, values) = from.buffer.view(0, from.len)?;
            copy_tokens(&to.buffer.keys, 0, &keys, (0, from.len))?;
            copy_tokens(&to.buffer.values, 0, &values, (0, from.len))?;
            to.len = from.len;
        }
        fork.batch = self.batch;
        Ok(Box::new(fork))
    }

    fn bytes(&self) -> u64 {
        self.layers.iter().map(|layer| layer.buffer.bytes()).sum()
    }

    fn bytes_per_token(&self) -> f64 {
        let layers = self.layers.iter();
        layers
            .map(|layer| layer.buffer.spec.bytes_per_token() as f64)
            .sum()
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        vec![
            ("cache", "static".to_owned()),
            ("layers", self.layers.len().to_string()),
        ]
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        let mut state = Vec::new();
        for (number, layer) in self.layers.iter().enumerate() {
            let (keys, values) = layer.buffer.view(0, layer.len)?;
            for (name, tensor) in [("keys", keys), ("values", values)] {
                let rows = tensor.f_narrow(0, 0, self.batch.unwrap_or(0))?;
                state.push((name_of(number, name), rows));
            }
        }
        Ok(state)
    }

    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<()> {
        let mut saved = SavedState::new(state);
        let mut found = Vec::new();
        // Checks everything before it writes anything, so that an error leaves the cache unchanged.
        for (number, layer) in self.layers.iter().enumerate() {
            let Some([keys, values]) = saved.take_all(number, ["keys", "values"])? else {
                continue;
            };
            let new = KeyValues::new(number, keys, values)?;
            let spec = layer.buffer.spec;
            let batch = new.spec.batch.min(spec.batch);
            Spec { batch, ..spec }.check_fit(number, &new.spec)?;
            self.check_room(0, new.tokens)?;
            found.push((number, new));
        }
        saved.finish()?;
        self.reset();
        for (number, new) in found {
            let layer = &mut self.layers[number];
            layer.buffer.write(0, &new, 0, new.tokens)?;
            layer.len = new.tokens;
            // A cache that no batch has used is saved with no rows.
            self.batch = Some(new.spec.batch).filter(|rows| *rows > 0);
        }
        Ok(())
    }
}

/// A [`StaticCache`] for one step at the positions of a tensor; see [`StaticCache::at`].
///
/// [`attend`](KvCache::attend) reads the whole length under a mask; a mask of the caller must have `max_len`
/// columns. On CUDA, a single token per row reads only the filled part, without a mask, in half precision; the
/// kernels of overdrive-gpu also do so in f32 and with a softcap. [`len`](KvCache::len) is the length of the cache
/// before the step.
#[derive(Debug)]
pub struct StaticStep<'a> {
    cache: &'a mut StaticCache,
    positions: Tensor,
    /// The mask of each window; most models have one or two windows.
    masks: Vec<(Option<i64>, Tensor)>,
    /// The number of tokens of each row, for a kernel that takes it in place of a mask, by the number of key/value heads.
    lengths: Vec<(i64, DeviceLengths)>,
}

impl StaticStep<'_> {
    /// Returns the attention of one new token per row with a kernel that reads only the filled tokens; `None` if no
    /// kernel supports this device and these options.
    fn attend_at_lengths(
        &mut self,
        query: &Tensor,
        view: &KvView,
        options: &AttendOptions<'_>,
    ) -> Result<Option<Tensor>> {
        // There is no such kernel for a CPU, except in tests.
        let has_none =
            query.device() == Device::Cpu && overdrive_gpu::kernels(Device::Cpu)?.is_none();
        // The kernel supports one new token per row: the positions of several tokens need not be consecutive.
        if has_none || query.size().get(2) != Some(&1) {
            return Ok(None);
        }
        let (rows, heads) = (view.keys.size()[0], view.keys.size()[1]);
        let known = self.lengths.iter().position(|(of, _)| *of == heads);
        let index = match known {
            Some(index) => index,
            None => {
                let positions = self.positions.f_reshape([-1])?.f_expand([rows], false)?;
                let lengths = DeviceLengths::new(&positions.f_add_scalar(1)?, &view.keys)?;
                self.lengths.push((heads, lengths));
                self.lengths.len() - 1
            }
        };
        let (keys, values) = (&view.keys, &view.values);
        let lengths = &self.lengths[index].1;
        let output = attention_at_lengths(query, keys, values, lengths, &options.causal())?;
        Ok(output.map(|(output, _)| output))
    }

    /// Returns the attention over the whole length under a mask of the positions, or over the filled tokens if a kernel
    /// reads only those.
    fn attend_at_positions(
        &mut self,
        query: &Tensor,
        view: &KvView,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        if options.mask.is_some() {
            return attend_to_view(query, view, options);
        }
        if let Some(output) = self.attend_at_lengths(query, view, options)? {
            return Ok(output);
        }
        // Layers with the same window share its mask, which takes three kernels to compute.
        let known = self
            .masks
            .iter()
            .position(|(window, _)| *window == options.window);
        let index = match known {
            Some(index) => index,
            None => {
                let mask = self.cache.mask_at(&self.positions, options.window)?;
                self.masks.push((options.window, mask));
                self.masks.len() - 1
            }
        };
        let options = AttendOptions {
            mask: Some(&self.masks[index].1),
            ..*options
        };
        attend_to_view(query, view, &options)
    }
}

impl KvCache for StaticStep<'_> {
    fn append(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<KvView> {
        self.cache.append_at(layer, keys, values, &self.positions)
    }

    fn attend(
        &mut self,
        layer: usize,
        query: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        let view = self.append(layer, keys, values)?;
        self.attend_at_positions(query, &view, options)
    }

    fn attend_shared(
        &mut self,
        layer: usize,
        query: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        let view = self.cache.view(layer, self.cache.config.max_len)?;
        self.attend_at_positions(query, &view, options)
    }

    fn layers(&self) -> usize {
        self.cache.layers()
    }

    fn len(&self) -> i64 {
        self.cache.len()
    }

    fn max_len(&self) -> Option<i64> {
        self.cache.max_len()
    }

    fn truncate(&mut self, len: i64) -> Result<()> {
        self.cache.truncate(len)
    }

    fn reset(&mut self) {
        self.cache.reset();
    }

    fn reorder(&mut self, rows: &Tensor) -> Result<()> {
        self.cache.reorder(rows)
    }

    fn fork(&self) -> Result<Box<dyn KvCache>> {
        self.cache.fork()
    }

    fn bytes(&self) -> u64 {
        self.cache.bytes()
    }

    fn bytes_per_token(&self) -> f64 {
        self.cache.bytes_per_token()
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        self.cache.settings()
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        self.cache.state()
    }

    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<()> {
        self.cache.load_state(state)
    }
}
