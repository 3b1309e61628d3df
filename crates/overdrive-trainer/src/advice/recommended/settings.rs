//! The settings, the choices among which the first that fits is taken, and the estimate of their memory.

use std::fmt;

use overdrive_accumulation::BatchPlan;
use overdrive_precision::Precision;

use OptimizerName::{Adamw8bit, AdamwTorchFused};
use TrainedWeights::{All, Lora, Qlora};

use super::{DeviceFacts, DeviceKind};
use crate::Result;
use crate::advice::tuning::TuneCandidate;
use crate::arguments::{OptimizerName, TrainingArguments};
use crate::memory_estimate::{DecoderShape, GpuMemory, MemoryPlan};

/// The micro-batch below which checkpointing, an 8-bit optimizer or an adapter is chosen rather than a smaller one:
/// very small micro-batches leave a device idle.
pub(super) const LEAST_MICRO_BATCH: u64 = 4;
/// The number of tokens in a micro-batch beyond which a CPU gains nothing: its matmuls are at their peak.
const MOST_CPU_TOKENS: u64 = 4096;

/// The rank of the adapters.
const RANK: u64 = 16;
/// The bytes of a trained weight: fp32 weight, gradient and two moments.
const TRAINED: u64 = 16;
/// The bits of a weight in NF4 with double quantization, times 1000.
const NF4_MILLIBITS: u64 = 4127;

/// The task of a training run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Task {
    /// A new model from random weights: 64 sequences in an optimizer step.
    Train,
    /// An existing model on new text, with adapters if its weights cannot all be trained: 16 sequences in an optimizer
    /// step.
    Finetune,
}

impl Task {
    /// Returns the number of sequences in an optimizer step.
    pub fn effective_batch(self) -> u64 {
        match self {
            Self::Train => 64,
            Self::Finetune => 16,
        }
    }
}

/// The weights that are trained.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum TrainedWeights {
    /// All weights.
    All,
    /// Adapters of rank 16 beside frozen weights (LoRA).
    Lora,
    /// Adapters beside weights in 4 bits (QLoRA).
    Qlora,
}

/// The weights that are trained, the checkpointing and the optimizer to try, those that cost no time first. The states of
/// adapters are small, so they need no 8-bit optimizer.
const CHOICES: [(TrainedWeights, bool, OptimizerName); 7] = [
    (All, false, AdamwTorchFused),
    (All, true, AdamwTorchFused),
    (All, true, Adamw8bit),
    (Lora, false, AdamwTorchFused),
    (Lora, true, AdamwTorchFused),
    (Qlora, false, AdamwTorchFused),
    (Qlora, true, AdamwTorchFused),
];

/// Recommended settings. [`Display`](fmt::Display) is one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct RecommendedSettings {
    /// The precision ([`Precision::Fp16`] with loss scaling), the batch, the checkpointing and the workers, which a
    /// [search](TrainingArguments::tune) may improve.
    pub candidate: TuneCandidate,
    /// The attention kernel that `attn_implementation: flash_attention_2` (the default) runs on the device.
    pub attention: &'static str,
    /// The weights that are trained.
    pub trains: TrainedWeights,
    /// The optimizer.
    pub optim: OptimizerName,
    /// The estimated peak of the tensors in bytes.
    pub estimated_bytes: u64,
}

impl RecommendedSettings {
    /// Returns the settings for a model of this shape and sequences of `length` tokens; `None` if the device has too
    /// little memory for any.
    ///
    /// They follow from the device's facts and the estimate of the memory. In this order they take what fits into the
    /// device's [usable memory](DeviceFacts::usable_memory) with micro-batches of at least 4: all weights; with
    /// checkpointing; with an 8-bit optimizer too; for fine-tuning then adapters, and adapters beside 4-bit weights, each
    /// without and with checkpointing. If nothing fits so, the same with smaller micro-batches.
    ///
    /// # Errors
    /// An error for a shape or a length of 0.
    ///
    /// ```
    /// use overdrive_precision::Precision;
    /// use overdrive_trainer::{DEVICES, MODELS, RecommendedSettings, Task, TrainedWeights};
    ///
    /// let t4 = DEVICES.iter().find(|device| device.name == "T4").unwrap();
    /// let llama = MODELS.iter().find(|model| model.name == "8.0B").unwrap();
    /// let settings = RecommendedSettings::of(t4, llama.shape, 1024, Task::Finetune)?.unwrap();
    /// assert_eq!(settings.candidate.precision, Precision::Fp16); // Turing has no bf16
    /// assert_eq!(settings.trains, TrainedWeights::Qlora);
    /// # Ok::<(), overdrive_trainer::Error>(())
    /// ```
    pub fn of(
        device: &DeviceFacts,
        shape: DecoderShape,
        length: u64,
        task: Task,
    ) -> Result<Option<Self>> {
        let limit = device.usable_memory();
        let batch =
            BatchPlan::from_micro_batch(task.effective_batch(), largest(device, length, task), 1)?;
        // New weights are all trained.
        let choices = CHOICES.iter();
        let choices = choices.filter(|choice| task == Task::Finetune || choice.0 == All);
        for least in [LEAST_MICRO_BATCH, 1] {
            for &(trains, gradient_checkpointing, optim) in choices.clone() {
                for plan in TrainingArguments::batch_plans(batch) {
                    if plan.micro_batch() < least.min(batch.micro_batch()) {
                        break;
                    }
                    let candidate = TuneCandidate {
                        batch: plan,
                        precision: device.precision(),
                        gradient_checkpointing,
                        dataloader_num_workers: device.workers(),
                    };
                    let mut settings = Self {
                        candidate,
                        attention: device.attention(),
                        trains,
                        optim,
                        estimated_bytes: 0,
                    };
                    settings.estimated_bytes = peak(&settings, device, shape, length)?;
                    if settings.estimated_bytes <= limit {
                        return Ok(Some(settings));
                    }
                }
            }
        }
        Ok(None)
    }

    /// Returns `arguments` of a training from scratch with these settings.
    pub fn applied_to(&self, arguments: &TrainingArguments) -> TrainingArguments {
        TrainingArguments {
            optim: self.optim,
            ..self.candidate.of(arguments)
        }
    }
}

/// Returns the largest micro-batch to try.
fn largest(device: &DeviceFacts, length: u64, task: Task) -> u64 {
    let effective = task.effective_batch();
    match device.kind {
        DeviceKind::Gpu { .. } => effective,
        DeviceKind::Cpu { .. } => {
            let sequences = (MOST_CPU_TOKENS / length.max(1)).clamp(1, effective);
            // A power of two, which divides both effective batches.
            1 << sequences.ilog2()
        }
    }
}

/// Returns the estimated peak of the tensors in bytes.
fn peak(
    settings: &RecommendedSettings,
    device: &DeviceFacts,
    shape: DecoderShape,
    length: u64,
) -> Result<u64> {
    let precision = settings.candidate.precision;
    let half = precision.autocast_dtype().is_some();
    let arguments = settings.applied_to(&TrainingArguments {
        context_length: length,
        ..TrainingArguments::default()
    });
    let plan = MemoryPlan {
        gpu_memory: match device.kind {
            // Of settings that fit with libtorch's operators, those with the loss kernel fit too.
            DeviceKind::Gpu { .. } => Some(GpuMemory {
                bytes: device.usable_memory(),
                loss_kernel: false,
            }),
            DeviceKind::Cpu { .. } => None,
        },
        ..arguments.memory_plan_of(shape, precision)
    };
    let all = plan.estimate()?;
    let stored = if half { 2 } else { 4 };
    let tables = if shape.tied_embeddings { 1 } else { 2 };
    let embeddings = tables * shape.vocabulary * shape.hidden;
    let blocks = shape.parameters() - embeddings;
    let frozen = match settings.trains {
        All => return Ok(all.peak),
        Lora => stored * shape.parameters(),
        // One matrix at a time is dequantized for a matmul with many rows.
        Qlora => {
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

impl fmt::Display for RecommendedSettings {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let scaling = match self.candidate.precision {
            Precision::Fp16 => " with loss scaling",
            _ => "",
        };
        write!(
            f,
            "{}{scaling}, {} attention, {}, {} workers",
            self.candidate.precision,
            self.attention,
            self.choice(),
            self.candidate.dataloader_num_workers,
        )
    }
}

impl RecommendedSettings {
    /// Returns the weights, the batch and what saves memory, in short: `LoRA, 4 × 4, checkpointing`.
    pub fn choice(&self) -> String {
        let weights = match self.trains {
            All => "all weights",
            Lora => "LoRA",
            Qlora => "QLoRA",
        };
        let mut text = format!(
            "{weights}, {} × {}",
            self.candidate.batch.micro_batch(),
            self.candidate.batch.accumulation_steps()
        );
        if self.candidate.gradient_checkpointing {
            text += ", checkpointing";
        }
        if self.optim == Adamw8bit {
            text += ", adamw_8bit";
        }
        text
    }
}
