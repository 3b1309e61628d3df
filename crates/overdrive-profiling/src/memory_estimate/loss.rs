//! What the head and the loss hold at most.

use super::{MemoryPlan, MemoryPrecision};

/// What overdrive-fused's loss aims at for a chunk of logits, and its least number of rows.
const CHUNK_BYTES: u64 = 32 << 20;
const CHUNK_ROWS: u64 = 256;

/// Bytes at the fullest moment around the loss, beyond what the head keeps of its input.
pub(super) fn peak(plan: &MemoryPlan) -> u64 {
    let shape = &plan.shape;
    let (tokens, inner) = (plan.tokens(), plan.inner_bytes());
    if plan.fused_kernels {
        let row = shape.vocabulary * inner;
        let rows = (CHUNK_BYTES / row).max(CHUNK_ROWS).min(tokens);
        // The gradients of the head's input and weight are made chunk by chunk; in half precision the
        // weight's is summed in fp32.
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
