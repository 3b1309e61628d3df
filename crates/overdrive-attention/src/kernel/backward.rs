//! The backward pass: gradients of queries, keys and values.
//!
//! Each task processes one key head or, if there are fewer heads than threads, a share of its queries with
//! separate sums that are added in order afterwards. So no two threads add to the same sum, and no score is
//! computed twice.

use std::f64::consts::LOG2_E;

use overdrive_kernels::{Accumulate, Real, SharedSlice, threads};

use super::block::{KEYS, ROWS, RowBlock, key_rows};
use super::inputs::{AttentionInputs, View, ViewMut};
use super::matmul::{Matmul, Start, matmul};
use super::scores::{Adjustment, multiply, softmax_gradient};

/// The inputs of the backward pass besides those of the forward pass.
#[derive(Debug)]
pub(crate) struct BackwardInputs<'a, E: Accumulate> {
    /// The gradient of the output.
    pub(crate) gradient: View<'a, E>,
    /// The output.
    pub(crate) output: View<'a, E>,
    /// The log-sum-exp, one value for each row.
    pub(crate) logsumexp: View<'a, E::Acc>,
    /// The gradient of the log-sum-exp, if that was used.
    pub(crate) logsumexp_gradient: Option<View<'a, E::Acc>>,
}

/// The outputs of the backward pass.
#[derive(Debug)]
pub(crate) struct BackwardOutputs<'a, E: Accumulate> {
    pub(crate) query: ViewMut<'a, E>,
    pub(crate) key: ViewMut<'a, E>,
    pub(crate) value: ViewMut<'a, E>,
    /// `Σ gradient · output - logsumexp_gradient` of each row, from which the gradient of the sink logits is computed.
    pub(crate) delta: ViewMut<'a, E::Acc>,
}

/// The division of the work into tasks.
pub(super) struct Plan {
    heads: usize,
    tasks: usize,
    splits: usize,
    /// The largest number of keys of a sequence.
    keys: usize,
    key_width: usize,
    value_width: usize,
    softcap: bool,
}

impl Plan {
    pub(super) fn new<E: Accumulate>(problem: &AttentionInputs<'_, E>) -> Plan {
        let group = problem.group();
        let sequences = &problem.sequences;
        let keys = sequences.iter().map(|s| s.keys).max().unwrap_or(0);
        let rows = sequences
            .iter()
            .map(|s| s.queries * group)
            .max()
            .unwrap_or(0);
        let tasks = sequences.len() * problem.kv_heads;
        let workers = threads::workers();
        // Splits the queries, whose gradients do not overlap; each split needs sums for all keys.
        let splits = match tasks {
            0 => 1,
            count if count < 2 * workers => (2 * workers)
                .div_ceil(count)
                .min(rows.div_ceil(ROWS))
                .max(1),
            _ => 1,
        };
        let lanes = problem.set.lanes::<E::Acc>();
        Plan {
            heads: problem.kv_heads,
            tasks,
            // One thread gains nothing from splits.
            splits: if workers == 1 { 1 } else { splits },
            keys,
            key_width: problem.key_dim.next_multiple_of(lanes),
            value_width: problem.value_dim.next_multiple_of(lanes),
            softcap: problem.rules.softcap.is_some(),
        }
    }

    /// Returns the size of the gradients of the keys and values of one head.
    fn sums(&self) -> usize {
        self.keys * (self.key_width + self.value_width)
    }

    /// Returns the workspace of a task: queries and output gradients twice (by row and by column), two or three score
    /// tiles, query gradients, converted keys and values, two elements for each row.
    pub(super) fn task(&self) -> usize {
        let tiles = if self.softcap { 3 } else { 2 };
        ROWS * (3 * self.key_width + 2 * self.value_width + 2)
            + KEYS * (tiles * ROWS + self.key_width + self.value_width)
    }
}

/// Returns the number of elements that [`backward`] needs as workspace.
pub(crate) fn backward_workspace<E: Accumulate>(problem: &AttentionInputs<'_, E>) -> usize {
    let plan = Plan::new(problem);
    let workers = threads::workers().min(plan.tasks * plan.splits);
    match plan.splits {
        1 => workers * (plan.task() + plan.sums()),
        splits => workers * plan.task() + plan.tasks * splits * plan.sums(),
    }
}

/// Computes `outputs`; `workspace` has [`backward_workspace`] elements.
pub(crate) fn backward<E: Accumulate>(
    problem: &AttentionInputs<'_, E>,
    inputs: &BackwardInputs<'_, E>,
    outputs: &BackwardOutputs<'_, E>,
    workspace: &mut [E::Acc],
) {
    let plan = Plan::new(problem);
    if plan.splits == 1 {
        threads::for_each_task(plan.tasks, true, workspace, |task, scratch| {
            let (sums, scratch) = scratch.split_at_mut(plan.sums());
            sweep(problem, &plan, (task, 0), inputs, outputs, sums, scratch);
            write_keys(problem, &plan, task, outputs, sums);
        });
        return;
    }
    // Separate sums for each split, added in order afterwards, so that results are reproducible bit for bit.
    let (all, workspace) = workspace.split_at_mut(plan.tasks * plan.splits * plan.sums());
    let shared = SharedSlice::new(all);
    threads::for_each_task(
        plan.tasks * plan.splits,
        true,
        workspace,
        |index, scratch| {
            // SAFETY: sums of its own.
            let sums = unsafe { shared.range_mut(index * plan.sums()..(index + 1) * plan.sums()) };
            let task_and_split = (index / plan.splits, index % plan.splits);
            sweep(
                problem,
                &plan,
                task_and_split,
                inputs,
                outputs,
                sums,
                scratch,
            );
        },
    );
    threads::for_each_task(plan.tasks, true, workspace, |task, _| {
        let len = plan.splits * plan.sums();
        // SAFETY: the sums of one task each.
        let splits = unsafe { shared.range_mut(task * len..(task + 1) * len) };
        let (sums, others) = splits.split_at_mut(plan.sums());
        for other in others.chunks_exact(plan.sums().max(1)) {
            sums.iter_mut()
                .zip(other)
                .for_each(|(to, from)| *to += *from);
        }
        write_keys(problem, &plan, task, outputs, sums);
    });
}

/// Processes every `splits`-th block of queries of one key head: writes their gradients, and adds those of keys and
/// values to `sums`.
fn sweep<E: Accumulate>(
    problem: &AttentionInputs<'_, E>,
    plan: &Plan,
    (task, split): (usize, usize),
    inputs: &BackwardInputs<'_, E>,
    outputs: &BackwardOutputs<'_, E>,
    sums: &mut [E::Acc],
    scratch: &mut [E::Acc],
) {
    let (index, kv_head) = (task / plan.heads, task % plan.heads);
    sums.fill(E::Acc::ZERO);
    let (key_sums, value_sums) = sums.split_at_mut(plan.keys * plan.key_width);
    let mut work = Workspace::new(plan, scratch, key_sums, value_sums);
    let rows = problem.sequences[index].queries * problem.group();
    // Interleaved, because under a causal mask later blocks see more keys than earlier ones.
    for first in (split * ROWS..rows).step_by(plan.splits * ROWS) {
        let block = RowBlock::new(problem, index, kv_head, first);
        let adjustment = block.adjustment();
        work.load(&block, inputs, Some(&outputs.delta));
        for (start, count) in block.key_blocks(0, block.sequence.keys) {
            work.add_block(&block, &adjustment, (start, count));
        }
        work.write_queries(&block, outputs);
    }
}

/// The workspace of one task.
pub(super) struct Workspace<'s, R> {
    queries_by_column: &'s mut [R],
    queries: &'s mut [R],
    gradients_by_column: &'s mut [R],
    gradients: &'s mut [R],
    /// Scores, then weights.
    scores: &'s mut [R],
    /// The gradients of the weights, then of the scores.
    pub(super) score_gradients: &'s mut [R],
    /// The derivatives of the softcap.
    derivatives: &'s mut [R],
    query_sums: &'s mut [R],
    keys: &'s mut [R],
    values: &'s mut [R],
    logsumexp: &'s mut [R],
    delta: &'s mut [R],
    key_sums: &'s mut [R],
    value_sums: &'s mut [R],
    key_width: usize,
    value_width: usize,
}

impl<'s, R: Real> Workspace<'s, R> {
    pub(super) fn new(
        plan: &Plan,
        scratch: &'s mut [R],
        key_sums: &'s mut [R],
        value_sums: &'s mut [R],
    ) -> Workspace<'s, R> {
        let (key_width, value_width) = (plan.key_width, plan.value_width);
        let (queries_by_column, scratch) = scratch.split_at_mut(ROWS * key_width);
        let (queries, scratch) = scratch.split_at_mut(ROWS * key_width);
        let (query_sums, scratch) = scratch.split_at_mut(ROWS * key_width);
        let (gradients_by_column, scratch) = scratch.split_at_mut(ROWS * value_width);
        let (gradients, scratch) = scratch.split_at_mut(ROWS * value_width);
        let (scores, scratch) = scratch.split_at_mut(ROWS * KEYS);
        let (score_gradients, scratch) = scratch.split_at_mut(ROWS * KEYS);
        // Without a softcap there is no derivative to store.
        let capped = if plan.softcap { ROWS * KEYS } else { 0 };
        let (derivatives, scratch) = scratch.split_at_mut(capped);
        let (keys, scratch) = scratch.split_at_mut(KEYS * key_width);
        let (values, scratch) = scratch.split_at_mut(KEYS * value_width);
        let (logsumexp, scratch) = scratch.split_at_mut(ROWS);
        let delta = &mut scratch[..ROWS];
        Workspace {
            queries_by_column,
            queries,
            gradients_by_column,
            gradients,
            scores,
            score_gradients,
            derivatives,
            query_sums,
            keys,
            values,
            logsumexp,
            delta,
            key_sums,
            value_sums,
            key_width,
            value_width,
        }
    }

    /// Loads a block of queries.
    pub(super) fn load<E: Accumulate<Acc = R>>(
        &mut self,
        block: &RowBlock<'_, '_, E>,
        inputs: &BackwardInputs<'_, E>,
        delta_output: Option<&ViewMut<'_, R>>,
    ) {
        let problem = block.problem;
        let (key_dim, value_dim) = (problem.key_dim, problem.value_dim);
        let (query, gradient) = (&problem.query, &inputs.gradient);
        let scale = R::of(problem.rules.scale);
        block.pack_columns(query, key_dim, block.query_factor(), self.queries_by_column);
        block.pack_rows(query, key_dim, scale, self.queries, self.key_width);
        block.pack_columns(gradient, value_dim, R::ONE, self.gradients_by_column);
        block.pack_rows(
            gradient,
            value_dim,
            R::ONE,
            self.gradients,
            self.value_width,
        );
        // The queries by row include only the scale: dK has no log2(e).
        self.query_sums.fill(R::ZERO);
        // A row that sees no key, and the lanes past the last row, have weights of zero.
        self.logsumexp.fill(R::INFINITY);
        self.delta.fill(R::ZERO);
        for row in 0..block.rows {
            let logsumexp = block.query_row(&inputs.logsumexp, row, 1)[0];
            // False for NaN, which then propagates to the gradients.
            let sees_none = logsumexp <= R::LOWEST;
            if !sees_none {
                // Callers pass natural logarithms; scores here are in units of log2.
                self.logsumexp[row] = logsumexp * R::of(LOG2_E);
            }
            let output = block.query_row(&inputs.output, row, value_dim);
            let gradient = &self.gradients[row * self.value_width..][..value_dim];
            // Σ gradient · output is Σ weight · (gradient of the weight), without a pass over the keys.
            let mut delta = R::ZERO;
            for (gradient, output) in gradient.iter().zip(output) {
                delta += *gradient * output.to_acc();
            }
            if let Some(view) = &inputs.logsumexp_gradient {
                // The derivative of the log-sum-exp in a score is its weight, the factor that delta has.
                delta = delta - block.query_row(view, row, 1)[0];
            }
            self.delta[row] = delta;
            if let Some(output) = delta_output {
                let (query, head) = block.query_and_head(row);
                let at = block.sequence.query_start + query;
                // SAFETY: each row belongs to one block.
                unsafe { output.row_mut(block.sequence.batch, head, at, 1)[0] = delta };
            }
        }
    }

    /// Adds the gradients of the keys `start..start + count` and their values, and those of the queries from them.
    fn add_block<E: Accumulate<Acc = R>>(
        &mut self,
        block: &RowBlock<'_, '_, E>,
        adjustment: &Adjustment<'_, E>,
        (start, count): (usize, usize),
    ) {
        let (problem, lanes, set) = (block.problem, block.lanes, block.problem.set);
        self.score_gradients(block, adjustment, (start, count));
        let scores = &mut self.scores[..count * lanes];
        let gradients = &mut self.score_gradients[..count * lanes];
        // Not in `score_gradients`: the bias is added after the cap, so its gradient ends before this.
        if problem.rules.softcap.is_some() {
            multiply(set, gradients, self.derivatives);
        }
        // Applied only now: the gradients of the scores need the weights before dropout, dV those after it.
        adjustment.drop_weights(scores, start);

        // dV += weightsᵀ · dO, dK += dSᵀ · Q, dQ += dS · K.
        let mut to_values = Matmul {
            m: count,
            n: self.value_width,
            k: lanes,
            a: scores,
            lda: lanes,
            a_by_columns: false,
            b: self.gradients,
            ldb: self.value_width,
            c: &mut self.value_sums[start * self.value_width..],
            ldc: self.value_width,
            start: Start::Add,
        };
        matmul(set, &mut to_values);
        let mut to_keys = Matmul {
            m: count,
            n: self.key_width,
            k: lanes,
            a: gradients,
            lda: lanes,
            a_by_columns: false,
            b: self.queries,
            ldb: self.key_width,
            c: &mut self.key_sums[start * self.key_width..],
            ldc: self.key_width,
            start: Start::Add,
        };
        matmul(set, &mut to_keys);
        let dims = (problem.key_dim, self.key_width);
        let keys = key_rows(block, &problem.key, (start, count), dims, false, self.keys);
        let mut to_queries = Matmul {
            m: problem.key_dim,
            n: lanes,
            k: count,
            a: keys.data,
            lda: keys.distance,
            a_by_columns: true,
            b: gradients,
            ldb: lanes,
            c: self.query_sums,
            ldc: lanes,
            start: Start::Add,
        };
        matmul(set, &mut to_queries);
    }

    /// Computes the weights of a block of keys in `scores`, and the gradients of its scores after the softcap in
    /// `score_gradients`.
    pub(super) fn score_gradients<E: Accumulate<Acc = R>>(
        &mut self,
        block: &RowBlock<'_, '_, E>,
        adjustment: &Adjustment<'_, E>,
        (start, count): (usize, usize),
    ) {
        let (problem, lanes, set) = (block.problem, block.lanes, block.problem.set);
        let scores = &mut self.scores[..count * lanes];
        let gradients = &mut self.score_gradients[..count * lanes];
        let dims = (problem.key_dim, self.key_width);
        let keys = key_rows(block, &problem.key, (start, count), dims, false, self.keys);
        let mut weights = Matmul {
            m: count,
            n: lanes,
            k: problem.key_dim,
            a: keys.data,
            lda: keys.distance,
            a_by_columns: false,
            b: self.queries_by_column,
            ldb: lanes,
            c: scores,
            ldc: lanes,
            start: Start::Zero,
        };
        matmul(set, &mut weights);
        let dims = (problem.value_dim, self.value_width);
        let values = key_rows(
            block,
            &problem.value,
            (start, count),
            dims,
            false,
            self.values,
        );
        let mut of_weights = Matmul {
            m: count,
            n: lanes,
            k: problem.value_dim,
            a: values.data,
            lda: values.distance,
            a_by_columns: false,
            b: self.gradients_by_column,
            ldb: lanes,
            c: gradients,
            ldc: lanes,
            start: Start::Zero,
        };
        matmul(set, &mut of_weights);
        let capped = problem.rules.softcap.is_some();
        adjustment.scores(scores, start, capped.then_some(&mut *self.derivatives));
        // The gradient of a dropped weight is 0, that of a kept one is scaled: the same pattern.
        adjustment.drop_weights(gradients, start);
        softmax_gradient(set, scores, gradients, lanes, self.logsumexp, self.delta);
    }

    fn write_queries<E: Accumulate<Acc = R>>(
        &self,
        block: &RowBlock<'_, '_, E>,
        outputs: &BackwardOutputs<'_, E>,
    ) {
        let (sequence, dim) = (&block.sequence, block.problem.key_dim);
        let scale = R::of(block.problem.rules.scale);
        for row in 0..block.rows {
            let (query, head) = block.query_and_head(row);
            let at = sequence.query_start + query;
            // SAFETY: each row belongs to one block.
            let to = unsafe { outputs.query.row_mut(sequence.batch, head, at, dim) };
            let column = self.query_sums[row..].iter().step_by(block.lanes);
            for (to, from) in to.iter_mut().zip(column) {
                // The keys do not include the scale, so dQ gets it here; dK has it from the queries by row.
                *to = E::from_acc(*from * scale);
            }
        }
    }
}

/// Writes the gradients of the keys and values of one head.
fn write_keys<E: Accumulate>(
    problem: &AttentionInputs<'_, E>,
    plan: &Plan,
    task: usize,
    outputs: &BackwardOutputs<'_, E>,
    sums: &[E::Acc],
) {
    let (index, kv_head) = (task / plan.heads, task % plan.heads);
    let sequence = &problem.sequences[index];
    let (key_sums, value_sums) = sums.split_at(plan.keys * plan.key_width);
    for key in 0..sequence.keys {
        let (batch, at) = (sequence.batch, sequence.key_start + key);
        // SAFETY: each key head of a sequence belongs to one task.
        let (to_key, to_value) = unsafe {
            (
                outputs.key.row_mut(batch, kv_head, at, problem.key_dim),
                outputs.value.row_mut(batch, kv_head, at, problem.value_dim),
            )
        };
        for (to, from) in to_key.iter_mut().zip(&key_sums[key * plan.key_width..]) {
            *to = E::from_acc(*from);
        }
        for (to, from) in to_value
            .iter_mut()
            .zip(&value_sums[key * plan.value_width..])
        {
            *to = E::from_acc(*from);
        }
    }
}
