//! The peak memory of the head and the loss.

use super::{MemoryPlan, MemoryPrecision};

// The chunking of overdrive-fused's loss, repeated here because this crate does not depend on it: the target size and
// the minimum number of rows.
const CHUNK_BYTES: u64 = 32 << 20;
const CHUNK_ROWS: u64 = 256;

/// Returns the peak of the bytes around the loss, without the head's input.
pub(super) fn peak(plan: &MemoryPlan) -> u64 {
    let shape = &plan.shape;
    let (tokens, inner) = (plan.tokens(), plan.inner_bytes());
    if plan.fused_kernels {
        let row = shape.vocabulary * inner;
        let rows = (CHUNK_BYTES / row).max(CHUNK_ROWS).min(tokens);
        // The fused loss computes the gradients of the head's input and weight chunk by chunk in forward; that of a
        // half-precision weight is summed in fp32.
        let input_gradient = tokens * shape.hidden * inner;
        return rows * row + input_gradient + 4 * shape.embedding();
    }
    // Backward begins with the log-probabilities, their gradient and the logits' gradient, all fp32;
    // half-precision logits are there as well.
    let half = match plan.precision {
        MemoryPrecision::Fp32 => 0,
        MemoryPrecision::Autocast | MemoryPrecision::Bf16 => 2,
    };
    tokens * shape.vocabulary * (3 * 4 + half)
}
