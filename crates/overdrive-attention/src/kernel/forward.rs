//! The forward pass: output and log-sum-exp of every query.

use std::f64::consts::{LN_2, LOG2_E};

use overdrive_kernels::{Accumulate, Real, SharedSlice, threads};

use super::block::{KEYS, ROWS, RowBlock, key_rows};
use super::inputs::{AttentionInputs, ViewMut};
use super::matmul::{FEW_ROWS, Matmul, Rows, Start, dot_products, matmul};
use super::scores::softmax;

/// The largest number of rows for which keys of a pool are multiplied block by block instead of gathered.
const FEW_LANES: usize = 16;
/// The number of keys whose weighted values are summed on their own: a multiple of [`KEYS`].
//
// The threads share the segments of few queries. Each segment adds a merge of its sums, so it has several blocks of keys.
// Segments begin at multiples of this number, whatever else is computed, so that a query has the same bits alone and
// beside others.
const SEGMENT: usize = 5 * KEYS;

/// The number of multiplications below which waking another thread takes longer than it saves, a few microseconds of
/// one thread.
const MIN_PARALLEL_PRODUCTS: usize = 64 << 10;

/// The outputs of the forward pass.
#[derive(Debug)]
pub(crate) struct ForwardOutputs<'a, E: Accumulate> {
    /// The output, with the rows of the query and `value_dim` elements in each.
    pub(crate) output: ViewMut<'a, E>,
    /// The natural log-sum-exp of each row of the query, `-inf` where a query sees no key.
    pub(crate) logsumexp: ViewMut<'a, E::Acc>,
}

/// A block of rows.
#[derive(Debug, Clone, Copy)]
struct Task {
    sequence: usize,
    kv_head: usize,
    first: usize,
}

/// The division of the work into tasks.
struct Plan {
    tasks: Vec<Task>,
    /// The number of segments of the longest keys.
    segments: usize,
    /// If `true`, the segments of a task are computed by several threads.
    shares_segments: bool,
    /// The number of products of all queries with all keys and values.
    products: usize,
}

impl Plan {
    fn new<E: Accumulate>(problem: &AttentionInputs<'_, E>) -> Plan {
        let mut tasks = Vec::new();
        let (mut most_keys, mut scores) = (0, 0);
        for (index, sequence) in problem.sequences.iter().enumerate() {
            let rows = sequence.queries * problem.group();
            most_keys = most_keys.max(sequence.keys);
            scores += rows * problem.kv_heads * sequence.keys;
            for kv_head in 0..problem.kv_heads {
                // From the last block on, so that under a causal mask the longest come first and the
                // threads finish together.
                let firsts = (0..rows.div_ceil(ROWS)).rev().map(|block| block * ROWS);
                tasks.extend(firsts.map(|first| Task {
                    sequence: index,
                    kv_head,
                    first,
                }));
            }
        }
        let (workers, segments) = (threads::workers(), most_keys.div_ceil(SEGMENT));
        Plan {
            // With two tasks for each thread, one slow task does not delay all threads.
            shares_segments: workers > 1 && segments > 1 && tasks.len() < workers * 2,
            tasks,
            segments,
            products: scores.saturating_mul(problem.key_dim + problem.value_dim),
        }
    }

    /// Returns the size of the results that threads share.
    fn shared_results(&self, sizes: &Sizes) -> usize {
        match self.shares_segments {
            true => self.tasks.len() * self.segments * sizes.result(),
            false => 0,
        }
    }
}

/// Returns the keys `(from, to)` of a segment; `None` if the block sees none of them.
fn segment<E: Accumulate>(block: &RowBlock<'_, '_, E>, number: usize) -> Option<(usize, usize)> {
    let (from, to) = (number * SEGMENT, (number + 1) * SEGMENT);
    let mut blocks = block.key_blocks(from, to);
    blocks.next().map(|_| (from, to))
}

/// The sizes of the workspace of one task, in elements.
struct Sizes {
    key_width: usize,
    value_width: usize,
}

impl Sizes {
    fn of<E: Accumulate>(problem: &AttentionInputs<'_, E>) -> Sizes {
        let lanes = problem.set.lanes::<E::Acc>();
        Sizes {
            key_width: problem.key_dim.next_multiple_of(lanes),
            value_width: problem.value_dim.next_multiple_of(lanes),
        }
    }

    /// Returns the workspace of a segment: queries, scores, sums, a factor for each row, converted keys and values.
    fn segment(&self) -> usize {
        let rows = ROWS * (self.key_width + KEYS + self.value_width + 1);
        rows + KEYS * (self.key_width + self.value_width)
    }

    /// Returns the size of a result: weighted sums of values, row by row, and the maximum and the sum of each row.
    fn result(&self) -> usize {
        ROWS * (self.value_width + 2)
    }

    /// Splits a result into rows, maxima and sums.
    fn parts<'s, R>(&self, result: &'s [R]) -> (&'s [R], &'s [R], &'s [R]) {
        let (rows, of_row) = result.split_at(ROWS * self.value_width);
        let (maxima, sums) = of_row.split_at(ROWS);
        (rows, maxima, sums)
    }

    /// Splits a result into rows, maxima and sums.
    fn parts_mut<'s, R>(&self, result: &'s mut [R]) -> (&'s mut [R], &'s mut [R], &'s mut [R]) {
        let (rows, of_row) = result.split_at_mut(ROWS * self.value_width);
        let (maxima, sums) = of_row.split_at_mut(ROWS);
        (rows, maxima, sums)
    }
}

/// Returns the number of elements that [`forward`] needs as workspace.
pub(crate) fn forward_workspace<E: Accumulate>(problem: &AttentionInputs<'_, E>) -> usize {
    let (plan, sizes) = (Plan::new(problem), Sizes::of(problem));
    let units = match plan.shares_segments {
        true => plan.tasks.len() * plan.segments,
        false => plan.tasks.len(),
    };
    // Of a thread: a segment, its result, and the merged result.
    let of_thread = sizes.segment() + 2 * sizes.result();
    threads::workers().min(units) * of_thread + plan.shared_results(&sizes)
}

/// Computes `outputs`; `workspace` has [`forward_workspace`] elements.
pub(crate) fn forward<E: Accumulate>(
    problem: &AttentionInputs<'_, E>,
    outputs: &ForwardOutputs<'_, E>,
    workspace: &mut [E::Acc],
) {
    let (plan, sizes) = (Plan::new(problem), Sizes::of(problem));
    let count = plan.tasks.len();
    let block = |task: &Task| RowBlock::new(problem, task.sequence, task.kv_head, task.first);
    let (results, workspace) = workspace.split_at_mut(plan.shared_results(&sizes));
    let results = SharedSlice::new(results);
    let range = |task: usize, number: usize| {
        let at = (task * plan.segments + number) * sizes.result();
        at..at + sizes.result()
    };
    if plan.shares_segments {
        let units = count * plan.segments;
        threads::for_each_task(units, true, workspace, |unit, scratch| {
            let (task, number) = (unit / plan.segments, unit % plan.segments);
            let block = block(&plan.tasks[task]);
            if let Some(keys) = segment(&block, number) {
                // SAFETY: one segment each.
                let result = unsafe { results.range_mut(range(task, number)) };
                Workspace::new(&block, &sizes, scratch, result).sweep(&block, keys);
            }
        });
    }
    let parallel = plan.shares_segments || plan.products > MIN_PARALLEL_PRODUCTS;
    threads::for_each_task(count, parallel, workspace, |task, scratch| {
        let block = block(&plan.tasks[task]);
        let (result, scratch) = scratch.split_at_mut(sizes.result());
        let (merged, scratch) = scratch.split_at_mut(sizes.result());
        let rows = block.rows * sizes.value_width;
        let (sums_of_values, maxima, sums) = sizes.parts_mut(merged);
        sums_of_values[..rows].fill(E::Acc::ZERO);
        maxima.fill(E::Acc::LOWEST);
        sums.fill(E::Acc::ZERO);
        // In the order of the segments, so that results are reproducible bit for bit.
        for number in 0..plan.segments {
            let Some(keys) = segment(&block, number) else {
                continue;
            };
            let result = if plan.shares_segments {
                // SAFETY: the segments of one task each.
                unsafe { results.range_mut(range(task, number)) }
            } else {
                Workspace::new(&block, &sizes, scratch, result).sweep(&block, keys);
                &mut *result
            };
            merge(&block, &sizes, merged, result);
        }
        finish(&block, &sizes, outputs, merged);
    });
}

/// The workspace of one segment of a task.
struct Workspace<'s, R> {
    queries: &'s mut [R],
    tile: &'s mut [R],
    /// The weighted sums of values; columns are rows of the block.
    sums_by_column: &'s mut [R],
    keys: &'s mut [R],
    values: &'s mut [R],
    /// The weighted sums of values, row by row.
    rows: &'s mut [R],
    maxima: &'s mut [R],
    sums: &'s mut [R],
    factors: &'s mut [R],
    /// If `true`, vectors run along the keys and the values instead of the queries.
    few: bool,
    key_width: usize,
    value_width: usize,
}

impl<'s, R: Real> Workspace<'s, R> {
    fn new<E: Accumulate<Acc = R>>(
        block: &RowBlock<'_, '_, E>,
        sizes: &Sizes,
        scratch: &'s mut [R],
        result: &'s mut [R],
    ) -> Workspace<'s, R> {
        let (queries, scratch) = scratch.split_at_mut(ROWS * sizes.key_width);
        let (tile, scratch) = scratch.split_at_mut(ROWS * KEYS);
        let (sums_by_column, scratch) = scratch.split_at_mut(ROWS * sizes.value_width);
        let (keys, scratch) = scratch.split_at_mut(KEYS * sizes.key_width);
        let (values, scratch) = scratch.split_at_mut(KEYS * sizes.value_width);
        let factors = &mut scratch[..ROWS];
        let (rows, maxima, sums) = sizes.parts_mut(result);
        Workspace {
            queries,
            tile,
            sums_by_column,
            keys,
            values,
            rows,
            maxima,
            sums,
            factors,
            few: block.rows <= FEW_ROWS && R::as_f32(&[]).is_some(),
            key_width: sizes.key_width,
            value_width: sizes.value_width,
        }
    }

    /// Computes the online softmax over the keys `from..to` that the block sees, in `rows`, `maxima` and `sums`.
    fn sweep<E: Accumulate<Acc = R>>(
        &mut self,
        block: &RowBlock<'_, '_, E>,
        (from, to): (usize, usize),
    ) {
        let problem = block.problem;
        let (key_dim, value_dim) = (problem.key_dim, problem.value_dim);
        let factor = block.query_factor();
        if self.few {
            block.pack_rows(
                &problem.query,
                key_dim,
                factor,
                self.queries,
                self.key_width,
            );
        } else {
            block.pack_columns(&problem.query, key_dim, factor, self.queries);
        }
        // Finite, because a row that has not seen a key yet would compute inf - inf.
        self.maxima.fill(R::LOWEST);
        self.sums.fill(R::ZERO);
        // Clears only part of the workspace; all of it would take as long as the attention of one token.
        if self.few {
            self.rows[..block.rows * self.value_width].fill(R::ZERO);
        } else {
            self.sums_by_column[..value_dim * block.lanes].fill(R::ZERO);
        }
        let adjustment = block.adjustment();
        for (start, count) in block.key_blocks(from, to) {
            self.weigh_keys(block, (start, count));
            let tile = &mut self.tile[..count * block.lanes];
            adjustment.scores(tile, start, None);
            softmax(
                problem.set,
                tile,
                block.lanes,
                self.maxima,
                self.sums,
                self.factors,
            );
            adjustment.drop_weights(tile, start);
            self.add_values(block, (start, count));
        }
        if !self.few {
            for (row, to) in self.rows.chunks_exact_mut(self.value_width).enumerate() {
                // Lanes past the last row hold no query.
                if row == block.rows {
                    break;
                }
                let column = self.sums_by_column[row..].iter().step_by(block.lanes);
                to[..value_dim]
                    .iter_mut()
                    .zip(column)
                    .for_each(|(to, from)| *to = *from);
            }
        }
    }

    /// Returns the runs of keys (or values) of one matmul each. For few queries, gathering the keys of a pool
    /// would cost as much as the matmul, so each block is read in place.
    fn key_runs<E: Accumulate<Acc = R>>(
        &self,
        block: &RowBlock<'_, '_, E>,
        keys: (usize, usize),
    ) -> KeyRuns {
        let run_length = if block.rows <= FEW_LANES {
            block.run_length()
        } else {
            usize::MAX
        };
        KeyRuns {
            next: keys.0,
            end: keys.0 + keys.1,
            run_length,
        }
    }

    /// Computes `tile = keys · queries`.
    fn weigh_keys<E: Accumulate<Acc = R>>(
        &mut self,
        block: &RowBlock<'_, '_, E>,
        keys: (usize, usize),
    ) {
        let problem = block.problem;
        let dims = (problem.key_dim, self.key_width);
        for (first, count) in self.key_runs(block, keys) {
            let rows = key_rows(block, &problem.key, (first, count), dims, false, self.keys);
            let tile = &mut self.tile[(first - keys.0) * block.lanes..];
            if self.few
                && let (Some(tile), Some(keys), Some(queries)) = (
                    R::as_f32_mut(tile),
                    R::as_f32(rows.data),
                    R::as_f32(self.queries),
                )
            {
                let keys = Rows {
                    data: keys,
                    distance: rows.distance,
                    count,
                };
                let queries = Rows {
                    data: queries,
                    distance: self.key_width,
                    count: block.rows,
                };
                dot_products(
                    problem.set,
                    tile,
                    block.lanes,
                    keys,
                    queries,
                    problem.key_dim,
                );
                continue;
            }
            let mut scores = Matmul {
                m: count,
                n: block.lanes,
                k: problem.key_dim,
                a: rows.data,
                lda: rows.distance,
                a_by_columns: false,
                b: self.queries,
                ldb: block.lanes,
                c: tile,
                ldc: block.lanes,
                start: Start::Zero,
            };
            matmul(problem.set, &mut scores);
        }
    }

    /// Adds the values, each by its weight in `tile`, to the scaled sums.
    fn add_values<E: Accumulate<Acc = R>>(
        &mut self,
        block: &RowBlock<'_, '_, E>,
        keys: (usize, usize),
    ) {
        let problem = block.problem;
        let dims = (problem.value_dim, self.value_width);
        for (first, count) in self.key_runs(block, keys) {
            let run = (first, count);
            let values = key_rows(block, &problem.value, run, dims, self.few, self.values);
            let weights = &self.tile[(first - keys.0) * block.lanes..];
            // The old sums are scaled once, with the first run of the block.
            let scaled = first == keys.0;
            let mut sums = if self.few {
                Matmul {
                    m: block.rows,
                    n: self.value_width,
                    k: count,
                    a: weights,
                    lda: block.lanes,
                    a_by_columns: true,
                    b: values.data,
                    ldb: values.distance,
                    c: self.rows,
                    ldc: self.value_width,
                    start: match scaled {
                        true => Start::ScaleRows(self.factors),
                        false => Start::Add,
                    },
                }
            } else {
                Matmul {
                    m: problem.value_dim,
                    n: block.lanes,
                    k: count,
                    a: values.data,
                    lda: values.distance,
                    a_by_columns: true,
                    b: weights,
                    ldb: block.lanes,
                    c: self.sums_by_column,
                    ldc: block.lanes,
                    start: match scaled {
                        true => Start::ScaleColumns(self.factors),
                        false => Start::Add,
                    },
                }
            };
            matmul(problem.set, &mut sums);
        }
    }
}

/// The keys `next..end`, split at multiples of `run_length`.
struct KeyRuns {
    next: usize,
    end: usize,
    run_length: usize,
}

impl Iterator for KeyRuns {
    /// The first key and the number of keys.
    type Item = (usize, usize);

    fn next(&mut self) -> Option<(usize, usize)> {
        let first = self.next;
        if first >= self.end {
            return None;
        }
        let count = (self.run_length - first % self.run_length).min(self.end - first);
        self.next = first + count;
        Some((first, count))
    }
}

/// Adds the result of another segment of the keys.
fn merge<E: Accumulate>(
    block: &RowBlock<'_, '_, E>,
    sizes: &Sizes,
    merged: &mut [E::Acc],
    other: &[E::Acc],
) {
    let (rows, maxima, sums) = sizes.parts_mut(merged);
    let (other_rows, other_maxima, other_sums) = sizes.parts(other);
    for row in 0..block.rows {
        let (maximum, sum) = (other_maxima[row], other_sums[row]);
        // Not `max`, which drops a NaN.
        let new = if maximum > maxima[row] {
            maximum
        } else {
            maxima[row]
        };
        let (ours, theirs) = ((maxima[row] - new).exp2(), (maximum - new).exp2());
        maxima[row] = new;
        sums[row] = sums[row] * ours + sum * theirs;
        let at = row * sizes.value_width;
        let numbers = rows[at..].iter_mut().zip(&other_rows[at..]);
        for (to, from) in numbers.take(sizes.value_width) {
            *to = *to * ours + *from * theirs;
        }
    }
}

/// Adds the sink logits, divides by the sums and writes the rows to the output.
fn finish<E: Accumulate>(
    block: &RowBlock<'_, '_, E>,
    sizes: &Sizes,
    outputs: &ForwardOutputs<'_, E>,
    result: &[E::Acc],
) {
    let (rows, maxima, sums) = sizes.parts(result);
    let sequence = &block.sequence;
    for row in 0..block.rows {
        let (query, head) = block.query_and_head(row);
        let (mut maximum, mut sum, mut factor) = (maxima[row], sums[row], E::Acc::ONE);
        if let Some(sinks) = block.problem.rules.sinks {
            let sink = sinks[head] * E::Acc::of(LOG2_E);
            let new = if sink > maximum { sink } else { maximum };
            factor = (maximum - new).exp2();
            sum = sum * factor + (sink - new).exp2();
            maximum = new;
        }
        // The result of a query that sees no key is zero instead of 0/0.
        let empty = sum == E::Acc::ZERO;
        let inverse = if empty { E::Acc::ZERO } else { factor / sum };
        let at = sequence.query_start + query;
        // SAFETY: each row of the outputs belongs to one block.
        let (to, logsumexp) = unsafe {
            (
                outputs
                    .output
                    .row_mut(sequence.batch, head, at, block.problem.value_dim),
                outputs.logsumexp.row_mut(sequence.batch, head, at, 1),
            )
        };
        for (to, from) in to.iter_mut().zip(&rows[row * sizes.value_width..]) {
            *to = E::from_acc(*from * inverse);
        }
        logsumexp[0] = match empty {
            true => -E::Acc::INFINITY,
            false => (maximum + sum.log2()) * E::Acc::of(LN_2),
        };
    }
}
