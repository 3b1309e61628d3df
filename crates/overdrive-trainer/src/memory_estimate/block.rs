//! The memory that blocks keep, and the peak of backward through them.

use overdrive_checkpointing::SavePolicy;
use overdrive_transformer::AttentionImplementation;

use super::{MemoryPlan, WEIGHT};
use crate::Result;

/// Returns the bytes that a norm keeps, and the input of the linear layers after it.
fn norm(plan: &MemoryPlan, projections: f64) -> f64 {
    // Autocast caches casts of weights only: every projection casts the input again.
    let inputs = match plan.is_half() && !plan.fused_kernels {
        true => projections,
        false => 1.0,
    };
    let streams = if plan.fused_kernels { 1.0 } else { 2.0 };
    stream(plan) * streams + plan.tokens() * plan.hidden() * plan.inner_bytes() * inputs
}

/// Returns the bytes that attention keeps.
fn attention(plan: &MemoryPlan) -> f64 {
    let shape = &plan.shape;
    let (inner, queries, keys) = (plan.inner_bytes(), shape.queries(), shape.keys());
    let heads = shape.heads as f64;
    let output = inner * queries;
    plan.tokens()
        * match plan.attention {
            // It computes in fp32 whatever the precision: query, key, value, and the exponentials of the T × T scores
            // before and after the division by their sum, which others do not store.
            AttentionImplementation::Eager => {
                let scores = 2.0 * heads * plan.length as f64;
                4.0 * (queries + 2.0 * keys) + output + 4.0 * scores
            }
            _ => inner * (queries + 2.0 * keys) + output + 4.0 * heads,
        }
}

/// Returns the bytes that the feed-forward layer keeps, without its norm.
fn feed_forward(plan: &MemoryPlan) -> f64 {
    // The fused gate computes the activation again in backward.
    let tensors = if plan.fused_kernels { 3.0 } else { 4.0 };
    let shape = &plan.shape;
    // The hidden states sorted by expert, and the outputs before they are weighted and added.
    let sorted = shape
        .experts
        .map_or(0.0, |experts| 2.0 * experts.per_token as f64);
    let width = tensors * shape.active_intermediate() + sorted * plan.hidden();
    plan.tokens() * plan.inner_bytes() * width
}

/// Returns the bytes that a block keeps for its backward.
fn whole(plan: &MemoryPlan) -> f64 {
    norm(plan, 3.0) + attention(plan) + norm(plan, 2.0) + feed_forward(plan)
}

/// Returns the bytes of the residual stream.
fn stream(plan: &MemoryPlan) -> f64 {
    plan.tokens() * plan.hidden() * WEIGHT
}

/// Returns the bytes that a checkpointed group of blocks keeps.
fn checkpointed(plan: &MemoryPlan, blocks: f64) -> f64 {
    let shape = &plan.shape;
    let attention = shape.queries();
    // Query, key, value, gate, up; output projection, down.
    let matmuls =
        shape.queries() + 2.0 * (shape.keys() + shape.active_intermediate()) + 2.0 * plan.hidden();
    let results = match plan.policy {
        SavePolicy::Nothing => 0.0,
        SavePolicy::Matmuls => matmuls,
        SavePolicy::Attention => attention,
        // At most these, or a choice of the program.
        _ => matmuls + attention,
    };
    stream(plan) + blocks * plan.tokens() * plan.inner_bytes() * results
}

/// Returns the bytes that the norm before the head keeps, and the head's input.
pub(super) fn tail(plan: &MemoryPlan) -> f64 {
    norm(plan, 1.0)
}

/// Returns the bytes of the gradients of activations in backward through a block: of the
/// feed-forward layer's intermediate features, and of the residual stream.
pub(super) fn one_block_backward(plan: &MemoryPlan) -> f64 {
    let shape = &plan.shape;
    let inner = plan.inner_bytes() * 2.0 * shape.active_intermediate().max(shape.queries());
    plan.tokens() * inner + 2.0 * stream(plan)
}

/// Returns the bytes that all blocks keep between forward and backward, and the peak of backward through
/// them.
///
/// # Errors
/// As for [`Schedule::groups`](overdrive_checkpointing::Schedule::groups).
pub(super) fn kept_and_peak(plan: &MemoryPlan) -> Result<(f64, f64)> {
    let whole = whole(plan);
    let mut kept = 0.0;
    let mut most: f64 = 0.0;
    for group in plan.schedule.groups(plan.shape.layers as usize)? {
        let blocks = group.blocks.len() as f64;
        // In backward through a group the groups before it still keep their activations, and this one has all of
        // its own.
        let own = match group.checkpointed {
            true => checkpointed(plan, blocks),
            false => 0.0,
        };
        let again = own + blocks * whole;
        most = most.max(kept + again);
        kept += if group.checkpointed { own } else { again };
    }
    Ok((kept, most + one_block_backward(plan)))
}
