//! Caches with a sliding window.

mod config;
mod ring;
mod rotation;

use overdrive_attention::{AttentionOptions, Layout, Window, attention_with_lse, merge};
use tch::{Kind, Tensor};

use crate::attend::attend_to_view;
use crate::buffer::copied;
use crate::key_values::{KeyValues, check_truncation};
use crate::saved_state::{SavedState, integers, name_of};
use crate::{AttendOptions, Error, KvCache, KvView, Result};

pub use config::SlidingCacheConfig;
use ring::{Limits, Ring};
use rotation::{Rotation, rotate};

/// A cache that keeps the last tokens of a sequence of any length, and its first tokens as attention
/// sinks.
///
/// A layer with a window of `w` keeps `sinks + w + slack` tokens in a ring buffer, however long the sequence
/// is (StreamingLLM: Xiao et al. 2023, [arXiv:2309.17453]); a layer without a window grows, as in a
/// [`DynamicCache`](crate::DynamicCache). With the model's own windows (Mistral, Gemma, Qwen) and no sinks,
/// only the memory changes, not the result.
///
/// [`attend`](KvCache::attend) with one token copies that token only: the result of a single query does not
/// depend on the order of the keys, so it reads the ring in slot order. [`append`](KvCache::append) returns
/// a view in token order, so it copies the ring at every step once the ring has wrapped around, and so does
/// `attend` with several tokens.
///
/// # Sinks under rotary positions
///
/// The distance of plain sinks from the query grows without bound. StreamingLLM numbers the tokens in the
/// cache instead of in the sequence, so that no distance exceeds the cache. Since rotary embeddings depend
/// only on distances, this cache gets the same effect by rotating a few keys: if
/// [`SlidingCacheConfig::inverse_frequencies`] is given, it rotates the sinks forward by the number of
/// dropped tokens. [`span`](KvCache::span) is then the sinks and the window.
///
/// # Truncation
///
/// [`truncate`](KvCache::truncate) can always remove up to `slack + 1` tokens, any number if nothing has been
/// dropped, and everything but (part of) the sinks; otherwise it fails with [`Error::AlreadyDropped`]. A
/// step of more than `slack + 1` tokens that fails halfway can therefore not be undone in general; use
/// [`reset`](KvCache::reset) then.
///
/// ```
/// use overdrive_kv_cache::{AttendOptions, KvCache, SlidingCache, SlidingCacheConfig};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let mut cache = SlidingCache::new(SlidingCacheConfig {
///     windows: vec![Some(8)],
///     sinks: 2,
///     ..Default::default()
/// })?;
/// for _ in 0..100 {
///     let token = Tensor::randn([1, 2, 1, 4], (Kind::Float, Device::Cpu));
///     cache.attend(0, &token, &token, &token, &AttendOptions::default())?;
/// }
/// assert_eq!(cache.len(), 100);
/// assert_eq!(cache.bytes(), 2 * (2 + 8) * 2 * 4 * 4); // keys and values of ten tokens
/// # Ok(())
/// # }
/// ```
///
/// [arXiv:2309.17453]: https://arxiv.org/abs/2309.17453
#[derive(Debug)]
pub struct SlidingCache {
    config: SlidingCacheConfig,
    layers: Vec<Option<Ring>>,
    /// The keys and values that each layer attended to in its last step, if other layers share them.
    kept: Vec<Option<KvView>>,
    /// The last rotation of sink keys; layers with the same window share it.
    key_rotation: Option<Rotation>,
    /// The last rotations of queries, with the past length, number of tokens and window that they are for.
    query_rotation: Option<((i64, i64, i64), Rotation)>,
}

impl SlidingCache {
    /// Creates an empty cache; memory is allocated at the first append.
    ///
    /// # Errors
    /// If an option is out of range.
    pub fn new(config: SlidingCacheConfig) -> Result<SlidingCache> {
        config.validate()?;
        Ok(SlidingCache {
            layers: config.windows.iter().map(|_| None).collect(),
            kept: config.windows.iter().map(|_| None).collect(),
            key_rotation: None,
            query_rotation: None,
            config,
        })
    }

    /// Returns the options of the cache.
    pub fn config(&self) -> &SlidingCacheConfig {
        &self.config
    }

    /// Returns the ring of a layer, which is created for `new` if there is none yet.
    fn ring(&mut self, layer: usize, new: &KeyValues<'_>) -> Result<&mut Ring> {
        let limits = self.limits(layer);
        match &mut self.layers[layer] {
            Some(ring) => {
                ring.buffer.spec.check_fit(layer, &new.spec)?;
                Ok(ring)
            }
            empty => {
                let capacity = new.tokens.max(self.config.initial_capacity);
                Ok(empty.insert(Ring::new(new.spec, limits, capacity)?))
            }
        }
    }

    fn limits(&self, layer: usize) -> Limits {
        Limits {
            window: self.config.windows[layer],
            sinks: self.config.sinks,
            slack: self.config.slack,
        }
    }

    fn check_layer(&self, layer: usize) -> Result<()> {
        let layers = self.layers.len();
        if layer >= layers {
            return Err(Error::NoSuchLayer { layer, layers });
        }
        Ok(())
    }

    /// Returns the number of tokens by which the sinks must be rotated for each of the queries at
    /// `from..to`; `None` if no rotation is needed.
    fn sink_rotations(&self, layer: usize, from: i64, to: i64) -> Option<Vec<i64>> {
        let limits = self.limits(layer);
        let dropped = |position| limits.first_seen(position) - limits.sinks;
        let rotates = self.config.inverse_frequencies.is_some() && limits.sinks > 0;
        (rotates && dropped(to - 1) > 0).then(|| (from..to).map(dropped).collect())
    }

    /// Rotates the sink keys of a layer for the query at `position`.
    fn rotate_sinks(&mut self, layer: usize, position: i64) -> Result<()> {
        let rotation = self.sink_rotations(layer, position, position + 1);
        let Some(ring) = &mut self.layers[layer] else {
            return Ok(());
        };
        let (Some(tokens), Some(frequencies)) = (rotation, &self.config.inverse_frequencies) else {
            return ring.restore_sinks();
        };
        let known = self.key_rotation.take();
        let fits = |known: &Rotation| tokens == [known.tokens] && known.fits(&ring.buffer.spec);
        let rotation = match known.filter(fits) {
            Some(known) => known,
            None => Rotation::new(frequencies, &tokens, &ring.buffer.spec)?,
        };
        ring.rotate_sinks(&rotation)?;
        self.key_rotation = Some(rotation);
        Ok(())
    }

    /// Computes the attention of one query over a ring that has dropped tokens, in slot order. Returns `None`
    /// if the mask does not have a column for each token.
    fn attend_to_ring(
        &mut self,
        layer: usize,
        query: &Tensor,
        new: &KeyValues<'_>,
        options: &AttendOptions<'_>,
    ) -> Result<Option<Tensor>> {
        let ring = self.ring(layer, new)?;
        let total = ring.total + 1;
        if options
            .mask
            .is_some_and(|mask| mask.size().last() != Some(&total))
        {
            return Ok(None);
        }
        ring.push(new)?;
        self.rotate_sinks(layer, total - 1)?;
        let Some(ring) = &self.layers[layer] else {
            return Ok(None);
        };
        let window = match (ring.limits.window, options.window) {
            (Some(cache), Some(model)) if options.mask.is_none() => cache.min(model),
            (Some(cache), _) => cache,
            (None, _) => return Ok(None),
        };
        // If the ring has slack, or if the model's window is narrower than the cache's, some slots
        // hold tokens that this query must not see.
        let seen = ring.seen_slots(window)?;
        let mask = match (options.mask, seen) {
            (None, seen) => seen,
            (Some(mask), seen) => match ring.columns_by_slot(mask)? {
                Some(mask) => Some(match seen {
                    Some(seen) => mask.f_logical_and(&seen)?,
                    None => mask,
                }),
                None => {
                    let view = in_order(ring, total - 1)?;
                    return attend_to_view(query, &view, options).map(Some);
                }
            },
        };
        let options = AttendOptions {
            mask: mask.as_ref(),
            window: None,
            ..*options
        };
        attend_to_view(query, &ring.unordered()?, &options).map(Some)
    }

    /// Computes the attention of several queries, each of which sees the sinks at a different distance:
    /// rotates the queries backward instead of the sinks forward, and merges the attention over the sinks
    /// with the attention over the other tokens.
    fn attend_with_rotated_queries(
        &mut self,
        layer: usize,
        query: &Tensor,
        new: &KeyValues<'_>,
        options: &AttendOptions<'_>,
        rotations: &[i64],
    ) -> Result<Tensor> {
        let (past, tokens) = {
            let ring = self.ring(layer, new)?;
            (ring.total, new.tokens)
        };
        let limits = self.limits(layer);
        let window = limits.window.unwrap_or(i64::MAX);
        // Layers with the same window need the same rotations in a step, which are computed on the
        // host.
        let key = (past, tokens, window);
        let known = self.query_rotation.take();
        let rotation =
            match known.filter(|(known, rotation)| *known == key && rotation.fits(&new.spec)) {
                Some((_, rotation)) => rotation,
                None => {
                    let back: Vec<i64> = rotations.iter().map(|rotation| -rotation).collect();
                    let frequencies = self.config.inverse_frequencies.as_deref();
                    Rotation::new(frequencies.unwrap_or(&[]), &back, &new.spec)?
                }
            };
        // Rotary embeddings depend only on distances: moving the query back equals moving the sinks
        // forward, and one copy of the sinks serves all queries.
        let query_at_sinks = rotate(query, &rotation)?;
        self.query_rotation = Some((key, rotation));

        let ring = self.ring(layer, new)?;
        let from = limits.first_seen(past);
        // The sinks among the new tokens belong to the attention over the sinks.
        let (keys, values) = ring.ordered(false, from, Some(new))?;
        let late = (limits.sinks - past).clamp(0, tokens);
        let count = keys.size()[2] - late;
        let (keys, values) = (
            keys.f_narrow(2, late, count)?,
            values.f_narrow(2, late, count)?,
        );
        // `ordered` has copied the earlier tokens, which the append may overwrite.
        ring.push(new)?;
        let sinks = ring.original_sinks()?;
        let sink_values = ring.buffer.values.f_narrow(2, 0, ring.sinks())?;

        let recent = KvView::windowed(keys, values, 0, from, window);
        let masks = match options.mask {
            Some(mask) => {
                let at_sinks = mask.f_narrow(-1, 0, ring.sinks())?;
                (Some(at_sinks), Some(recent.columns_of(mask)?))
            }
            // A query among the sinks sees the sinks up to its own position.
            None if past < limits.sinks => {
                let all = Tensor::f_ones([tokens, ring.sinks()], (Kind::Bool, new.spec.device))?;
                (Some(all.f_tril(past)?), None)
            }
            None => (None, None),
        };
        let common = AttentionOptions {
            scale: options.scale,
            softcap: options.softcap,
            backend: options.backend,
            ..AttentionOptions::default()
        };
        let at_sinks = AttentionOptions {
            mask: masks.0.as_ref(),
            ..common
        };
        let (first, first_lse) =
            attention_with_lse(&query_at_sinks, &sinks, &sink_values, &at_sinks)?;
        let window = options.window.map_or(window, |model| model.min(window));
        // The logits without a value count once: in the log-sum-exp of this part only.
        let common = AttentionOptions {
            sinks: options.sinks,
            ..common
        };
        let at_rest = match &masks.1 {
            Some(mask) => AttentionOptions {
                mask: Some(mask),
                ..common
            },
            None => AttentionOptions {
                causal: true,
                window: Window::sliding(usize::try_from(window).unwrap_or(usize::MAX)),
                ..common
            },
        };
        let (second, second_lse) =
            attention_with_lse(query, &recent.keys, &recent.values, &at_rest)?;
        // Each part is normalized by its own log-sum-exp; `merge` weights them so that the result is
        // one softmax.
        let (merged, _) = merge(&[first, second], &[first_lse, second_lse], Layout::Bhtd)?;
        Ok(merged)
    }
}

/// Returns the view for a query at `position`, the last token, in token order.
fn in_order(ring: &Ring, position: i64) -> Result<KvView> {
    let from = ring.limits.first_seen(position).max(ring.sinks());
    let (keys, values) = ring.ordered(true, from, None)?;
    Ok(view(ring, keys, values, from))
}

/// Returns the view of the sinks and the tokens from `from` on, with the layer's window.
fn view(ring: &Ring, keys: Tensor, values: Tensor, from: i64) -> KvView {
    match ring.limits.window {
        Some(window) => KvView::windowed(keys, values, ring.sinks(), from, window),
        None => KvView::new(keys, values),
    }
}

impl KvCache for SlidingCache {
    /// See [`KvCache::append`]. Fails with [`Error::Unsupported`] for several tokens whose distances to
    /// rotated sinks differ, which one view cannot represent; [`attend`](KvCache::attend) supports them.
    fn append(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<KvView> {
        self.check_layer(layer)?;
        let new = KeyValues::new(layer, keys, values)?;
        let past = self.ring(layer, &new)?.total;
        let rotations = self.sink_rotations(layer, past, past + new.tokens);
        if rotations.is_some() && new.tokens > 1 {
            return Err(Error::Unsupported {
                cache: "a sliding cache that rotates its sinks",
                what: "return one view for several new tokens",
                hint: "each sees the sinks at another distance; call `attend` instead of `append`",
            });
        }
        let ring = self.ring(layer, &new)?;
        // This step drops nothing, so the view is the filled part of the buffer, without a copy.
        if ring.stays_linear(new.tokens) {
            ring.push(&new)?;
            self.rotate_sinks(layer, past + new.tokens - 1)?;
            let ring = self.ring(layer, &new)?;
            let (keys, values) = ring.buffer.view(0, ring.total)?;
            return Ok(view(ring, keys, values, ring.sinks()));
        }
        if rotations.is_some() {
            ring.push(&new)?;
            self.rotate_sinks(layer, past)?;
            return in_order(self.ring(layer, &new)?, past);
        }
        let from = ring.limits.first_seen(past);
        // Builds the view before the append, which overwrites tokens that the first of several
        // queries still sees.
        let (keys, values) = ring.ordered(true, from, Some(&new))?;
        ring.push(&new)?;
        Ok(view(ring, keys, values, from))
    }

    fn attend(
        &mut self,
        layer: usize,
        query: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        self.check_layer(layer)?;
        if options.keep {
            // In token order, and before later tokens overwrite some that the first of several queries sees.
            let view = self.append(layer, keys, values)?;
            self.kept[layer] = Some(view.share());
            return attend_to_view(query, &view, options);
        }
        let new = KeyValues::new(layer, keys, values)?;
        let ring = self.ring(layer, &new)?;
        let (past, in_place) = (ring.total, !ring.stays_linear(new.tokens));
        // A single query attends to keys in any order, so it reads the ring without
        // sorting.
        if new.tokens == 1 && in_place {
            if let Some(output) = self.attend_to_ring(layer, query, &new, options)? {
                return Ok(output);
            }
        } else if let Some(rotations) = self.sink_rotations(layer, past, past + new.tokens)
            && new.tokens > 1
        {
            return self.attend_with_rotated_queries(layer, query, &new, options, &rotations);
        }
        attend_to_view(query, &self.append(layer, keys, values)?, options)
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
        let totals = self
            .layers
            .iter()
            .map(|ring| ring.as_ref().map_or(0, |ring| ring.total));
        totals.min().unwrap_or(0)
    }

    fn span(&self) -> Option<i64> {
        let windows = self.config.windows.iter().copied();
        // If any layer has no window, there is no bound.
        let widest = windows.reduce(|a, b| Some(a?.max(b?))).flatten()?;
        match self.config.sinks {
            0 => Some(widest),
            sinks if self.config.inverse_frequencies.is_some() => Some(sinks + widest),
            _ => None,
        }
    }

    fn truncate(&mut self, len: i64) -> Result<()> {
        check_truncation(len, self.len())?;
        let rings = self.layers.iter().enumerate();
        for (layer, ring) in rings.filter_map(|(layer, ring)| Some((layer, ring.as_ref()?))) {
            if ring.misses_tokens_at(len) {
                return Err(Error::AlreadyDropped {
                    len,
                    layer,
                    first: ring.first,
                    window: ring.limits.window.unwrap_or(0),
                });
            }
        }
        for ring in self.layers.iter_mut().flatten() {
            ring.truncate(len)?;
        }
        self.forget_kept();
        Ok(())
    }

    fn reset(&mut self) {
        self.layers.iter_mut().for_each(|ring| *ring = None);
        self.forget_kept();
        (self.key_rotation, self.query_rotation) = (None, None);
    }

    fn reorder(&mut self, rows: &Tensor) -> Result<()> {
        self.layers = self.map(|ring| {
            ring.with(
                |buffer, used| buffer.selected(rows, used),
                |sinks| sinks.f_index_select(0, rows),
            )
        })?;
        self.forget_kept();
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn KvCache>> {
        let layers = self
            .map(|ring| ring.with(|buffer, used| buffer.resized(buffer.capacity, used), copied))?;
        let config = self.config.clone();
        Ok(Box::new(SlidingCache {
            layers,
            ..SlidingCache::new(config)?
        }))
    }

    fn bytes(&self) -> u64 {
        let rings = self.layers.iter().flatten();
        rings.map(|ring| ring.buffer.bytes()).sum()
    }

    /// Returns the number of bytes of a cached token; beyond the window, a new token replaces an old one.
    fn bytes_per_token(&self) -> f64 {
        let rings = self.layers.iter().flatten();
        rings
            .map(|ring| ring.buffer.spec.bytes_per_token() as f64)
            .sum()
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let config = &self.config;
        vec![
            ("cache", "sliding".to_owned()),
            ("layers", self.layers.len().to_string()),
            ("windows", config::windows_text(&config.windows)),
            ("sinks", config.sinks.to_string()),
            ("slack", config.slack.to_string()),
        ]
    }

    /// Returns, for each layer, the kept `keys` and `values` in order, and `place`: the number of
    /// tokens so far and the position of the first one after the sinks.
    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        let mut state = Vec::new();
        for (number, ring) in self.layers.iter().enumerate() {
            if let Some(ring) = ring {
                let (keys, values) = ring.kept()?;
                let place = Tensor::f_from_slice(&[ring.total, ring.first])?;
                for (name, tensor) in [("keys", keys), ("values", values), ("place", place)] {
                    state.push((name_of(number, name), tensor));
                }
            }
        }
        Ok(state)
    }

    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<()> {
        let mut saved = SavedState::new(state);
        let mut layers = Vec::new();
        for layer in 0..self.layers.len() {
            let names = ["keys", "values", "place"];
            let Some([keys, values, place]) = saved.take_all(layer, names)? else {
                layers.push(None);
                continue;
            };
            let [total, first] = integers(layer, "place", place)?;
            let kept = KeyValues::new(layer, keys, values)?;
            let ring = Ring::restored(self.limits(layer), &kept, total, first)?;
            let ring = ring.ok_or_else(|| Error::BadState {
                name: name_of(layer, "place"),
                found: format!(
                    "{total} tokens kept from {first} on, which do not match {} tokens in a cache of {:?}",
                    kept.tokens,
                    self.limits(layer)
                ),
            })?;
            layers.push(Some(ring));
        }
        saved.finish()?;
        self.layers = layers;
        self.forget_kept();
        Ok(())
    }
}

impl SlidingCache {
    fn forget_kept(&mut self) {
        self.kept.iter_mut().for_each(|view| *view = None);
    }

    fn map(&self, to: impl Fn(&Ring) -> Result<Ring>) -> Result<Vec<Option<Ring>>> {
        let rings = self.layers.iter();
        rings
            .map(|ring| ring.as_ref().map(&to).transpose())
            .collect()
    }
}
