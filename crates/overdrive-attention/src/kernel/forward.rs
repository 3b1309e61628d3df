//! The forward pass: output and log-sum-exp of every query.

use std::f64::consts::{LN_2, LOG2_E};

use overdrive_kernels::{Accumulate, Real, SharedSlice, threads};

use super::block::{KEYS, ROWS, RowBlock, key_rows};
use super::inputs::{Problem, ViewMut};
use super::matmul::{Matmul, Rows, Start, dot_products, matmul};
use super::scores::softmax;

/// Up to so many rows the vectors lie along the head dimension instead of the queries.
const FEW_ROWS: usize = 4;
/// Up to so many rows keys of a pool are multiplied block by block rather than copied together.
const FEW_LANES: usize = 16;
/// Keys that a part has at least where the keys of few queries are split among threads.
const PART_KEYS: usize = 512;

/// Where the results go.
#[derive(Debug)]
pub(crate) struct ForwardOutputs<'a, E: Accumulate> {
    /// As the query, `value_dim` numbers a row.
    pub(crate) output: ViewMut<'a, E>,
    /// As the query, one number a row: the natural log-sum-exp, `-inf` where a query sees no key.
    pub(crate) logsumexp: ViewMut<'a, E::Acc>,
}

/// A block of rows.
#[derive(Debug, Clone, Copy)]
struct Task {
    sequence: usize,
    kv_head: usize,
    first: usize,
}

/// How the work is cut.
struct Plan {
    tasks: Vec<Task>,
    /// Parts that the keys of every block are split into.
    parts: usize,
}

impl Plan {
    fn new<E: Accumulate>(problem: &Problem<'_, E>) -> Plan {
        let mut tasks = Vec::new();
        let mut most_keys = 0;
        for (index, sequence) in problem.sequences.iter().enumerate() {
            let rows = sequence.queries * problem.group();
            most_keys = most_keys.max(sequence.keys);
            for kv_head in 0..problem.kv_heads {
                // From the last: under a causal mask the longest come first and the threads end
                // together.
                let firsts = (0..rows.div_ceil(ROWS)).rev().map(|block| block * ROWS);
                tasks.extend(firsts.map(|first| Task {
                    sequence: index,
                    kv_head,
                    first,
                }));
            }
        }
        let workers = threads::workers();
        let parts = match tasks.len() {
            0 => 1,
            // Two parts a thread, so that one slow part does not hold up all.
            count if count < workers * 2 => (workers * 2)
                .div_ceil(count)
                .min(most_keys / PART_KEYS)
                .max(1),
            _ => 1,
        };
        Plan { tasks, parts }
    }
}

/// Sizes of what one task works in, in numbers.
struct Sizes {
    key_width: usize,
    value_width: usize,
}

impl Sizes {
    fn of<E: Accumulate>(problem: &Problem<'_, E>) -> Sizes {
        let lanes = problem.set.lanes::<E::Acc>();
        Sizes {
            key_width: problem.key_dim.next_multiple_of(lanes),
            value_width: problem.value_dim.next_multiple_of(lanes),
        }
    }

    /// Queries, scores, sums, rows of the result, converted keys and values, three numbers a row.
    fn task(&self) -> usize {
        let rows = ROWS * (self.key_width + KEYS + 2 * self.value_width + 3);
        rows + KEYS * (self.key_width + self.value_width)
    }

    /// What a part leaves: rows of the result, maximum and sum of each row.
    fn part(&self) -> usize {
        ROWS * (self.value_width + 2)
    }

    /// The three things that a part leaves.
    fn split_mut<'s, R>(&self, part: &'s mut [R]) -> (&'s mut [R], &'s mut [R], &'s mut [R]) {
        let (rows, of_row) = part.split_at_mut(ROWS * self.value_width);
        let (maxima, sums) = of_row.split_at_mut(ROWS);
        (rows, maxima, sums)
    }
}

/// Numbers that [`forward`] needs as workspace.
pub(crate) fn forward_workspace<E: Accumulate>(problem: &Problem<'_, E>) -> usize {
    let (plan, sizes) = (Plan::new(problem), Sizes::of(problem));
    let workers = threads::workers().min(plan.tasks.len() * plan.parts);
    let parts = match plan.parts {
        1 => 0,
        parts => plan.tasks.len() * parts * sizes.part(),
    };
    workers * sizes.task() + parts
}

/// Computes `outputs`; `workspace` has [`forward_workspace`] numbers.
pub(crate) fn forward<E: Accumulate>(
    problem: &Problem<'_, E>,
    outputs: &ForwardOutputs<'_, E>,
    workspace: &mut [E::Acc],
) {
    let (plan, sizes) = (Plan::new(problem), Sizes::of(problem));
    let count = plan.tasks.len();
    let block = |task: &Task| RowBlock::new(problem, task.sequence, task.kv_head, task.first);
    if plan.parts == 1 {
        threads::for_each_task(count, workspace, |task, scratch| {
            let block = block(&plan.tasks[task]);
            let mut work = Work::new(&block, &sizes, scratch);
            work.sweep(&block, 0, block.sequence.keys);
            let Work {
                rows, maxima, sums, ..
            } = work;
            finish(&block, &sizes, outputs, rows, maxima, sums);
        });
        return;
    }
    let (results, workspace) = workspace.split_at_mut(count * plan.parts * sizes.part());
    let shared = SharedSlice::new(results);
    threads::for_each_task(count * plan.parts, workspace, |index, scratch| {
        let (task, part) = (index / plan.parts, index % plan.parts);
        let block = block(&plan.tasks[task]);
        let mut work = Work::new(&block, &sizes, scratch);
        let [_, (start, end)] = block.spans();
        let cut = |part: usize| start + (end - start) * part / plan.parts;
        // Sink tokens, few as they are, belong to the first part.
        let from = if part == 0 { 0 } else { cut(part) };
        work.sweep(&block, from, cut(part + 1));
        // SAFETY: one part each.
        let to = unsafe { shared.range_mut(index * sizes.part()..(index + 1) * sizes.part()) };
        let (rows, maxima, sums) = sizes.split_mut(to);
        rows.copy_from_slice(work.rows);
        maxima.copy_from_slice(work.maxima);
        sums.copy_from_slice(work.sums);
    });
    threads::for_each_task(count, workspace, |task, _| {
        let block = block(&plan.tasks[task]);
        let len = plan.parts * sizes.part();
        // SAFETY: the parts of one task each.
        let parts = unsafe { shared.range_mut(task * len..(task + 1) * len) };
        let (merged, others) = parts.split_at_mut(sizes.part());
        for other in others.chunks_exact(sizes.part()) {
            merge(&block, &sizes, merged, other);
        }
        let (rows, maxima, sums) = sizes.split_mut(merged);
        finish(&block, &sizes, outputs, rows, maxima, sums);
    });
}

/// The memory of one task, cut up.
struct Work<'s, R> {
    queries: &'s mut [R],
    tile: &'s mut [R],
    /// Weighted sums of values: columns are rows of the block.
    sums_by_column: &'s mut [R],
    keys: &'s mut [R],
    values: &'s mut [R],
    /// Weighted sums of values, row by row.
    rows: &'s mut [R],
    maxima: &'s mut [R],
    sums: &'s mut [R],
    factors: &'s mut [R],
    few: bool,
    key_width: usize,
    value_width: usize,
}

impl<'s, R: Real> Work<'s, R> {
    fn new<E: Accumulate<Acc = R>>(
        block: &RowBlock<'_, '_, E>,
        sizes: &Sizes,
        scratch: &'s mut [R],
    ) -> Work<'s, R> {
        let (queries, scratch) = scratch.split_at_mut(ROWS * sizes.key_width);
        let (tile, scratch) = scratch.split_at_mut(ROWS * KEYS);
        let (sums_by_column, scratch) = scratch.split_at_mut(ROWS * sizes.value_width);
        let (rows, scratch) = scratch.split_at_mut(ROWS * sizes.value_width);
        let (keys, scratch) = scratch.split_at_mut(KEYS * sizes.key_width);
        let (values, scratch) = scratch.split_at_mut(KEYS * sizes.value_width);
        let (maxima, scratch) = scratch.split_at_mut(ROWS);
        let (sums, scratch) = scratch.split_at_mut(ROWS);
        let factors = &mut scratch[..ROWS];
        Work {
            queries,
            tile,
            sums_by_column,
            keys,
            values,
            rows,
            maxima,
            sums,
            factors,
            few: block.rows <= FEW_ROWS,
            key_width: sizes.key_width,
            value_width: sizes.value_width,
        }
    }

    /// Online softmax over the keys `from..to` that the block sees: leaves `rows`, `maxima`, `sums`.
    fn sweep<E: Accumulate<Acc = R>>(
        &mut self,
        block: &RowBlock<'_, '_, E>,
        from: usize,
        to: usize,
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
        self.maxima.fill(R::LOWEST);
        self.sums.fill(R::ZERO);
        self.rows.fill(R::ZERO);
        self.sums_by_column.fill(R::ZERO);
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

    /// Keys (or values) as the pieces that one product takes: where a product has few queries, copying
    /// keys of a pool together would cost as much as the product, and each block is read where it lies.
    fn pieces<E: Accumulate<Acc = R>>(
        &self,
        block: &RowBlock<'_, '_, E>,
        keys: (usize, usize),
    ) -> Pieces {
        let at_once = if block.rows <= FEW_LANES {
            block.run_length()
        } else {
            usize::MAX
        };
        Pieces {
            next: keys.0,
            end: keys.0 + keys.1,
            at_once,
        }
    }

    /// `tile = keys · queries`.
    fn weigh_keys<E: Accumulate<Acc = R>>(
        &mut self,
        block: &RowBlock<'_, '_, E>,
        keys: (usize, usize),
    ) {
        let problem = block.problem;
        let dims = (problem.key_dim, self.key_width);
        for (first, count) in self.pieces(block, keys) {
            let rows = key_rows(block, &problem.key, (first, count), dims, false, self.keys);
            let tile = &mut self.tile[(first - keys.0) * block.lanes..];
            if self.few {
                let queries = Rows {
                    data: self.queries,
                    distance: self.key_width,
                    count: block.rows,
                };
                dot_products(
                    problem.set,
                    tile,
                    block.lanes,
                    rows,
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
        for (first, count) in self.pieces(block, keys) {
            let run = (first, count);
            let values = key_rows(block, &problem.value, run, dims, self.few, self.values);
            let weights = &self.tile[(first - keys.0) * block.lanes..];
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

/// Keys `next..end`, cut where a multiple of `at_once` is.
struct Pieces {
    next: usize,
    end: usize,
    at_once: usize,
}

impl Iterator for Pieces {
    /// First key and number of keys.
    type Item = (usize, usize);

    fn next(&mut self) -> Option<(usize, usize)> {
        let first = self.next;
        if first >= self.end {
            return None;
        }
        let count = (self.at_once - first % self.at_once).min(self.end - first);
        self.next = first + count;
        Some((first, count))
    }
}

/// Adds the result of another part of the keys.
fn merge<E: Accumulate>(
    block: &RowBlock<'_, '_, E>,
    sizes: &Sizes,
    merged: &mut [E::Acc],
    other: &[E::Acc],
) {
    let (rows, maxima, sums) = sizes.split_mut(merged);
    let (other_rows, of_row) = other.split_at(ROWS * sizes.value_width);
    for row in 0..block.rows {
        let (maximum, sum) = (of_row[row], of_row[ROWS + row]);
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

/// Joins the sink logits, divides by the sums and writes the rows out.
fn finish<E: Accumulate>(
    block: &RowBlock<'_, '_, E>,
    sizes: &Sizes,
    outputs: &ForwardOutputs<'_, E>,
    rows: &[E::Acc],
    maxima: &[E::Acc],
    sums: &[E::Acc],
) {
    let sequence = &block.sequence;
    for row in 0..block.rows {
        let (query, head) = block.place(row);
        let (mut maximum, mut sum, mut factor) = (maxima[row], sums[row], E::Acc::ONE);
        if let Some(sinks) = block.problem.rules.sinks {
            let sink = sinks[head] * E::Acc::of(LOG2_E);
            let new = if sink > maximum { sink } else { maximum };
            factor = (maximum - new).exp2();
            sum = sum * factor + (sink - new).exp2();
            maximum = new;
        }
        // A query that sees no key: its result is zero, not 0/0.
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
