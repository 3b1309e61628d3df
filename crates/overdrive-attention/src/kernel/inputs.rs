//! What the kernels are asked to compute.

use overdrive_kernels::{Accumulate, InstructionSet, SharedSlice};

use super::dropout::Dropout;

/// Rows of numbers in a slice: row `r` of head `h` in batch `b` begins at
/// `b · batch + h · head + r · row`, and its numbers lie together.
#[derive(Debug, Clone, Copy)]
pub(crate) struct View<'a, E> {
    pub(crate) data: &'a [E],
    pub(crate) batch: usize,
    pub(crate) head: usize,
    pub(crate) row: usize,
}

impl<'a, E> View<'a, E> {
    pub(super) fn start(&self, batch: usize, head: usize, row: usize) -> usize {
        batch * self.batch + head * self.head + row * self.row
    }

    /// Row `row`, `dim` numbers long.
    pub(super) fn row(&self, batch: usize, head: usize, row: usize, dim: usize) -> &'a [E] {
        &self.data[self.start(batch, head, row)..][..dim]
    }
}

/// As [`View`], of an output that threads write to, each to rows of its own.
#[derive(Debug)]
pub(crate) struct ViewMut<'a, E> {
    shared: SharedSlice<'a, E>,
    batch: usize,
    head: usize,
    row: usize,
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
    /// No other thread has this row.
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

/// Queries that see the same keys: a row of a batch, or one sequence of a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Sequence {
    /// Its number in the batch dimension (0 for all sequences of a pack).
    pub(crate) batch: usize,
    /// Its first row among the queries.
    pub(crate) query_start: usize,
    /// Number of queries.
    pub(crate) queries: usize,
    /// Its first row among the keys.
    pub(crate) key_start: usize,
    /// Number of keys.
    pub(crate) keys: usize,
}

/// Where keys and values lie in blocks of a pool: key `k` of sequence `n` is row `k % block_size` of
/// block `tables[n][k / block_size]`, which takes the place of the batch in their views.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Pages<'a> {
    /// One for each sequence.
    pub(crate) tables: &'a [Vec<u32>],
    pub(crate) block_size: usize,
}

/// Slopes of ALiBi: that of head `h` in sequence `n` is `data[n · sequence + h]`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slopes<'a, R> {
    pub(crate) data: &'a [R],
    pub(crate) sequence: usize,
}

/// What a mask holds.
#[derive(Debug, Clone, Copy)]
pub(crate) enum BiasValues<'a, R> {
    /// Whether a key is seen.
    Keep(&'a [bool]),
    /// What is added to the score.
    Add(&'a [R]),
}

/// A mask of four dimensions (batch, head, query, key), of which some may have stride 0.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Bias<'a, R> {
    pub(crate) values: BiasValues<'a, R>,
    pub(crate) strides: [usize; 4],
}

/// What is done to the scores.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rules<'a, R> {
    pub(crate) scale: f64,
    pub(crate) softcap: Option<f64>,
    /// How many keys before its own position a query sees; all if none.
    pub(crate) left: Option<usize>,
    /// How many keys after its own position a query sees; all if none.
    pub(crate) right: Option<usize>,
    /// Whether the last query stands at the last key rather than the first at the first.
    pub(crate) bottom_right: bool,
    /// Keys at the beginning that `left` does not hide.
    pub(crate) sink_tokens: usize,
    pub(crate) slopes: Option<Slopes<'a, R>>,
    /// A logit of each head that joins the softmax without a value.
    pub(crate) sinks: Option<&'a [R]>,
    pub(crate) bias: Option<Bias<'a, R>>,
    pub(crate) dropout: Option<Dropout>,
}

/// Attention of `query` over `key` and `value` under `rules`.
#[derive(Debug)]
pub(crate) struct Problem<'a, E: Accumulate> {
    pub(crate) set: InstructionSet,
    pub(crate) sequences: Vec<Sequence>,
    pub(crate) heads: usize,
    pub(crate) kv_heads: usize,
    /// Numbers in a query and a key.
    pub(crate) key_dim: usize,
    /// Numbers in a value.
    pub(crate) value_dim: usize,
    pub(crate) query: View<'a, E>,
    pub(crate) key: View<'a, E>,
    pub(crate) value: View<'a, E>,
    /// Keys and values lie in one piece if none.
    pub(crate) pages: Option<Pages<'a>>,
    pub(crate) rules: Rules<'a, E::Acc>,
}

impl<E: Accumulate> Problem<'_, E> {
    /// Query heads that share a key head.
    pub(super) fn group(&self) -> usize {
        self.heads / self.kv_heads
    }
}

/// Which keys query `index` of a sequence sees besides the sink tokens: `start..end`.
pub(super) fn visible<R>(
    rules: &Rules<'_, R>,
    sequence: &Sequence,
    index: usize,
) -> (usize, usize) {
    let position = position(rules, sequence, index);
    // A window wider than any sequence may not overflow.
    let wide = |limit: usize| {
        i64::try_from(limit)
            .unwrap_or(i64::MAX / 4)
            .min(i64::MAX / 4)
    };
    let keys = wide(sequence.keys);
    let inside = |place: i64| usize::try_from(place.clamp(0, keys)).unwrap_or(0);
    let start = rules.left.map_or(0, |left| inside(position - wide(left)));
    let end = rules
        .right
        .map_or(sequence.keys, |right| inside(position + wide(right) + 1));
    (start, end)
}

/// The key at which query `index` stands.
pub(super) fn position<R>(rules: &Rules<'_, R>, sequence: &Sequence, index: usize) -> i64 {
    let signed = |n: usize| i64::try_from(n).unwrap_or(i64::MAX / 4);
    let offset = match rules.bottom_right {
        true => signed(sequence.keys) - signed(sequence.queries),
        false => 0,
    };
    signed(index) + offset
}
