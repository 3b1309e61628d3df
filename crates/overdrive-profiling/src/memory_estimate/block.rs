//! What the blocks keep, and what backward through them holds at most.

use super::{MemoryAttention, MemoryPlan, MemoryPrecision, Recomputation};

/// Bytes that one norm keeps, and the input of the maps under it.
fn norm(plan: &MemoryPlan, maps_under_it: u64) -> u64 {
    let (stream, inner) = (plan.stream_bytes(), plan.inner_bytes());
    let hidden = plan.shape.hidden;
    let maps = match (plan.precision, plan.fused_kernels) {
        // Every map casts the input for itself.
        (MemoryPrecision::Autocast, false) => maps_under_it * hidden * inner,
        (_, _) => hidden * inner,
    };
    let normalised = if plan.fused_kernels {
        0
    } else {
        hidden * stream
    };
    plan.tokens() * (hidden * stream + normalised + maps)
}

/// Bytes that attention keeps.
fn attention(plan: &MemoryPlan) -> u64 {
    let shape = &plan.shape;
    let (inner, queries, keys) = (plan.inner_bytes(), shape.queries(), shape.keys());
    let output = inner * queries;
    plan.tokens()
        * match plan.attention {
            MemoryAttention::Flash => inner * (queries + 2 * keys) + output + 4 * shape.heads,
            // Wide, whatever the precision: query, key, value, and the exponentials of the scores
            // before and after they are divided by their sum.
            MemoryAttention::Eager => {
                4 * (queries + 2 * keys) + output + 2 * 4 * shape.heads * plan.length
            }
        }
}

/// Bytes that the feed-forward part keeps, under its norm.
fn feed_forward(plan: &MemoryPlan) -> u64 {
    let parts = if plan.fused_kernels { 3 } else { 4 };
    plan.tokens() * plan.inner_bytes() * parts * plan.shape.intermediate
}

/// Bytes that a block keeps for its backward.
fn whole(plan: &MemoryPlan) -> u64 {
    norm(plan, 3) + attention(plan) + norm(plan, 2) + feed_forward(plan)
}

/// Bytes of the stream at one place.
fn stream(plan: &MemoryPlan) -> u64 {
    plan.tokens() * plan.shape.hidden * plan.stream_bytes()
}

/// Bytes that a checkpointed group of one block keeps.
fn checkpointed(plan: &MemoryPlan) -> u64 {
    let shape = &plan.shape;
    let results = match plan.recomputation {
        // Of the products: query, key, value, output projection, gate, up, down; and attention's.
        Recomputation::Selective => {
            let width = 2 * shape.queries() + 2 * shape.keys() + 2 * shape.intermediate;
            plan.tokens() * plan.inner_bytes() * (width + 2 * shape.hidden)
        }
        _ => 0,
    };
    stream(plan) + results
}

/// Bytes of the norm before the head, and the head's input.
pub(super) fn tail(plan: &MemoryPlan) -> u64 {
    norm(plan, 1)
}

/// Gradients of activations that backward through a block holds beside what the block kept: of the
/// feed-forward part's inner features, and of the stream.
pub(super) fn one_block_backward(plan: &MemoryPlan) -> u64 {
    let shape = &plan.shape;
    let inner = plan.inner_bytes() * 2 * shape.intermediate.max(shape.queries());
    plan.tokens() * inner + 2 * stream(plan)
}

/// Bytes that all blocks keep between forward and backward, and the most during backward through
/// them.
pub(super) fn moments(plan: &MemoryPlan) -> (u64, u64) {
    let whole = whole(plan);
    let mut kept = 0;
    let mut most = 0;
    for (blocks, recomputed) in plan.recomputation.groups(plan.shape.layers) {
        // The groups before this one keep what they keep; this one is whole.
        let (own, again) = if recomputed {
            (checkpointed(plan), checkpointed(plan) + blocks * whole)
        } else {
            (blocks * whole, blocks * whole)
        };
        most = most.max(kept + again);
        kept += own;
    }
    (kept, most + one_block_backward(plan))
}
