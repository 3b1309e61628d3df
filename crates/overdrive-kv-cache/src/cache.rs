use tch::Tensor;

use crate::attend::{AttendOptions, attend_to_view};
use crate::{Error, Result};

/// What attention reads after [`KvCache::append`]: the keys and values of a layer.
///
/// Both are views that stay valid until the cache changes again; the attention of the same layer
/// and step is what they are for. The last `T` tokens are the new ones.
///
/// A cache that forgets has dropped tokens between the first [`sinks`](KvView::sinks) and token
/// number [`first`](KvView::first): column `j` is token `j` for a sink, else token
/// `first + j - sinks`.
#[derive(Debug)]
#[non_exhaustive]
pub struct KvView {
    /// Keys `(B, H, len, D)`, oldest token first; strided, not contiguous.
    pub keys: Tensor,
    /// Values `(B, H, len, D_v)`, oldest token first; strided, not contiguous.
    pub values: Tensor,
    /// How many of the first columns are attention sinks, which every query sees; 0 where nothing has
    /// been dropped.
    pub sinks: i64,
    /// The number of the first token after the sinks; equal to `sinks` where nothing has been dropped.
    pub first: i64,
    /// How many tokens before and including its own a query may see besides the sinks; `None`: all.
    pub window: Option<i64>,
}

impl KvView {
    /// A view of all tokens so far.
    pub fn new(keys: Tensor, values: Tensor) -> Self {
        KvView {
            keys,
            values,
            sinks: 0,
            first: 0,
            window: None,
        }
    }

    /// The view of a cache with a window; see the fields.
    pub fn windowed(keys: Tensor, values: Tensor, sinks: i64, first: i64, window: i64) -> Self {
        KvView {
            keys,
            values,
            sinks,
            first,
            window: Some(window),
        }
    }

    /// The columns of `mask (…, S)`, over all `S` tokens so far, that are in this view, less what the
    /// window hides from the `T` queries of its second to last dimension.
    ///
    /// # Errors
    /// When the mask has not `S` columns.
    pub(crate) fn columns_of(&self, mask: &Tensor) -> Result<Tensor> {
        let (held, all) = (self.keys.size()[2], *mask.size().last().unwrap_or(&0));
        if self.first - self.sinks + held != all {
            return Err(Error::BadMask {
                columns: all,
                tokens: self.first - self.sinks + held,
            });
        }
        let kept = if held == all {
            mask.shallow_clone()
        } else {
            let sinks = mask.f_narrow(-1, 0, self.sinks)?;
            let rest = mask.f_narrow(-1, self.first, all - self.first)?;
            Tensor::f_cat(&[sinks, rest], -1)?
        };
        let Some(window) = self.window else {
            return Ok(kept);
        };
        let tokens = mask.size().iter().rev().nth(1).copied().unwrap_or(1);
        let options = (tch::Kind::Bool, mask.device());
        let seen = Tensor::f_ones([tokens, held], options)?.f_triu(held - tokens - window + 1)?;
        let _all = seen.f_narrow(1, 0, self.sinks)?.f_fill_(1i64)?;
        Ok(kept.f_logical_and(&seen)?)
    }
}

/// The keys and values of a decoder's earlier tokens.
///
/// One step of a model calls [`attend`](KvCache::attend) (or [`append`](KvCache::append), with an
/// attention of its own) once a layer, in any order, with the same number of new tokens.
/// [`len`](KvCache::len) counts the tokens that *every* layer has been given, so during a step it is
/// still the number of past tokens. A step that failed half-way is undone by
/// `cache.truncate(cache.len())`.
pub trait KvCache: std::fmt::Debug + Send {
    /// Adds the new keys `(B, H, T, D)` and values `(B, H, T, D_v)` of `layer`, and returns what that
    /// layer's attention reads. The new entries are copied; the caller keeps its tensors.
    ///
    /// # Errors
    /// When `layer` does not exist, shapes, kind or device do not fit, a gradient is required, or the
    /// cache is full; [`Error::NotDense`] from a cache that cannot show all rows as one tensor.
    fn append(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<KvView>;

    /// Adds the new keys and values as [`append`](KvCache::append) does, and returns the attention of
    /// `query (B, H, T, D)`, the same new tokens, over what the layer then holds: `(B, H, T, D_v)`.
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

    /// How many layers the cache has.
    fn layers(&self) -> usize;

    /// Tokens that every layer has been given: the position of the next token.
    fn len(&self) -> i64;

    /// Whether no token is held.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The most tokens the cache can take, or `None` where it grows or forgets.
    fn max_len(&self) -> Option<i64> {
        None
    }

    /// The most tokens a query can see through this cache, where that is bounded however long the text:
    /// a model with rotary positions may then go on beyond its context.
    fn span(&self) -> Option<i64> {
        None
    }

    /// Forgets all but the first `len` tokens of every layer, without giving memory back.
    ///
    /// # Errors
    /// When `len` is negative or more than [`len`](KvCache::len), or tokens that are needed then have
    /// been dropped.
    fn truncate(&mut self, len: i64) -> Result<()>;

    /// Forgets every token; another batch size may follow. Memory is given back, except by a cache
    /// whose point is to keep it.
    fn reset(&mut self);

    /// Reorders the rows of the batch: row `i` becomes the old row `rows[i]` (i64, `(B_new,)`), as
    /// beam search and parallel samples need. A row may appear several times or not at all.
    ///
    /// # Errors
    /// When an index is out of range.
    fn reorder(&mut self, rows: &Tensor) -> Result<()>;

    /// A copy that goes its own way.
    ///
    /// # Errors
    /// When memory runs out.
    fn fork(&self) -> Result<Box<dyn KvCache>>;

    /// Bytes allocated for keys and values, capacity included.
    fn bytes(&self) -> u64;

    /// Bytes that one more token of one row takes over all layers; 0 before the first append.
    fn bytes_per_token(&self) -> f64;

    /// The kind of cache (`("cache", "growing")` and the like) and those of its settings that a saved
    /// state depends on: what [`save`](crate::save()) writes beside the state, and
    /// [`load`](crate::load()) compares.
    fn settings(&self) -> Vec<(&'static str, String)> {
        vec![
            ("cache", "unnamed".to_owned()),
            ("layers", self.layers().to_string()),
        ]
    }

    /// All that is held, as named tensors, to be written to a file.
    ///
    /// # Errors
    /// An error of libtorch.
    fn state(&self) -> Result<Vec<(String, Tensor)>>;

    /// Takes what [`state`](KvCache::state) of a cache of the same kind, layers and settings gave, in
    /// place of what is held.
    ///
    /// # Errors
    /// When a tensor is missing, unknown or does not fit; nothing is changed then.
    fn load_state(&mut self, state: &[(String, Tensor)]) -> Result<()>;
}
