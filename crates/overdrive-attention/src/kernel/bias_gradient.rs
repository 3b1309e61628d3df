//! The gradient of an additive bias, which many heads, batches, queries or keys may share.
//!
//! It is a separate pass with two of the five matmuls. Each task processes its own rows of the bias for all
//! heads that share them, so no two threads add to the same sum, and nothing of the size of the scores is
//! stored, except for a bias of that size.

use overdrive_kernels::{Accumulate, SharedSlice, threads};

use super::backward::{BackwardInputs, Plan, Workspace};
use super::block::{ROWS, RowBlock};
use super::inputs::AttentionInputs;

/// The division of the work by the shape of the bias, in which a size of 1 means all.
struct BiasTasks {
    batches: usize,
    /// The number of heads: 1, or the number of key heads.
    heads: usize,
    /// The number of chunks of queries; 1 if all queries share a row.
    chunks: usize,
    /// The number of queries in a chunk.
    queries: usize,
}

impl BiasTasks {
    fn new<E: Accumulate>(problem: &AttentionInputs<'_, E>, shape: [usize; 4]) -> BiasTasks {
        let most = problem
            .sequences
            .iter()
            .map(|s| s.queries)
            .max()
            .unwrap_or(0);
        // A row of the bias that all queries share is one sum, which a single task must compute.
        let queries = match shape[2] {
            1 => most.max(1),
            _ => (ROWS / problem.group()).max(1),
        };
        BiasTasks {
            batches: shape[0],
            // Not the query heads: those of one key head are rows of the same blocks.
            heads: if shape[1] == 1 { 1 } else { problem.kv_heads },
            chunks: most.div_ceil(queries),
            queries,
        }
    }

    fn tasks(&self) -> usize {
        self.batches * self.heads * self.chunks
    }
}

/// Returns the number of elements that [`bias_gradient`] needs as workspace.
pub(crate) fn bias_gradient_workspace<E: Accumulate>(
    problem: &AttentionInputs<'_, E>,
    shape: [usize; 4],
) -> usize {
    threads::workers().min(BiasTasks::new(problem, shape).tasks()) * Plan::new(problem).task()
}

/// Adds the gradient of the bias, whose sizes are `shape` (each full or 1), to `gradient`, contiguous
/// in that shape; `workspace` has [`bias_gradient_workspace`] elements.
pub(crate) fn bias_gradient<E: Accumulate>(
    problem: &AttentionInputs<'_, E>,
    inputs: &BackwardInputs<'_, E>,
    shape: [usize; 4],
    gradient: &mut [E::Acc],
    workspace: &mut [E::Acc],
) {
    let (division, plan) = (BiasTasks::new(problem, shape), Plan::new(problem));
    let strides = strides(shape);
    let shared = SharedSlice::new(gradient);
    threads::for_each_task(division.tasks(), true, workspace, |task, scratch| {
        let (chunk, task) = (task % division.chunks, task / division.chunks);
        let (head, batch) = (task % division.heads, task / division.heads);
        let heads = match division.heads {
            1 => 0..problem.kv_heads,
            _ => head..head + 1,
        };
        // No sums for keys and values: this pass stops at the gradients of the scores.
        let mut work = Workspace::new(&plan, scratch, &mut [], &mut []);
        for (index, sequence) in problem.sequences.iter().enumerate() {
            if division.batches > 1 && sequence.batch != batch {
                continue;
            }
            for kv_head in heads.clone() {
                let group = problem.group();
                let first = (chunk * division.queries).min(sequence.queries) * group;
                let end = ((chunk + 1) * division.queries).min(sequence.queries) * group;
                for first in (first..end).step_by(ROWS) {
                    let block = RowBlock::within(problem, index, kv_head, first, end);
                    add_block(&block, inputs, &mut work, &shared, strides);
                }
            }
        }
    });
}

fn add_block<E: Accumulate>(
    block: &RowBlock<'_, '_, E>,
    inputs: &BackwardInputs<'_, E>,
    work: &mut Workspace<'_, E::Acc>,
    gradient: &SharedSlice<'_, E::Acc>,
    [by_batch, by_head, by_query, by_key]: [usize; 4],
) {
    let adjustment = block.adjustment();
    work.load(block, inputs, None);
    for (start, count) in block.key_blocks(0, block.sequence.keys) {
        work.score_gradients(block, &adjustment, (start, count));
        for row in 0..block.rows {
            let (query, head) = block.query_and_head(row);
            let base = block.sequence.batch * by_batch + head * by_head + query * by_query;
            let column = work.score_gradients[row..]
                .iter()
                .step_by(block.lanes)
                .take(count);
            let first = base + start * by_key;
            // SAFETY: batch, heads and queries of the bias belong to one task, and the part of one row
            // is dropped before that of the next is taken.
            let to = unsafe { gradient.range_mut(first..first + (count - 1) * by_key + 1) };
            for (key, from) in column.enumerate() {
                to[key * by_key] += *from;
            }
        }
    }
}

/// Returns the strides of a contiguous tensor, 0 for dimensions of size 1.
fn strides(shape: [usize; 4]) -> [usize; 4] {
    let mut strides = [0; 4];
    let mut stride = 1;
    for (size, to) in shape.iter().zip(&mut strides).rev() {
        // With stride 0, all entries of a broadcast dimension add to the same element.
        *to = if *size == 1 { 0 } else { stride };
        stride *= size;
    }
    strides
}
