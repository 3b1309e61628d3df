//! The inputs of the kernels.

use overdrive_kernels::tensors::{Fresh, Strided};
use overdrive_kernels::{Accumulate, InstructionSet, SharedSlice};
use overdrive_sys::raw::{self, BoolByte};

use super::dropout::Dropout;
use super::eight_bit::Stored;
use crate::Result;

/// Rows in a slice: row `r` of head `h` in batch `b` begins at
/// `b · batch + h · head + r · row`, and is contiguous.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a, E> {
    pub(crate) data: &'a [E],
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) row: usize,
}

impl<'a, E: raw::Element> View<'a, E> {
    /// Returns the rows of a tensor (batch, head, row, element) whose last dimension is contiguous.
    pub(crate) fn of(tensor: &'a Strided) -> Result<Self> {
        let [batch, head, row, _] = tensor.strides;
        Ok(View {
            data: tensor.elements()?,
            batch,
            head,
            row,
        })
    }
}

impl<'a, E> View<'a, E> {
    pub(super) fn start(&self, batch: usize, head: usize, row: usize) -> usize {
        batch * self.batch + head * self.head + row * self.row
    }

    /// Returns row `row`, of `dim` elements.
    pub(super) fn row(&self, batch: usize, head: usize, row: usize, dim: usize) -> &'a [E] {
        &self.data[self.start(batch, head, row)..][..dim]
    }
}

/// A [`View`] of an output to which threads write, each to its own rows.
#[derive(Debug)]
pub(crate) struct ViewMut<'a, E> {
    shared: SharedSlice<'a, E>,
    batch: usize,
    head: usize,
    row: usize,
}

impl<'a, E: raw::Element> ViewMut<'a, E> {
    /// Returns the rows of a tensor (batch, rows, heads, element), as (batch, head, row).
    pub(crate) fn by_row(tensor: &'a mut Fresh<E>) -> Result<Self> {
        let [_, rows, heads, dim] = sizes(tensor);
        Ok(ViewMut::new(
            tensor.elements_mut()?,
            rows * heads * dim,
            dim,
            heads * dim,
        ))
    }

    /// Returns the elements of a tensor (batch, heads, rows), as rows of one element.
    pub(crate) fn by_head(tensor: &'a mut Fresh<E>) -> Result<Self> {
        let [_, heads, rows] = sizes(tensor);
        Ok(ViewMut::new(tensor.elements_mut()?, heads * rows, rows, 1))
    }
}

fn sizes<E: raw::Element, const N: usize>(tensor: &Fresh<E>) -> [usize; N] {
    let size = tensor.size();
    std::array::from_fn(|at| usize_of(size[at]))
}

impl<'a, E> ViewMut<'a, E> {
    pub(crate) fn new(data: &'a mut [E], batch: usize, head: usize, row: usize) -> Self {
        ViewMut {
            shared: SharedSlice::new(data),
            batch,
            head,
            row,
        }
    }

    /// # Safety
    /// No other thread accesses this row.
    #[allow(clippy::mut_from_ref, reason = "as `SharedSlice::range_mut`")]
    pub(super) unsafe fn row_mut(
        &self,
        batch: usize,
        head: usize,
        row: usize,
        dim: usize,
    ) -> &mut [E] {
        let start = batch * self.batch + head * self.head + row * self.row;
        // SAFETY: the caller's contract.
        unsafe { self.shared.range_mut(start..start + dim) }
    }
}

/// The queries that see the same keys: a row of a batch, or one sequence of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sequence {
    /// The index in the batch dimension (0 for all sequences of a pack).
    pub(crate) batch: usize,
    /// The first row among the queries.
    pub(crate) query_start: usize,
    /// The number of queries.
    pub(crate) queries: usize,
    /// The first row among the keys.
    pub(crate) key_start: usize,
    /// The number of keys.
    pub(crate) keys: usize,
}

/// The positions of keys and values in the blocks of a pool: key `k` of sequence `n` is row `k % block_size` of
/// block `tables[n][k / block_size]`; the block is the batch index in their views.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pages<'a> {
    /// The block table of each sequence.
    pub(crate) tables: &'a [Vec<u32>],
    pub(crate) block_size: usize,
}

/// The slopes of ALiBi: that of head `h` in sequence `n` is `data[n · sequence + h]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slopes<'a, R> {
    pub(crate) data: &'a [R],
    pub(crate) sequence: usize,
}

/// The values of a mask.
#[derive(Debug, Clone, Copy)]
pub(crate) enum BiasValues<'a, R> {
    /// `true` where a key is seen.
    Keep(&'a [BoolByte]),
    /// The addends of the scores.
    Add(&'a [R]),
}

/// A mask of four dimensions (batch, head, query, key), of which some may have stride 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bias<'a, R> {
    pub(crate) values: BiasValues<'a, R>,
    pub(crate) strides: [usize; 4],
}

/// The keys that a query sees; by default, all of them.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Limits {
    /// The number of keys before its own position that a query sees; `None`: all.
    pub(crate) left: Option<usize>,
    /// The number of keys after its own position that a query sees; `None`: all. Causality is 0.
    pub(crate) right: Option<usize>,
    /// The number of keys at the beginning that `left` does not hide; 0 without it.
    pub(crate) sink_tokens: usize,
}

/// Returns a limit as a distance between positions: at most a quarter of the range, so that a position plus a limit cannot
/// overflow.
pub(crate) fn as_limit(limit: usize) -> i64 {
    i64::try_from(limit).map_or(i64::MAX / 4, |limit| limit.min(i64::MAX / 4))
}

/// Returns a size of a tensor, which is never negative.
pub(crate) fn usize_of(size: i64) -> usize {
    usize::try_from(size).unwrap_or(0)
}

/// The rules by which scores are computed and keys are hidden.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules<'a, R> {
    pub(crate) scale: f64,
    pub(crate) softcap: Option<f64>,
    pub(crate) limits: Limits,
    /// If `true`, the last query is at the position of the last key; else the first query at that of the first key.
    pub(crate) bottom_right: bool,
    pub(crate) slopes: Option<Slopes<'a, R>>,
    /// A logit for each head that takes part in the softmax without a value.
    pub(crate) sinks: Option<&'a [R]>,
    pub(crate) bias: Option<Bias<'a, R>>,
    pub(crate) dropout: Option<Dropout>,
}

/// The attention of `query` over `key` and `value` under `rules`.
#[derive(Debug)]
pub(crate) struct AttentionInputs<'a, E: Accumulate> {
    pub(crate) set: InstructionSet,
    pub(crate) sequences: Vec<Sequence>,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// The number of elements of a query and a key.
    pub(crate) key_dim: usize,
    /// The number of elements of a value.
    pub(crate) value_dim: usize,
    pub(crate) query: View<'a, E>,
    pub(crate) key: Stored<'a, E>,
    pub(crate) value: Stored<'a, E>,
    /// The block tables, if keys and values are in a pool.
    pub(crate) pages: Option<Pages<'a>>,
    pub(crate) rules: Rules<'a, E::Acc>,
}

impl<E: Accumulate> AttentionInputs<'_, E> {
    /// Returns the query heads that share a key head.
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Returns the keys `start..end` that query `index` of a sequence sees besides the sink tokens.
pub(super) fn visible<R>(
    rules: &Rules<'_, R>,
    sequence: &Sequence,
    index: usize,
) -> (usize, usize) {
    let position = position(rules, sequence, index);
    let keys = as_limit(sequence.keys);
    let inside = |place: i64| usize_of(place.clamp(0, keys));
    let Limits { left, right, .. } = rules.limits;
    let start = left.map_or(0, |left| inside(position - as_limit(left)));
    let end = right.map_or(sequence.keys, |right| {
        inside(position + as_limit(right) + 1)
    });
    (start, end)
}

/// Returns the position of query `index` among the keys.
pub(super) fn position<R>(rules: &Rules<'_, R>, sequence: &Sequence, index: usize) -> i64 {
    let signed = |n: usize| i64::try_from(n).unwrap_or(i64::MAX / 4);
    // With fewer queries than keys, the queries belong to the last keys, as in decoding.
    let offset = match rules.bottom_right {
        true => signed(sequence.keys) - signed(sequence.queries),
        false => 0,
    };
    signed(index) + offset
}
