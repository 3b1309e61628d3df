//! Caches that forget.

mod config;
mod ring;
mod turn;

use overdrive_attention::{AttentionOptions, Layout, Window, attention_with_lse, merge};
use tch::{Kind, Tensor};

use crate::attend::attend_to_view;
use crate::buffer::copied;
use crate::entries::{Entries, check_truncation};
use crate::saved::{Saved, name_of, numbers};
use crate::{AttendOptions, Error, KvCache, KvView, Result};

pub use config::SlidingCacheConfig;
use ring::{Limits, Ring};
use turn::{Turn, turned};

/// A cache that keeps the last tokens of a text of any length, and, as attention sinks, the first ones.
///
/// Each layer keeps what its window needs: a layer with a window of `w` keeps `sinks + w + slack`
/// tokens in a ring, however long the text (StreamingLLM: Xiao et al. 2023, [arXiv:2309.17453]); a
/// layer without one grows, as in a [`GrowingCache`](crate::GrowingCache). With the model's own windows
/// (Mistral, Gemma, Qwen) and no sinks, nothing changes but the memory.
///
/// [`attend`](KvCache::attend) of one token copies that token only: to a single query the order of
/// keys means nothing, so it reads the ring as it lies. [`append`](KvCache::append), whose view is in
/// order, copies the ring at every step once it has gone round, and so does `attend` of several
/// tokens.
///
/// # Sinks under rotary positions
///
/// Plain sinks stand ever further away from the query. StreamingLLM numbers the tokens of the cache
/// instead of those of the text, so that no distance exceeds the cache. As only distances matter to
/// rotary positions, this cache has the same effect at the price of a few keys: it turns the sinks on
/// by as many tokens as have been dropped, where [`SlidingCacheConfig::inverse_frequencies`] are
/// given. [`span`](KvCache::span) then is the sinks and the window.
///
/// # Going back
///
/// [`truncate`](KvCache::truncate) by up to `slack + 1` tokens is always possible, and by any number
/// as long as nothing has been dropped, or into the sinks; else it is [`Error::AlreadyDropped`]. A
/// step of more than `slack + 1` tokens that fails half-way can therefore not be undone in general:
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
    /// The last turn of sink keys: layers with one window share it.
    key_turn: Option<Turn>,
    /// The last turns of queries, for this past, number of tokens, and window.
    query_turn: Option<((i64, i64, i64), Turn)>,
}

impl SlidingCache {
    /// An empty cache; memory is taken at the first append.
    ///
    /// # Errors
    /// When the settings are out of range.
    pub fn new(config: SlidingCacheConfig) -> Result<SlidingCache> {
        config.validate()?;
        Ok(SlidingCache {
            layers: config.windows.iter().map(|_| None).collect(),
            key_turn: None,
            query_turn: None,
            config,
        })
    }

    /// Its settings.
    pub fn config(&self) -> &SlidingCacheConfig {
        &self.config
    }

    /// The ring of a layer, made for `new` where there is none yet.
    fn ring(&mut self, layer: usize, new: &Entries<'_>) -> Result<&mut Ring> {
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

    /// By how many tokens the sinks must be turned on for each of the queries at `from..to`; `None`
    /// where not at all.
    fn turns(&self, layer: usize, from: i64, to: i64) -> Option<Vec<i64>> {
        let limits = self.limits(layer);
        let dropped = |position| limits.first_seen(position) - limits.sinks;
        let any = self.config.inverse_frequencies.is_some() && limits.sinks > 0;
        (any && dropped(to - 1) > 0).then(|| (from..to).map(dropped).collect())
    }

    /// Turns the sink keys of a layer for the query at `position`.
    fn turn_sinks(&mut self, layer: usize, position: i64) -> Result<()> {
        let turn = self.turns(layer, position, position + 1);
        let Some(ring) = &mut self.layers[layer] else {
            return Ok(());
        };
        let (Some(tokens), Some(frequencies)) = (turn, &self.config.inverse_frequencies) else {
            return ring.unturn_sinks();
        };
        let known = self.key_turn.take();
        let fits = |known: &Turn| tokens == [known.tokens] && known.fits(&ring.buffer.spec);
        let turn = match known.filter(fits) {
            Some(known) => known,
            None => Turn::new(frequencies, &tokens, &ring.buffer.spec)?,
        };
        ring.turn_sinks(&turn)?;
        self.key_turn = Some(turn);
        Ok(())
    }

    /// Attention of one query over a ring that has dropped tokens, as it lies.
    fn attend_to_ring(
        &mut self,
        layer: usize,
        query: &Tensor,
        new: &Entries<'_>,
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
        self.turn_sinks(layer, total - 1)?;
        let Some(ring) = &self.layers[layer] else {
            return Ok(None);
        };
        let window = match (ring.limits.window, options.window) {
            (Some(cache), Some(model)) if options.mask.is_none() => cache.min(model),
            (Some(cache), _) => cache,
            (None, _) => return Ok(None),
        };
        let seen = ring.seen_slots(window)?;
        let mask = match (options.mask, seen) {
            (None, seen) => seen,
            (Some(mask), seen) => match ring.by_slot(mask)? {
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
        attend_to_view(query, &ring.as_it_lies()?, &options).map(Some)
    }

    /// Attention of several queries, each of which sees the sinks at a distance of its own: instead of
    /// the sinks the queries are turned (back), and the two parts are merged.
    fn attend_in_two_parts(
        &mut self,
        layer: usize,
        query: &Tensor,
        new: &Entries<'_>,
        options: &AttendOptions<'_>,
        turns: &[i64],
    ) -> Result<Tensor> {
        let (past, tokens) = {
            let ring = self.ring(layer, new)?;
            (ring.total, new.tokens)
        };
        let limits = self.limits(layer);
        let window = limits.window.unwrap_or(i64::MAX);
        let key = (past, tokens, window);
        let known = self.query_turn.take();
        let turn = match known.filter(|(known, turn)| *known == key && turn.fits(&new.spec)) {
            Some((_, turn)) => turn,
            None => {
                let back: Vec<i64> = turns.iter().map(|turn| -turn).collect();
                let frequencies = self.config.inverse_frequencies.as_deref();
                Turn::new(frequencies.unwrap_or(&[]), &back, &new.spec)?
            }
        };
        let query_at_sinks = turned(query, &turn)?;
        self.query_turn = Some((key, turn));

        let ring = self.ring(layer, new)?;
        let from = limits.first_seen(past);
        // The sinks among the new tokens belong to the other part.
        let (keys, values) = ring.ordered(false, from, Some(new))?;
        let late = (limits.sinks - past).clamp(0, tokens);
        let count = keys.size()[2] - late;
        let (keys, values) = (
            keys.f_narrow(2, late, count)?,
            values.f_narrow(2, late, count)?,
        );
        ring.push(new)?;
        let sinks = ring.given_sinks()?;
        let sink_values = ring.buffer.values.f_narrow(2, 0, ring.sinks())?;

        let rest = KvView::windowed(keys, values, 0, from, window);
        let masks = match options.mask {
            Some(mask) => {
                let at_sinks = mask.f_narrow(-1, 0, ring.sinks())?;
                (Some(at_sinks), Some(rest.columns_of(mask)?))
            }
            // A query among the sinks sees those up to its own.
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
        let (second, second_lse) = attention_with_lse(query, &rest.keys, &rest.values, &at_rest)?;
        let (merged, _) = merge(&[first, second], &[first_lse, second_lse], Layout::Bhtd)?;
        Ok(merged)
    }
}

/// The view of a query at `position`, the last token, in order.
fn in_order(ring: &Ring, position: i64) -> Result<KvView> {
    let from = ring.limits.first_seen(position).max(ring.sinks());
    let (keys, values) = ring.ordered(true, from, None)?;
    Ok(view(ring, keys, values, from))
}

/// Sinks and the tokens from `from` on, with the layer's window.
fn view(ring: &Ring, keys: Tensor, values: Tensor, from: i64) -> KvView {
    match ring.limits.window {
        Some(window) => KvView::windowed(keys, values, ring.sinks(), from, window),
        None => KvView::new(keys, values),
    }
}

impl KvCache for SlidingCache {
    /// As the trait says; [`Error::Unsupported`] for several tokens whose distances to turned sinks
    /// differ, which one view cannot show: [`attend`](KvCache::attend) does it.
    fn append(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<KvView> {
        self.check_layer(layer)?;
        let new = Entries::new(layer, keys, values)?;
        let past = self.ring(layer, &new)?.total;
        let turns = self.turns(layer, past, past + new.tokens);
        if turns.is_some() && new.tokens > 1 {
            return Err(Error::Unsupported {
                cache: "a sliding cache that turns its sinks",
                what: "show several new tokens one view",
                hint: "each sees the sinks at another distance; call `attend` instead of `append`",
            });
        }
        let ring = self.ring(layer, &new)?;
        if ring.stays_linear(new.tokens) {
            ring.push(&new)?;
            self.turn_sinks(layer, past + new.tokens - 1)?;
            let ring = self.ring(layer, &new)?;
            let (keys, values) = ring.buffer.view(0, ring.total)?;
            return Ok(view(ring, keys, values, ring.sinks()));
        }
        if turns.is_some() {
            ring.push(&new)?;
            self.turn_sinks(layer, past)?;
            return in_order(self.ring(layer, &new)?, past);
        }
        let from = ring.limits.first_seen(past);
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
        let new = Entries::new(layer, keys, values)?;
        let ring = self.ring(layer, &new)?;
        let (past, in_place) = (ring.total, !ring.stays_linear(new.tokens));
        if new.tokens == 1 && in_place {
            if let Some(output) = self.attend_to_ring(layer, query, &new, options)? {
                return Ok(output);
            }
        } else if let Some(turns) = self.turns(layer, past, past + new.tokens)
            && new.tokens > 1
        {
            return self.attend_in_two_parts(layer, query, &new, options, &turns);
        }
        attend_to_view(query, &self.append(layer, keys, values)?, options)
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
            if ring.lost_at(len) {
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
        Ok(())
    }

    fn reset(&mut self) {
        self.layers.iter_mut().for_each(|ring| *ring = None);
        (self.key_turn, self.query_turn) = (None, None);
    }

    fn reorder(&mut self, rows: &Tensor) -> Result<()> {
        self.layers = self.map(|ring| {
            ring.with(
                |buffer, used| buffer.selected(rows, used),
                |sinks| sinks.f_index_select(0, rows),
            )
        })?;
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

    /// As the trait says, for a token that is kept; past the window a new token takes the place of an
    /// old one.
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

    /// For each layer `keys` and `values`, what is kept in order, and `place`, the number of tokens so
    /// far and that of the first one after the sinks.
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
        let mut saved = Saved::new(state);
        let mut layers = Vec::new();
        for layer in 0..self.layers.len() {
            let names = ["keys", "values", "place"];
            let Some([keys, values, place]) = saved.take_all(layer, names)? else {
                layers.push(None);
                continue;
            };
            let [total, first] = numbers(layer, "place", place)?;
            let kept = Entries::new(layer, keys, values)?;
            let ring = Ring::restored(self.limits(layer), &kept, total, first)?;
            let ring = ring.ok_or_else(|| Error::BadState {
                name: name_of(layer, "place"),
                found: format!(
                    "{total} tokens kept from {first} on, which does not fit {} tokens in a cache of {:?}",
                    kept.tokens,
                    self.limits(layer)
                ),
            })?;
            layers.push(Some(ring));
        }
        saved.finish()?;
        self.layers = layers;
        Ok(())
    }
}

impl SlidingCache {
    fn map(&self, to: impl Fn(&Ring) -> Result<Ring>) -> Result<Vec<Option<Ring>>> {
        let rings = self.layers.iter();
        rings
            .map(|ring| ring.as_ref().map(&to).transpose())
            .collect()
    }
}
