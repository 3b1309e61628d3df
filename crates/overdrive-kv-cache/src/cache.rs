use tch::Tensor;

use crate::Result;
use crate::attend::{AttendOptions, attend_to_view};

/// The keys and values of a layer that attention reads after [`KvCache::append`].
///
/// Both are views that stay valid until the cache changes again. They serve the attention of the same
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
    /// The number of tokens, its own included, that a query sees besides the sinks; `None`: all.
    pub window: Option<i64>,
}

impl KvView {
    /// Returns a view of all tokens so far.
    pub fn new(keys: Tensor, values: Tensor) -> Self {
        KvView {
            keys,
            values,
            sinks: 0,
            first: 0,
            window: None,
        }
    }

    /// Returns the view of a cache with a window; the arguments are the fields.
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
    /// that the window hides from the `T` queries of the second to last dimension become `false`.
    ///
    /// # Errors
    /// When the mask does not have `S` columns.
    pub(crate) fn columns_of(&self, mask: &Tensor) -> Result<Tensor> {
        let (held, all) = (self.keys.size()[2], *mask.size().last().unwrap_or(&0));
        if self.first - self.sinks + held != all {
            let tokens = self.first - self.sinks + held;
            let expected =
                format!("(…, {tokens}): one column for each token that the cache has been given");
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

    /// Returns the number of tokens of a row of the batch; `None` if the rows do not fit.
    pub fn tokens(&self) -> Option<usize> {
        let of_batch = self.rows.len().checked_div(self.batch)?;
        let tokens = of_batch.checked_div(self.width())?;
        (tokens * self.width() * self.batch == self.rows.len()).then_some(tokens)
    }
}

/// The keys and values of a decoder's earlier tokens.
///
/// One step of a model calls [`attend`](KvCache::attend) once a layer, in any order, with the same
/// number of new tokens; a layer with an attention of its own calls [`append`](KvCache::append)
/// instead. [`len`](KvCache::len) counts the tokens that *every* layer has been given, so during a step
/// it is still the number of past tokens. `cache.truncate(cache.len())` undoes a step that failed
/// half-way.
pub trait KvCache: std::fmt::Debug + Send {
    /// Appends the new keys `(B, H, T, D)` and values `(B, H, T, D_v)` of `layer`, and returns the keys
    /// and values that the attention of that layer reads. The new tokens are copied; the caller keeps
    /// its tensors.
    ///
    /// # Errors
    /// When `layer` does not exist, shapes, dtype or device do not fit, a gradient is required, or the
    /// cache is full; [`Error::NotDense`](crate::Error::NotDense) from a cache that cannot show all rows as one tensor.
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

    /// Does what [`attend`](KvCache::attend) does for a few tokens in slices, and writes rows `(B · T, H · D)` to
    /// `output`. Returns `false`, and changes nothing, where a cache cannot; the default is that none can.
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

    /// Returns the number of layers.
    fn layers(&self) -> usize;

    /// Returns the number of tokens that every layer has been given, which is the position of the next
    /// token.
    fn len(&self) -> i64;

    /// Returns `true` if no token is held.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the largest number of tokens that the cache can take, or `None` if it grows or drops old
    /// tokens.
    fn max_len(&self) -> Option<i64> {
        None
    }

    /// Returns the largest number of tokens that a query can see through this cache, if that is bounded
    /// however long the sequence becomes. A model with rotary positions may then generate beyond its
    /// context.
    fn span(&self) -> Option<i64> {
        None
    }

    /// Drops all but the first `len` tokens of every layer, without giving memory back.
    ///
    /// # Errors
    /// When `len` is negative or more than [`len`](KvCache::len), or when tokens that would be needed
    /// have been dropped.
    fn truncate(&mut self, len: i64) -> Result<()>;

    /// Drops every token; a batch of another size may follow. Memory is given back, except by a cache
    /// of fixed size.
    fn reset(&mut self);

    /// Reorders the rows of the batch: row `i` becomes the old row `rows[i]` (i64, `(B_new,)`), as beam
    /// search and parallel samples need. A row may appear several times or not at all.
    ///
    /// # Errors
    /// When an index is out of range.
    fn reorder(&mut self, rows: &Tensor) -> Result<()>;

    /// Returns an independent copy.
    ///
    /// # Errors
    /// When memory runs out.
    fn fork(&self) -> Result<Box<dyn KvCache>>;

    /// Returns the bytes allocated for keys and values, free capacity included.
    fn bytes(&self) -> u64;

    /// Returns the bytes that one more token of one row takes over all layers; 0 before the first
    /// append.
    fn bytes_per_token(&self) -> f64;

    /// Returns the kind of cache (`("cache", "static")` and the like) and those of its settings on
    /// which a saved state depends. [`save`](crate::save()) writes them beside the state, and
    /// [`load`](crate::load()) compares them.
    fn settings(&self) -> Vec<(&'static str, String)> {
        vec![
            ("cache", "unnamed".to_owned()),
            ("layers", self.layers().to_string()),
        ]
    }

    /// Returns everything that is held, as named tensors, to be written to a file.
    ///
    /// # Errors
    /// An error of libtorch.
    fn state(&self) -> Result<Vec<(String, Tensor)>>;

    /// Replaces what is held by the [`state`](KvCache::state) of a cache of the same kind, layers and
    /// settings.
    ///
    /// # Errors
    /// When a tensor is missing, unknown or does not fit; the cache is then unchanged.
    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<()>;
}
