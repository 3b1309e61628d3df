use tch::Tensor;

use super::{DeltaRuleStep, SequenceState, StatePool, StateStep};
use crate::key_values::check_truncation;
use crate::{AttendOptions, Error, KvCache, KvView, QkvRows, Result};

/// A cache for a model in which some layers keep a state of fixed size in place of keys and values (Qwen3-Next,
/// Qwen3.5): another cache for the layers of attention, beside the states of the others.
///
/// [`CacheImplementation::build`](crate::CacheImplementation::build) makes one if its shape has recurrent layers. A
/// truncation reaches any length within the last step if that had at most 64 tokens, the length before the last step, and
/// 0, because a state does not tell what it was before a token. [`with_slack`](HybridCache::with_slack) keeps more; to
/// return to another length, [`fork`](KvCache::fork) the cache there.
///
/// ```
/// use overdrive_kv_cache::{DynamicCache, HybridCache, KvCache};
///
/// # fn main() -> overdrive_kv_cache::Result<()> {
/// // Every fourth layer attends.
/// let recurrent: Vec<bool> = (0..8).map(|layer| (layer + 1) % 4 != 0).collect();
/// let cache = HybridCache::new(Box::new(DynamicCache::new(2)), &recurrent)?;
/// assert_eq!((cache.layers(), cache.len()), (8, 0));
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct HybridCache {
    attention: Box<dyn KvCache>,
    layers: Vec<Layer>,
    pool: StatePool,
    /// The state of each row of the batch.
    rows: Vec<SequenceState>,
    /// The step that some recurrent layers have run.
    step: Option<StateStep>,
}

/// A layer by its number among those of its kind.
#[derive(Debug, Clone, Copy)]
enum Layer {
    Attention(usize),
    Recurrent(usize),
}

impl HybridCache {
    /// Creates a cache for a model whose layers are `recurrent` or, if `false`, have their keys and values in the empty
    /// cache `attention`.
    ///
    /// # Errors
    /// An [option](overdrive_core::Error::InvalidOption) if `attention` has another number of layers.
    pub fn new(attention: Box<dyn KvCache>, recurrent: &[bool]) -> Result<HybridCache> {
        let mut counts = [0; 2];
        let layer = |&recurrent: &bool| {
            let count = &mut counts[usize::from(recurrent)];
            let number = *count;
            *count += 1;
            match recurrent {
                true => Layer::Recurrent(number),
                false => Layer::Attention(number),
            }
        };
        let layers = recurrent.iter().map(layer).collect();
        if attention.layers() != counts[0] {
            let expected = format!("a cache of {} layers, those that attend", counts[0]);
            let found = format!("a cache of {} layers", attention.layers());
            return Err(overdrive_core::Error::option("attention", found, expected).into());
        }
        Ok(HybridCache {
            attention,
            layers,
            pool: StatePool::new(counts[1], 0),
            rows: Vec::new(),
            step: None,
        })
    }

    /// Returns the cache, which is empty, with inputs kept for truncations by up to `slack` tokens over several steps, as a
    /// draft model needs them. Default 0.
    #[must_use]
    pub fn with_slack(mut self, slack: i64) -> HybridCache {
        self.pool = StatePool::new(self.pool.layers(), slack.max(0));
        self
    }

    /// Returns the number of a layer in the cache of the layers of attention.
    fn attention_layer(&self, layer: usize) -> Result<usize> {
        match self.layers.get(layer) {
            Some(Layer::Attention(number)) => Ok(*number),
            Some(Layer::Recurrent(_)) => Err(Error::Unsupported {
                cache: "a hybrid cache",
                what: "hold keys and values of a recurrent layer",
                hint: "call `delta_rule`, or create it with the layers of this model",
            }),
            None => Err(self.no_such_layer(layer)),
        }
    }

    fn no_such_layer(&self, layer: usize) -> Error {
        let layers = self.layers.len();
        Error::NoSuchLayer { layer, layers }
    }

    /// Returns the number of tokens in the states.
    fn state_len(&self) -> i64 {
        self.rows.first().map_or(0, SequenceState::len)
    }

    /// Discards the step that only some recurrent layers have run.
    fn cancel(&mut self) {
        if let Some(step) = self.step.take() {
            self.pool.cancel(step);
        }
    }

    fn check_rows(&mut self, batch: i64) -> Result<()> {
        if self.rows.is_empty() {
            self.rows = (0..batch).map(|_| SequenceState::default()).collect();
        }
        let held = self.rows.len();
        if i64::try_from(held) == Ok(batch) {
            return Ok(());
        }
        let expected = format!(
            "a batch of {held} rows, as that of the tokens before; reset the cache before using it for another batch"
        );
        Err(overdrive_core::Error::shape("mixed", [batch], expected).into())
    }
}

impl KvCache for HybridCache {
    fn append(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<KvView> {
        let layer = self.attention_layer(layer)?;
        self.attention.append(layer, keys, values)
    }

    fn attend(
        &mut self,
        layer: usize,
        query: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        let layer = self.attention_layer(layer)?;
        self.attention.attend(layer, query, keys, values, options)
    }

    fn attend_shared(
        &mut self,
        layer: usize,
        query: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        let layer = self.attention_layer(layer)?;
        self.attention.attend_shared(layer, query, options)
    }

    fn attend_rows(
        &mut self,
        layer: usize,
        new: &QkvRows<'_>,
        options: &AttendOptions<'_>,
        output: &mut [f32],
    ) -> Result<bool> {
        let layer = self.attention_layer(layer)?;
        self.attention.attend_rows(layer, new, options, output)
    }

    fn delta_rule(&mut self, layer: usize, step: &DeltaRuleStep) -> Result<Tensor> {
        let number = match self.layers.get(layer) {
            Some(Layer::Recurrent(number)) => *number,
            Some(Layer::Attention(_)) => {
                return Err(Error::Unsupported {
                    cache: "a hybrid cache",
                    what: "hold the state of a layer of attention",
                    hint: "create it with the layers of this model",
                });
            }
            None => return Err(self.no_such_layer(layer)),
        };
        step.check_no_gradient(layer)?;
        let &[batch, tokens, _] = step.mixed.size().as_slice() else {
            let expected = "(B, T, 2 · H_k · D_k + H · D_v)";
            let found = step.mixed.size();
            return Err(overdrive_core::Error::shape("mixed", found, expected).into());
        };
        self.check_rows(batch)?;
        let mut open = match self.step.take() {
            Some(open) if !open.has_run(number) => open,
            Some(open) => {
                self.step = Some(open);
                return Err(Error::LayerTwice { layer });
            }
            None => self
                .pool
                .begin(self.rows.iter().map(|state| (state, tokens)))?,
        };
        let output = self.pool.advance(&mut open, number, step.flat()?);
        if output.is_ok() && open.is_complete() {
            self.pool.commit(open, &mut self.rows)?;
        } else {
            self.step = Some(open);
        }
        Ok(output?.f_unflatten(0, [batch, tokens])?)
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn len(&self) -> i64 {
        match (self.attention.layers(), self.pool.layers()) {
            (0, _) => self.state_len(),
            (_, 0) => self.attention.len(),
            _ => self.attention.len().min(self.state_len()),
        }
    }

    fn max_len(&self) -> Option<i64> {
        self.attention.max_len()
    }

    fn truncate(&mut self, len: i64) -> Result<()> {
        check_truncation(len, self.len())?;
        self.cancel();
        for state in &mut self.rows {
            self.pool.truncate(state, len)?;
        }
        if len == 0 {
            self.rows.clear();
        }
        self.attention.truncate(len)
    }

    fn reset(&mut self) {
        self.cancel();
        self.pool = self.pool.emptied();
        self.rows.clear();
        self.attention.reset();
    }

    fn reorder(&mut self, rows: &Tensor) -> Result<()> {
        self.cancel();
        let order: Vec<i64> = Vec::try_from(rows.f_to_device(tch::Device::Cpu)?)?;
        let state = |row: i64| self.rows.get(usize::try_from(row).ok()?);
        let mut unused = Vec::with_capacity(order.len());
        // The attention's cache checks the indices; it may be empty. It is last, because it cannot be undone.
        let mut forks = order.into_iter().filter_map(state);
        let reordered = forks
            .try_for_each(|state| {
                unused.push(self.pool.fork(state)?);
                Ok(())
            })
            .and_then(|()| self.attention.reorder(rows));
        if reordered.is_ok() {
            std::mem::swap(&mut self.rows, &mut unused);
        }
        for state in unused {
            self.pool.release(state);
        }
        reordered
    }

    fn fork(&self) -> Result<Box<dyn KvCache>> {
        let (pool, rows) = self.copied()?;
        Ok(Box::new(HybridCache {
            attention: self.attention.fork()?,
            layers: self.layers.clone(),
            pool,
            rows,
            step: None,
        }))
    }

    fn bytes(&self) -> u64 {
        self.attention.bytes() + self.pool.bytes()
    }

    /// Returns the bytes of a token in the layers of attention: states do not grow.
    fn bytes_per_token(&self) -> f64 {
        self.attention.bytes_per_token()
    }

    fn settings(&self) -> Vec<(&'static str, String)> {
        let recurrent = self.layers.iter().enumerate();
        let recurrent = recurrent.filter(|(_, layer)| matches!(layer, Layer::Recurrent(_)));
        let recurrent: Vec<String> = recurrent.map(|(layer, _)| layer.to_string()).collect();
        let mut settings = self.attention.settings();
        settings.push(("recurrent_layers", recurrent.join(",")));
        settings
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        let mut all = self.attention.state()?;
        for layer in 0..self.pool.layers() {
            if let Some([inputs, recurrent]) = self.pool.states(layer, &self.rows)? {
                all.push((format!("states.{layer}.inputs"), inputs));
                all.push((format!("states.{layer}.recurrent"), recurrent));
            }
        }
        Ok(all)
    }

    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<()> {
        let share = |(name, tensor): &(String, Tensor)| (name.clone(), tensor.shallow_clone());
        let (mut states, others): (Vec<_>, Vec<_>) = state
            .iter()
            .map(share)
            .partition(|(name, _)| name.starts_with("states."));
        let mut take = |layer: usize, name: &str| -> Result<Option<Tensor>> {
            let name = format!("states.{layer}.{name}");
            let found = states.iter().position(|(other, _)| *other == name);
            let tensor = found.map(|index| states.swap_remove(index).1);
            // The pool writes in place, and the caller keeps its tensors.
            Ok(tensor.map(|tensor| tensor.f_detach_copy()).transpose()?)
        };
        let mut layers = Vec::new();
        for layer in 0..self.pool.layers() {
            match [take(layer, "inputs")?, take(layer, "recurrent")?] {
                [Some(inputs), Some(recurrent)] => layers.push([inputs, recurrent]),
                [None, None] if layers.is_empty() => {}
                _ => {
                    return Err(Error::BadState {
                        name: format!("states.{layer}"),
                        found: "missing, or not in all recurrent layers".to_owned(),
                    });
                }
            }
        }
        if let Some((name, _)) = states.first() {
            return Err(Error::BadState {
                name: name.clone(),
                found: "not of a recurrent layer of this cache".to_owned(),
            });
        }
        if !layers.is_empty() && layers.len() != self.pool.layers() {
            return Err(Error::BadState {
                name: "states".to_owned(),
                found: "missing in some recurrent layers".to_owned(),
            });
        }
        self.attention.load_state(&others)?;
        self.cancel();
        (self.pool, self.rows) = self.pool.with_states(layers, self.attention.len());
        Ok(())
    }
}

impl HybridCache {
    /// Returns a copy of the states.
    fn copied(&self) -> Result<(StatePool, Vec<SequenceState>)> {
        let mut layers = Vec::new();
        for layer in 0..self.pool.layers() {
            layers.extend(self.pool.states(layer, &self.rows)?);
        }
        Ok(self.pool.with_states(layers, self.state_len()))
    }
}
