//! The estimate of the memory with adapters and quantized weights.

use super::{DeviceFacts, DeviceKind, RecommendedSettings, TrainedWeights};
use crate::Result;
use crate::arguments::TrainingArguments;
use crate::memory_estimate::{DecoderShape, MemoryPlan};

/// The rank of the adapters.
const RANK: u64 = 16;
/// The bytes of a trained weight: fp32 weight, gradient and two moments.
const TRAINED: u64 = 16;
/// The bits of a weight in NF4 with double quantization, times 1000.
const NF4_MILLIBITS: u64 = 4127;

/// Returns the estimated peak of the tensors in bytes.
pub(super) fn peak(
    settings: &RecommendedSettings,
    device: &DeviceFacts,
    shape: DecoderShape,
    length: u64,
) -> Result<u64> {
    let half = settings.precision.autocast_dtype().is_some();
    let mut arguments = TrainingArguments {
        context_length: length,
        ..TrainingArguments::default()
    };
    settings.apply(&mut arguments);
    let plan = MemoryPlan {
        gpu_memory: match device.kind {
            DeviceKind::Gpu { .. } => Some(device.usable_memory()),
            DeviceKind::Cpu { .. } => None,
        },
        ..arguments.memory_plan_of(shape, settings.precision)
    };
    let all = plan.estimate()?;
    let stored = if half { 2 } else { 4 };
    let tables = if shape.tied_embeddings { 1 } else { 2 };
    let embeddings = tables * shape.vocabulary * shape.hidden;
    let blocks = shape.parameters() - embeddings;
    let frozen = match settings.trains {
        TrainedWeights::All => return Ok(all.peak),
        TrainedWeights::Lora => stored * shape.parameters(),
        // One matrix at a time is dequantized for a matmul with many rows.
        TrainedWeights::Qlora => {
            stored * embeddings
                + blocks.div_ceil(8000) * NF4_MILLIBITS
                + stored * shape.hidden * shape.intermediate
        }
    };
    // An upper bound: beside frozen weights fewer activations are kept.
    let step = all.activations + all.recomputed.max(all.logits);
    Ok(frozen + TRAINED * adapters(&shape) + step)
}

/// Returns the number of weights of adapters of query and value, PEFT's choice for Llama.
fn adapters(shape: &DecoderShape) -> u64 {
    let queries = shape.heads * shape.head_dim;
    let values = shape.kv_heads * shape.head_dim;
    shape.layers * RANK * (2 * shape.hidden + queries + values)
}
