//! The peak memory of the head and the loss.

use overdrive_fused::{BYTES_PER_LOGIT, ChunkDevice, auto_rows};
use tch::Kind;

use super::{MemoryPlan, WEIGHT};

/// Returns the peak of the bytes around the loss, without the head's input. `live` are the bytes of all other tensors at
/// that time.
pub(super) fn peak(plan: &MemoryPlan, live: f64) -> f64 {
    let shape = &plan.shape;
    let (tokens, inner) = (plan.tokens(), plan.inner_bytes());
    let vocabulary = shape.vocabulary as f64;
    if plan.fused_kernels && !plan.whole_logits {
        let kind = if plan.is_half() {
            Kind::Half
        } else {
            Kind::Float
        };
        let device = match plan.gpu_memory {
            None => ChunkDevice::Cpu,
            Some(gpu) => ChunkDevice::Gpu {
                free_bytes: (gpu.bytes as f64 - live) as u64,
            },
        };
        let beside = match plan.gpu_memory {
            Some(gpu) if !gpu.loss_kernel => BYTES_PER_LOGIT as f64,
            _ => 0.0,
        };
        let rows = auto_rows(shape.vocabulary as usize, kind, device).get() as f64;
        // The fused loss computes the gradients of the head's input and weight chunk by chunk in forward; that of a
        // half-precision weight is summed in fp32.
        let input_gradient = tokens * plan.hidden() * inner;
        return rows.min(tokens) * vocabulary * (inner + beside)
            + input_gradient
            + WEIGHT * shape.embedding();
    }
    // Backward begins with the log-probabilities, their gradient and the logits' gradient, all fp32;
    // half-precision logits are there as well.
    let half = if plan.is_half() { 2.0 } else { 0.0 };
    tokens * vocabulary * (3.0 * 4.0 + half)
}
