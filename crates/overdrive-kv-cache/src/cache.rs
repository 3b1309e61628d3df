use tch::Tensor;

use crate::attend::{AttendOptions, attend_to_view};
use crate::recurrent::DeltaRuleStep;
use crate::{Error, Result};

/// The keys and values of a layer that attention reads after [`KvCache::append`].
///
/// Both are views that stay valid until the cache changes again. They are for the attention of the same
/// layer and step; the last `T` tokens are the new ones.
///
/// A cache with a window has dropped the tokens between the first [`sinks`](KvView::sinks) and token
/// [`first`](KvView::first): column `j` is token `j` for a sink, else token `first + j - sinks`.
#[derive(Debug)]
#[non_exhaustive]
pub struct KvView {
    /// The keys `(B, H, len, D)`, oldest token first; strided, not contiguous.
    pub keys: Tensor,
    /// The values `(B, H, len, D_v)`, oldest token first; strided, not contiguous.
    pub values: Tensor,
    /// The number of leading columns that are attention sinks, which every query sees; 0 if nothing has
    /// been dropped.
    pub sinks: i64,
    /// The position of the first token after the sinks; equal to `sinks` if nothing has been dropped.
    pub first: i64,
    /// The number of tokens, including its own, that a query sees besides the sinks; `None`: all.
    pub window: Option<i64>,
}

impl KvView {
    /// Creates a view of all tokens so far.
    pub fn new(keys: Tensor, values: Tensor) -> Self {
        KvView {
            keys,
            values,
            sinks: 0,
            first: 0,
            window: None,
        }
    }

    /// Returns a view of the same tensors.
    pub(crate) fn share(&self) -> Self {
        KvView {
            keys: self.keys.shallow_clone(),
            values: self.values.shallow_clone(),
            ..*self
        }
    }

    /// Creates the view of a cache with a window; the arguments are the fields.
    pub fn windowed(keys: Tensor, values: Tensor, sinks: i64, first: i64, window: i64) -> Self {
        KvView {
            keys,
            values,
            sinks,
            first,
            window: Some(window),
        }
    }

    /// Returns the columns of `mask (…, S)`, over all `S` tokens so far, that are in this view. Columns
    /// that the window hides from the `T` queries of the second-to-last dimension become `false`.
    ///
    /// # Errors
    /// If the mask does not have `S` columns.
    pub(crate) fn columns_of(&self, mask: &Tensor) -> Result<Tensor> {
        let (held, all) = (self.keys.size()[2], *mask.size().last().unwrap_or(&0));
        if self.first - self.sinks + held != all {
            let tokens = self.first - self.sinks + held;
            let expected =
                format!("(…, {tokens}), one column for each token that was appended to the cache");
            return Err(overdrive_core::Error::shape("mask", mask.size(), expected).into());
        }
        let kept = if held == all {
            mask.shallow_clone()
        } else {
            // The columns of dropped tokens lie between the sinks and `first`.
            let sinks = mask.f_narrow(-1, 0, self.sinks)?;
            let rest = mask.f_narrow(-1, self.first, all - self.first)?;
            Tensor::f_cat(&[sinks, rest], -1)?
        };
        let Some(window) = self.window else {
            return Ok(kept);
        };
        let tokens = mask.size().iter().rev().nth(1).copied().unwrap_or(1);
        let options = (tch::Kind::Bool, mask.device());
        // Column `held - tokens + i` is the token of query `i`, so the diagonal of the first visible
        // column lies `window - 1` to its left.
        let seen = Tensor::f_ones([tokens, held], options)?.f_triu(held - tokens - window + 1)?;
        // Sinks are seen by every query, however far away.
        let _all = seen.f_narrow(1, 0, self.sinks)?.f_fill_(1i64)?;
        Ok(kept.f_logical_and(&seen)?)
    }
}

/// The queries, keys and values of new tokens side by side, in f32: rows `(B · T, (H + 2 H_kv) · D)`.
#[derive(Debug, Clone, Copy)]
pub struct QkvRows<'a> {
    /// The rows.
    pub rows: &'a [f32],
    /// The number of rows of the batch.
    pub batch: usize,
    /// The number of query heads.
    pub heads: usize,
    /// The number of key heads, and of value heads.
    pub kv_heads: usize,
    /// The number of channels of a head.
    pub head_dim: usize,
}

impl QkvRows<'_> {
    /// Returns the number of elements of a token.
    pub fn width(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// Returns the number of tokens in a row of the batch; `None` if the length of `rows` does not fit the sizes.
    pub fn tokens(&self) -> Option<usize> {
        let of_batch = self.rows.len().checked_div(self.batch)?;
        let tokens = of_batch.checked_div(self.width())?;
        (tokens * self.width() * self.batch == self.rows.len()).then_some(tokens)
    }
}

/// The keys and values of a decoder's earlier tokens.
///
/// A step of a model calls [`attend`](KvCache::attend) once for each layer, in any order, with the same
/// number of new tokens; a layer with its own attention calls [`append`](KvCache::append) instead.
/// [`len`](KvCache::len) counts the tokens that were appended to *every* layer, so during a step it is
/// still the number of past tokens. `cache.truncate(cache.len())` undoes a step that failed halfway.
pub trait KvCache: std::fmt::Debug + Send {
    /// Appends the new keys `(B, H, T, D)` and values `(B, H, T, D_v)` of `layer`, and returns the keys
    /// and values that the attention of that layer reads. The new tokens are copied; the caller keeps
    /// its tensors.
    ///
    /// # Errors
    /// If `layer` does not exist, shapes, dtype or device do not fit, a gradient is required, or the cache is full;
    /// [`Error::NotDense`](crate::Error::NotDense) from a cache that cannot return all rows as one tensor.
    fn append(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<KvView>;

    /// Appends the new keys and values as [`append`](KvCache::append) does, and returns the attention
    /// `(B, H, T, D_v)` of `query (B, H, T, D)`, the same new tokens, over the tokens that the layer
    /// then holds.
    ///
    /// # Errors
    /// As [`append`](KvCache::append), and those of the attention kernel.
    fn attend(
        &mut self,
        layer: usize,
        query: &Tensor,
        keys: &Tensor,
        values: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        attend_to_view(query, &self.append(layer, keys, values)?, options)
    }

    /// Returns the attention `(B, H, T, D_v)` of `query (B, H, T, D)`, the last `T` tokens that `layer` holds, over the
    /// tokens that `layer` attended to in this step with [`AttendOptions::keep`]. Layers without keys and values of
    /// their own, as some of Gemma 3n's are, call it with the layer whose keys and values they share; it is not a layer
    /// of the cache that calls it, and appends nothing.
    ///
    /// # Errors
    /// [`Error::NotKept`](crate::Error::NotKept) if the layer has not attended in this step, or does not exist;
    /// [`Error::Unsupported`](crate::Error::Unsupported) from a cache without this method; those of the attention
    /// kernel.
    fn attend_shared(
        &mut self,
        layer: usize,
        query: &Tensor,
        options: &AttendOptions<'_>,
    ) -> Result<Tensor> {
        let _ = (layer, query, options);
        Err(crate::Error::Unsupported {
            cache: "this cache",
            what: "share the keys and values of a layer with other layers",
            hint: "its type does not implement `KvCache::attend_shared`; use a cache of overdrive-kv-cache",
        })
    }

    /// Computes [`attend`](KvCache::attend) for a few tokens in slices, and writes rows `(B · T, H · D)` to
    /// `output`. Returns `false` without changes if the cache does not support this, which is the default.
    ///
    /// # Errors
    /// As [`attend`](KvCache::attend).
    fn attend_rows(
        &mut self,
        layer: usize,
        new: &QkvRows<'_>,
        options: &AttendOptions<'_>,
        output: &mut [f32],
    ) -> Result<bool> {
        let _ = (layer, new, options, output);
        Ok(false)
    }

    /// Advances the state of a recurrent `layer` by the new tokens of `step`, and returns what the state gives for each,
    /// `(B, T, H, D_v)`. Such a layer has a state of fixed size in place of keys and values.
    ///
    /// # Errors
    /// [`Error::Unsupported`] by default, from a cache without states; if `layer` does not exist, shapes do not fit, or a
    /// gradient is required.
    fn delta_rule(&mut self, layer: usize, step: &DeltaRuleStep) -> Result<Tensor> {
        let _ = (layer, step);
        Err(Error::Unsupported {
            cache: "a cache of keys and values",
            what: "hold the state of a recurrent layer",
            hint: "build the cache for the model's recurrent layers: `CacheShape::recurrent`, or `HybridCache`",
        })
    }

    /// Returns the number of layers.
    fn layers(&self) -> usize;

    /// Returns the number of tokens that were appended to every layer, which is the position of the next
    /// token.
    fn len(&self) -> i64;

    /// Returns `true` if the cache holds no tokens.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the capacity in tokens, or `None` if the cache grows or drops old tokens.
    fn max_len(&self) -> Option<i64> {
        None
    }

    /// Returns the largest number of tokens that a query can see through this cache, if it is bounded for
    /// sequences of any length. A model with rotary positions can then generate beyond its context.
    fn span(&self) -> Option<i64> {
        None
    }

    /// Drops all but the first `len` tokens of every layer, without freeing memory.
    ///
    /// # Errors
    /// If `len` is negative or more than [`len`](KvCache::len), or if required tokens were dropped.
    fn truncate(&mut self, len: i64) -> Result<()>;

    /// Drops all tokens; a batch of another size may follow. Memory is freed, except by a cache of fixed size.
    fn reset(&mut self);

    /// Reorders the rows of the batch: row `i` becomes the old row `rows[i]` (i64, `(B_new,)`), as beam
    /// search and parallel samples need. A row may appear several times or not at all.
    ///
    /// # Errors
    /// If an index is out of range.
    fn reorder(&mut self, rows: &Tensor) -> Result<()>;

    /// Returns an independent copy.
    ///
    /// # Errors
    /// If memory runs out.
    fn fork(&self) -> Result<Box<dyn KvCache>>;

    /// Returns the number of bytes allocated for keys and values, including free capacity.
    fn bytes(&self) -> u64;

    /// Returns the number of bytes that one token of one row takes in all layers together; 0 before the first append.
    fn bytes_per_token(&self) -> f64;

    /// Returns the kind of cache (such as `("cache", "static")`) and the settings that a saved state depends
    /// on. [`save`](crate::save()) writes them with the state, and [`load`](crate::load()) compares them.
    fn settings(&self) -> Vec<(&'static str, String)> {
        vec![
            ("cache", "unnamed".to_owned()),
            ("layers", self.layers().to_string()),
        ]
    }

    /// Returns the contents of the cache as named tensors, for saving.
    ///
    /// # Errors
    /// An error of libtorch.
    fn state(&self) -> Result<Vec<(String, Tensor)>>;

    /// Replaces the contents by the [`state`](KvCache::state) of a cache of the same kind with the same
    /// number of layers and settings.
    ///
    /// # Errors
    /// If a tensor is missing, unknown or does not fit; the cache is then unchanged.
    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<()>;
}
