//! The memory that blocks keep, and the peak of backward through them.

use super::{MemoryAttention, MemoryPlan, MemoryPrecision, Recomputation};

/// Returns the bytes that a norm keeps, and the input of the linear layers after it.
fn norm(plan: &MemoryPlan, projections: u64) -> u64 {
    let (stream, inner) = (plan.stream_bytes(), plan.inner_bytes());
    let hidden = plan.shape.hidden;
    let inputs = match (plan.precision, plan.fused_kernels) {
        // Autocast caches casts of weights only: every projection casts the input again.
        (MemoryPrecision::Autocast, false) => projections * hidden * inner,
        (_, _) => hidden * inner,
    };
    let normalized = if plan.fused_kernels {
        0
    } else {
        hidden * stream
    };
    plan.tokens() * (hidden * stream + normalized + inputs)
}

/// Returns the bytes that attention keeps.
fn attention(plan: &MemoryPlan) -> u64 {
    let shape = &plan.shape;
    let (inner, queries, keys) = (plan.inner_bytes(), shape.queries(), shape.keys());
    let output = inner * queries;
    plan.tokens()
        * match plan.attention {
            MemoryAttention::Flash => inner * (queries + 2 * keys) + output + 4 * shape.heads,
            // The eager implementation computes in fp32 whatever the precision: query, key, value, and the
            // exponentials of the scores before and after the division by their sum.
            MemoryAttention::Eager => {
                4 * (queries + 2 * keys) + output + 2 * 4 * shape.heads * plan.length
            }
        }
}

/// Returns the bytes that the feed-forward layer keeps, without its norm.
fn feed_forward(plan: &MemoryPlan) -> u64 {
    // The fused gate computes the activation again in backward.
    let tensors = if plan.fused_kernels { 3 } else { 4 };
    let shape = &plan.shape;
    // The hidden states sorted by expert, and the outputs before they are weighted and added.
    let sorted = shape.experts.map_or(0, |experts| 2 * experts.per_token);
    let width = tensors * shape.active_intermediate() + sorted * shape.hidden;
    plan.tokens() * plan.inner_bytes() * width
}

/// Returns the bytes that a block keeps for its backward.
fn whole(plan: &MemoryPlan) -> u64 {
    norm(plan, 3) + attention(plan) + norm(plan, 2) + feed_forward(plan)
}

/// Returns the bytes of the residual stream.
fn stream(plan: &MemoryPlan) -> u64 {
    plan.tokens() * plan.shape.hidden * plan.stream_bytes()
}

/// Returns the bytes that a checkpointed group of blocks keeps.
fn checkpointed(plan: &MemoryPlan) -> u64 {
    let shape = &plan.shape;
    let results = match plan.recomputation {
        // Of the matrix products: query, key, value, output projection, gate, up, down; and attention's.
        Recomputation::Selective => {
            let width = 2 * shape.queries() + 2 * shape.keys() + 2 * shape.active_intermediate();
            plan.tokens() * plan.inner_bytes() * (width + 2 * shape.hidden)
        }
        _ => 0,
    };
    stream(plan) + results
}

/// Returns the bytes that the norm before the head keeps, and the head's input.
pub(super) fn tail(plan: &MemoryPlan) -> u64 {
    norm(plan, 1)
}

/// Returns the bytes of the gradients of activations in backward through a block: of the
/// feed-forward layer's intermediate features, and of the residual stream.
pub(super) fn one_block_backward(plan: &MemoryPlan) -> u64 {
    let shape = &plan.shape;
    let inner = plan.inner_bytes() * 2 * shape.active_intermediate().max(shape.queries());
    plan.tokens() * inner + 2 * stream(plan)
}

/// Returns the bytes that all blocks keep between forward and backward, and the peak of backward through
/// them.
pub(super) fn kept_and_peak(plan: &MemoryPlan) -> (u64, u64) {
    let whole = whole(plan);
    let mut kept = 0;
    let mut most = 0;
    for (blocks, recomputed) in plan.recomputation.groups(plan.shape.layers) {
        // In backward through a group the groups before it still keep their activations, and this one has all of
        // its own.
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
