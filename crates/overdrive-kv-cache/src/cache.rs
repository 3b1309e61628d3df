use tch::Tensor;

use crate::Result;

/// What attention reads after [`KvCache::append`]: the keys and values of all tokens so far.
///
/// Both are views that stay valid until the cache changes again; the attention of the same layer
/// and step is what they are for.
#[derive(Debug)]
#[non_exhaustive]
pub struct KvView {
    /// Keys `(B, H, len, D)`, oldest token first; strided, not contiguous.
    pub keys: Tensor,
    /// Values `(B, H, len, D_v)`, oldest token first; strided, not contiguous.
    pub values: Tensor,
}

impl KvView {
    /// A view of `keys` and `values`, for those who write a cache of their own.
    pub fn new(keys: Tensor, values: Tensor) -> Self {
        KvView { keys, values }
    }
}

/// The keys and values of a decoder's earlier tokens.
///
/// One step of a model calls [`append`](KvCache::append) once a layer, in any order, with the same
/// number of new tokens. [`len`](KvCache::len) counts the tokens that *every* layer holds, so during
/// a step it is still the number of past tokens. A step that failed half-way is undone by
/// `cache.truncate(cache.len())`.
pub trait KvCache: std::fmt::Debug + Send {
    /// Adds the new keys `(B, H, T, D)` and values `(B, H, T, D_v)` of `layer`, and returns all of
    /// that layer so far. The new entries are copied; the caller keeps its tensors.
    ///
    /// # Errors
    /// When `layer` does not exist, shapes, kind or device do not fit, or a gradient is required.
    fn append(&mut self, layer: usize, keys: &Tensor, values: &Tensor) -> Result<KvView>;

    /// How many layers the cache has.
    fn layers(&self) -> usize;

    /// Tokens that every layer holds: the position of the next token.
    fn len(&self) -> i64;

    /// Whether no token is held.
    fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The most tokens the cache can take, or `None` where it grows.
    fn max_len(&self) -> Option<i64> {
        None
    }

    /// Forgets all but the first `len` tokens of every layer, without giving memory back.
    ///
    /// # Errors
    /// When `len` is negative or more than [`len`](KvCache::len).
    fn truncate(&mut self, len: i64) -> Result<()>;

    /// Forgets every token and gives the memory back; another batch size may follow.
    fn reset(&mut self);

    /// Reorders the rows of the batch: row `i` becomes the old row `rows[i]` (i64, `(B_new,)`), as
    /// beam search and parallel samples need. A row may appear several times or not at all.
    ///
    /// # Errors
    /// When an index is out of range.
    fn reorder(&mut self, rows: &Tensor) -> Result<()>;

    /// Bytes allocated for keys and values, capacity included.
    fn bytes(&self) -> u64;
}
