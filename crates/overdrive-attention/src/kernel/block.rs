//! A block of queries that share keys, and the blocks of keys that it sees.

use overdrive_kernels::{Accumulate, Real};

use super::eight_bit::{Stored, dequantize_rows};
use super::inputs::{AttentionInputs, Sequence, View, position, visible};
use super::matmul::Rows;
use super::{dropout, scores};

/// The largest number of queries in a block: four vectors of sixteen, so that a score tile and its operands
/// stay in the first two levels of cache.
pub(super) const ROWS: usize = 64;
/// The largest number of keys in a block: a multiple of the six rows of a register tile.
pub(super) const KEYS: usize = 96;

/// The rows `first..first + rows` of the queries of one key head, where row `r` is query `r / group` of
/// head `kv_head · group + r % group`.
#[derive(Debug, Clone, Copy)]
pub(super) struct RowBlock<'p, 'a, E: Accumulate> {
    pub(super) problem: &'p AttentionInputs<'a, E>,
    pub(super) sequence: Sequence,
    /// The index of the sequence.
    pub(super) index: usize,
    pub(super) kv_head: usize,
    pub(super) first: usize,
    pub(super) rows: usize,
    /// `rows`, rounded up to whole vectors.
    pub(super) lanes: usize,
}

impl<'p, 'a, E: Accumulate> RowBlock<'p, 'a, E> {
    pub(super) fn new(
        problem: &'p AttentionInputs<'a, E>,
        index: usize,
        kv_head: usize,
        first: usize,
    ) -> Self {
        let sequence = problem.sequences[index];
        let end = sequence.queries * problem.group();
        RowBlock::within(problem, index, kv_head, first, end)
    }

    /// Creates a block that ends at or before row `end`.
    pub(super) fn within(
        problem: &'p AttentionInputs<'a, E>,
        index: usize,
        kv_head: usize,
        first: usize,
        end: usize,
    ) -> Self {
        let sequence = problem.sequences[index];
        let rows = ROWS.min(end - first);
        RowBlock {
            problem,
            sequence,
            index,
            kv_head,
            first,
            rows,
            // Whole vectors, so that no kernel needs a masked or scalar tail over rows.
            lanes: rows.next_multiple_of(problem.set.lanes::<E::Acc>()),
        }
    }

    /// Returns the query (within the sequence) and head of row `row` of the block.
    pub(super) fn query_and_head(&self, row: usize) -> (usize, usize) {
        let (group, row) = (self.problem.group(), self.first + row);
        // The heads of a query are adjacent rows: a decoded token then fills a block with its whole
        // group, and each key is read once for all of them.
        (row / group, self.kv_head * group + row % group)
    }

    /// Returns the row of a view of queries that belongs to row `row` of the block.
    pub(super) fn query_row<'v, T>(&self, view: &View<'v, T>, row: usize, dim: usize) -> &'v [T] {
        let (query, head) = self.query_and_head(row);
        view.row(
            self.sequence.batch,
            head,
            self.sequence.query_start + query,
            dim,
        )
    }

    /// Writes the rows of `view`, times `factor`, as the columns of `to (dim, lanes)`; columns past the
    /// last row are zero.
    pub(super) fn pack_columns(
        &self,
        view: &View<'_, E>,
        dim: usize,
        factor: E::Acc,
        to: &mut [E::Acc],
    ) {
        // Lanes without a row are computed as well; zeros keep them finite.
        if self.rows < self.lanes {
            to[..dim * self.lanes].fill(E::Acc::ZERO);
        }
        for row in 0..self.rows {
            let from = self.query_row(view, row, dim);
            let columns = to[row..].iter_mut().step_by(self.lanes);
            for (to, from) in columns.zip(from) {
                *to = from.to_acc() * factor;
            }
        }
    }

    /// Writes the rows of `view`, times `factor`, as the rows of `to (lanes, width)`; elements past the
    /// last row or column are zero.
    pub(super) fn pack_rows(
        &self,
        view: &View<'_, E>,
        dim: usize,
        factor: E::Acc,
        to: &mut [E::Acc],
        width: usize,
    ) {
        // Rows past the last one enter the sums of dK and dV with weights of 0; 0 · NaN would be NaN.
        to[..self.lanes * width].fill(E::Acc::ZERO);
        for (row, to) in (0..self.rows).zip(to.chunks_exact_mut(width)) {
            for (to, from) in to.iter_mut().zip(self.query_row(view, row, dim)) {
                *to = from.to_acc() * factor;
            }
        }
    }

    /// Returns the factor of the queries with which a product is what [`scores::Adjustment::scores`] expects.
    pub(super) fn query_factor(&self) -> E::Acc {
        let rules = &self.problem.rules;
        E::Acc::of(match rules.softcap {
            // Exponentials to base 2 need scores times log2(e), which costs nothing if folded into the queries.
            None => rules.scale * std::f64::consts::LOG2_E,
            // tanh takes the score over the cap; the cap and log2(e) are multiplied in after it.
            Some(cap) => rules.scale / cap,
        })
    }

    /// Returns the keys that some row sees, as at most two ranges in order: sink tokens, then the window.
    pub(super) fn spans(&self) -> [(usize, usize); 2] {
        let rules = &self.problem.rules;
        // Both limits increase with the query: the first row sees the earliest key, the last row the latest.
        let (start, _) = visible(rules, &self.sequence, self.query_and_head(0).0);
        let (_, end) = visible(rules, &self.sequence, self.query_and_head(self.rows - 1).0);
        // Sink tokens that the window covers must not be visited twice.
        let sinks = rules.limits.sink_tokens.min(end);
        [(0, sinks), (start.max(sinks).min(end), end)]
    }

    /// Returns the blocks of keys `(start, count)` that some row sees, among keys `from..to`.
    pub(super) fn key_blocks(
        &self,
        from: usize,
        to: usize,
    ) -> impl Iterator<Item = (usize, usize)> + use<E> {
        self.spans().into_iter().flat_map(move |(start, end)| {
            let (start, end) = (start.max(from), end.min(to));
            // The bounds do not depend on what the other rows see, so the order of a row's sums does not either.
            let first = if start < end {
                start / KEYS * KEYS
            } else {
                end
            };
            (first..end).step_by(KEYS).map(move |at| {
                let from = at.max(start);
                (from, (at + KEYS).min(end) - from)
            })
        })
    }

    /// Returns the batch, head and row of key `key` of the sequence in a view of keys or values.
    fn key_place(&self, key: usize) -> (usize, usize, usize) {
        match &self.problem.pages {
            None => {
                let row = self.sequence.key_start + key;
                (self.sequence.batch, self.kv_head, row)
            }
            Some(pages) => {
                let block = pages.tables[self.index][key / pages.block_size];
                (block as usize, self.kv_head, key % pages.block_size)
            }
        }
    }

    /// Returns the index of the first element of key `key` of the sequence in a view of keys or values.
    fn key_at(&self, view: &View<'_, E>, key: usize) -> usize {
        let (batch, head, row) = self.key_place(key);
        view.start(batch, head, row)
    }

    /// Returns the number of keys that are evenly spaced between multiples of it: those of a block of a pool, if the
    /// keys are in a pool.
    pub(super) fn run_length(&self) -> usize {
        self.problem
            .pages
            .map_or(usize::MAX, |pages| pages.block_size)
    }

    /// Returns the adjustment of the scores of these rows.
    pub(super) fn adjustment(&self) -> scores::Adjustment<'p, E> {
        let rules = &self.problem.rules;
        let mut adjustment = scores::Adjustment {
            rules,
            set: self.problem.set,
            sequence: self.sequence,
            lanes: self.lanes,
            rows: self.rows,
            queries_and_heads: [(0, 0); ROWS],
            ends: [0; ROWS],
            starts: [0; ROWS],
            positions: [0; ROWS],
            slopes: [E::Acc::ZERO; ROWS],
            dropout: None,
        };
        for row in 0..self.rows {
            let (query, head) = self.query_and_head(row);
            adjustment.queries_and_heads[row] = (query, head);
            let (start, end) = visible(rules, &self.sequence, query);
            (adjustment.starts[row], adjustment.ends[row]) = (start, end);
            adjustment.positions[row] = position(rules, &self.sequence, query);
            if let Some(slopes) = &rules.slopes {
                adjustment.slopes[row] = slopes.data[self.index * slopes.sequence + head];
            }
        }
        adjustment.dropout = rules.dropout.map(|dropout| self.row_keys(&dropout));
        adjustment
    }

    fn row_keys(&self, dropout: &dropout::Dropout) -> dropout::RowKeys {
        let ids = (0..self.rows).map(|row| {
            let (query, head) = self.query_and_head(row);
            // The head is in the upper half and the query in the lower, so that no two rows have the same id.
            let lane = (self.sequence.batch * self.problem.heads + head) as u64;
            (lane << 32) + (self.sequence.query_start + query) as u64
        });
        dropout.rows(ids)
    }
}

/// Returns the keys (or values) `start..start + count` of the block's head: in place if they need no
/// conversion and, with `whole_vectors`, fill whole vectors; else copied into `scratch` with rows of
/// `width`, padded with zeros.
pub(super) fn key_rows<'s, E: Accumulate>(
    block: &RowBlock<'_, 's, E>,
    stored: &Stored<'s, E>,
    (start, count): (usize, usize),
    (dim, width): (usize, usize),
    whole_vectors: bool,
    scratch: &'s mut [E::Acc],
) -> Rows<'s, E::Acc> {
    if count == 0 {
        return Rows {
            data: &[],
            distance: width,
            count,
        };
    }
    let run = block.run_length();
    // Inside a block of a pool keys are evenly spaced; from one block to the next they are not.
    let in_one_piece = start % run + count <= run;
    if let Stored::Elements(view) = stored
        && in_one_piece
        && (!whole_vectors || dim == width)
    {
        let from = block.key_at(view, start);
        let reach = (count - 1) * view.row + dim;
        // f32 and f64 are summed in their own dtype; half precisions are widened into `scratch`.
        if let Some(data) = E::as_acc(&view.data[from..from + reach]) {
            return Rows {
                data,
                distance: view.row,
                count,
            };
        }
    }
    let mut first = start;
    while first < start + count {
        let together = (run - first % run).min(start + count - first);
        let to = &mut scratch[(first - start) * width..][..together * width];
        let place = first;
        first += together;
        let view = match stored {
            Stored::Elements(view) => view,
            Stored::Quantized { codes, scales } => {
                // `PagedCall` refuses queries of f64, the only elements that are not computed in f32.
                if let Some(to) = E::Acc::as_f32_mut(to) {
                    let place = block.key_place(place);
                    let set = block.problem.set;
                    dequantize_rows(set, (codes, scales), place, (dim, width), to);
                }
                continue;
            }
        };
        let from = block.key_at(view, place);
        // Rows without gaps are one long row.
        if view.row == dim && dim == width {
            E::widen(block.problem.set, &view.data[from..][..to.len()], to);
            continue;
        }
        for (key, to) in to.chunks_exact_mut(width).enumerate() {
            let (numbers, rest) = to.split_at_mut(dim);
            let from = &view.data[from + key * view.row..][..dim];
            E::widen(block.problem.set, from, numbers);
            rest.fill(E::Acc::ZERO);
        }
    }
    Rows {
        data: &scratch[..count * width],
        distance: width,
        count,
    }
}
