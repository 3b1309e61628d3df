use tch::{Kind, Tensor};

use crate::{Error, KvCache, KvView, Result};

/// How a [`GrowingCache`] allocates.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct GrowingCacheConfig {
    /// Tokens for which memory is taken at the first append; default 64. Where the final length is
    /// known (prompt + new tokens), giving it here means that nothing is ever copied.
    pub initial_capacity: i64,
}

impl Default for GrowingCacheConfig {
    fn default() -> Self {
        GrowingCacheConfig {
            initial_capacity: 64,
        }
    }
}

/// A cache without a bound, whose capacity doubles when it is full.
///
/// Appending copies the new tokens only; a doubling copies a layer once, so that `n` tokens cost
/// fewer than `2n` token copies in all. Capacity, and with it [`bytes`](KvCache::bytes), is at most
/// twice what is held (or the initial capacity).
#[derive(Debug)]
pub struct GrowingCache {
    config: GrowingCacheConfig,
    layers: Vec<Option<Layer>>,
}

/// Keys and values of one layer, `(B, H, capacity, D)`: a head's tokens lie side by side, so that
/// attention reads one run of memory a head.
#[derive(Debug)]
struct Layer {
    keys: Tensor,
    values: Tensor,
    len: i64,
}

impl GrowingCache {
    /// An empty cache for a model of `layers` layers; memory is taken at the first append.
    pub fn new(layers: usize) -> Self {
        GrowingCache::with_config(layers, GrowingCacheConfig::default())
    }

    /// An empty cache that takes memory for `tokens` tokens at the first append.
    pub fn with_capacity(layers: usize, tokens: i64) -> Self {
        GrowingCache::with_config(
            layers,
            GrowingCacheConfig {
                initial_capacity: tokens,
            },
        )
    }

    /// An empty cache that allocates as `config` says.
    pub fn with_config(layers: usize, config: GrowingCacheConfig) -> Self {
        GrowingCache {
            config,
            layers: (0..layers).map(|_| None).collect(),
        }
    }

    /// Tokens for which memory is taken; 0 before the first append.
    pub fn capacity(&self) -> i64 {
        self.layers
            .iter()
            .flatten()
            .map(Layer::capacity)
            .min()
            .unwrap_or(0)
    }
}

impl KvCache for GrowingCache {
    fn append(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<KvView> {
        let layers = self.layers.len();
        let slot = self
            .layers
            .get_mut(layer)
            .ok_or(Error::NoSuchLayer { layer, layers })?;
        check_shapes(keys, values)?;
        if keys.requires_grad() || values.requires_grad() {
            return Err(Error::RequiresGrad { layer });
        }
        let new = keys.size()[2];
        let held = match slot {
            Some(held) => {
                held.check_fit(layer, keys, values)?;
                if held.len + new > held.capacity() {
                    held.grow((held.len + new).max(2 * held.capacity()))?;
                }
                held
            }
            empty => empty.insert(Layer::allocate(
                keys,
                values,
                new.max(self.config.initial_capacity).max(1),
            )?),
        };
        held.keys.f_narrow(2, held.len, new)?.f_copy_(keys)?;
        held.values.f_narrow(2, held.len, new)?.f_copy_(values)?;
        held.len += new;
        Ok(KvView::new(
            held.keys.f_narrow(2, 0, held.len)?,
            held.values.f_narrow(2, 0, held.len)?,
        ))
    }

    fn layers(&self) -> usize {
        self.layers.len()
    }

    fn len(&self) -> i64 {
        self.layers
            .iter()
            .map(|layer| layer.as_ref().map_or(0, |held| held.len))
            .min()
            .unwrap_or(0)
    }

    fn truncate(&mut self, len: i64) -> Result<()> {
        if len < 0 {
            return Err(Error::NegativeLength { len });
        }
        if len > self.len() {
            return Err(Error::TruncateBeyondEnd {
                len,
                held: self.len(),
            });
        }
        for held in self.layers.iter_mut().flatten() {
            held.len = len;
        }
        Ok(())
    }

    fn reset(&mut self) {
        self.layers.iter_mut().for_each(|layer| *layer = None);
    }

    fn reorder(&mut self, rows: &Tensor) -> Result<()> {
        // Everything is computed before anything is replaced: an error leaves the cache as it was.
        let reordered = self
            .layers
            .iter()
            .map(|layer| layer.as_ref().map(|held| held.reordered(rows)).transpose())
            .collect::<Result<Vec<_>>>()?;
        self.layers = reordered;
        Ok(())
    }

    fn fork(&self) -> Result<Box<dyn KvCache>> {
        let copy = |layer: &Layer| -> Result<Layer> {
            let mut copy = Layer::allocate(&layer.keys, &layer.values, layer.capacity())?;
            copy.copy_from(layer)?;
            Ok(copy)
        };
        let layers = self
            .layers
            .iter()
            .map(|layer| layer.as_ref().map(copy).transpose())
            .collect::<Result<_>>()?;
        Ok(Box::new(GrowingCache {
            config: self.config.clone(),
            layers,
        }))
    }

    fn bytes_per_token(&self) -> f64 {
        let row = |tensor: &Tensor| {
            let size = tensor.size();
            (size[1] * size[3]) as f64 * tensor.kind().elt_size_in_bytes() as f64
        };
        self.layers
            .iter()
            .flatten()
            .map(|held| row(&held.keys) + row(&held.values))
            .sum()
    }

    fn state(&self) -> Result<Vec<(String, Tensor)>> {
        let mut state = Vec::new();
        for (number, layer) in self.layers.iter().enumerate() {
            if let Some(held) = layer {
                for (name, tensor) in [("keys", &held.keys), ("values", &held.values)] {
                    let held = tensor.f_narrow(2, 0, held.len)?;
                    state.push((format!("layers.{number}.{name}"), held));
                }
            }
        }
        Ok(state)
    }

    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<()> {
        let mut loaded = GrowingCache::with_config(self.layers.len(), self.config.clone());
        let find = |name: &str| {
            state
                .iter()
                .find(|(found, _)| found == name)
                .map(|(_, t)| t)
        };
        let mut used = 0;
        for layer in 0..self.layers.len() {
            let (keys, values) = (
                format!("layers.{layer}.keys"),
                format!("layers.{layer}.values"),
            );
            match (find(&keys), find(&values)) {
                (None, None) => {}
                (Some(keys), Some(values)) => {
                    loaded.append(layer, keys, values)?;
                    used += 2;
                }
                (None, _) => {
                    return Err(Error::BadState {
                        name: keys,
                        found: "missing".to_owned(),
                    });
                }
                (_, None) => {
                    return Err(Error::BadState {
                        name: values,
                        found: "missing".to_owned(),
                    });
                }
            }
        }
        if used != state.len() {
            let known = |name: &str| {
                (0..self.layers.len()).any(|layer| {
                    name == format!("layers.{layer}.keys")
                        || name == format!("layers.{layer}.values")
                })
            };
            let unknown = state.iter().find(|(name, _)| !known(name));
            let name = unknown.map_or_else(String::new, |(name, _)| name.clone());
            return Err(Error::BadState {
                name,
                found: "unknown to this cache".to_owned(),
            });
        }
        *self = loaded;
        Ok(())
    }

    fn bytes(&self) -> u64 {
        let size = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
        self.layers
            .iter()
            .flatten()
            .map(|held| size(&held.keys) + size(&held.values))
            .sum()
    }
}

impl Layer {
    fn allocate(keys: &Tensor, values: &Tensor, capacity: i64) -> Result<Layer> {
        Ok(Layer {
            keys: buffer(keys, capacity)?,
            values: buffer(values, capacity)?,
            len: 0,
        })
    }

    fn capacity(&self) -> i64 {
        self.keys.size()[2]
    }

    fn grow(&mut self, capacity: i64) -> Result<()> {
        let mut larger = Layer::allocate(&self.keys, &self.values, capacity)?;
        larger.copy_from(self)?;
        *self = larger;
        Ok(())
    }

    fn reordered(&self, rows: &Tensor) -> Result<Layer> {
        Ok(Layer {
            keys: self.keys.f_index_select(0, rows)?,
            values: self.values.f_index_select(0, rows)?,
            len: self.len,
        })
    }

    fn copy_from(&mut self, other: &Layer) -> Result<()> {
        for (to, from) in [(&self.keys, &other.keys), (&self.values, &other.values)] {
            to.f_narrow(2, 0, other.len)?
                .f_copy_(&from.f_narrow(2, 0, other.len)?)?;
        }
        self.len = other.len;
        Ok(())
    }

    fn check_fit(&self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<()> {
        for (held, got) in [(&self.keys, keys), (&self.values, values)] {
            let (held_shape, got_shape) = (row_shape(held), row_shape(got));
            if held_shape != got_shape || held.kind() != got.kind() || held.device() != got.device()
            {
                return Err(Error::Mismatch {
                    layer,
                    held: held.kind(),
                    held_shape,
                    held_device: held.device(),
                    got: got.kind(),
                    got_shape,
                    got_device: got.device(),
                });
            }
        }
        Ok(())
    }
}

/// `(B, H, D)` of a `(B, H, T, D)` tensor.
fn row_shape(tensor: &Tensor) -> Vec<i64> {
    let size = tensor.size();
    vec![size[0], size[1], size[3]]
}

fn buffer(like: &Tensor, capacity: i64) -> Result<Tensor> {
    let size = like.size();
    let kind: Kind = like.kind();
    Ok(Tensor::f_empty(
        [size[0], size[1], capacity, size[3]],
        (kind, like.device()),
    )?)
}

fn check_shapes(keys: &Tensor, values: &Tensor) -> Result<()> {
    let (k, v) = (keys.size(), values.size());
    if k.len() != 4 || v.len() != 4 || k[..3] != v[..3] {
        return Err(Error::BadShape { keys: k, values: v });
    }
    Ok(())
}
