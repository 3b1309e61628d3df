//! The memory estimate of a run.

use overdrive_checkpointing::Schedule;
use overdrive_fused::has_loss_kernel;
use overdrive_precision::Precision;
use overdrive_profiling::free_memory;
use overdrive_sys::memory;
use tch::Device;

use crate::arguments::TrainingArguments;
use crate::memory_estimate::{DecoderShape, GpuMemory, MemoryPlan};

impl TrainingArguments {
    /// Returns the plan of the memory that the run needs on a CPU in `precision` with a tokenizer of `vocab_size` tokens;
    /// its [estimate](MemoryPlan::estimate) can be displayed. For a GPU, set [`MemoryPlan::gpu_memory`].
    pub fn memory_plan(&self, vocab_size: u64, precision: Precision) -> MemoryPlan {
        let shape = DecoderShape {
            layers: self.model.num_hidden_layers,
            hidden: self.model.hidden_size,
            intermediate: self.model.intermediate_size,
            heads: self.model.num_attention_heads,
            kv_heads: self.model.key_value_heads(),
            head_dim: self.model.head_features(),
            vocabulary: vocab_size,
            tied_embeddings: self.model.tie_word_embeddings,
            experts: None,
        };
        self.memory_plan_of(shape, precision)
    }

    /// Returns the memory plan for a model of any shape.
    pub fn memory_plan_of(&self, shape: DecoderShape, precision: Precision) -> MemoryPlan {
        let checkpointing = &self.gradient_checkpointing_kwargs;
        MemoryPlan {
            precision,
            attention: self.attn_implementation,
            schedule: match self.gradient_checkpointing {
                true => checkpointing.schedule.clone(),
                false => Schedule::Never,
            },
            policy: checkpointing.policy.clone(),
            fused_kernels: self.fused_kernels,
            optimizer: self.optim.memory(),
            accumulates: self.gradient_accumulation_steps > 1,
            ..MemoryPlan::new(shape, self.per_device_train_batch_size, self.context_length)
        }
    }
}

/// Returns the memory of a GPU that this process's tensors take, plus what is free; `None` for other devices, and where it
/// is unknown.
pub(crate) fn gpu_memory(device: Device) -> Option<GpuMemory> {
    if !device.is_cuda() {
        return None;
    }
    // The first question initializes the GPU, without which the second fails.
    let free = free_memory(device)?;
    let taken = memory::stats(device).ok()?.allocated_bytes;
    Some(GpuMemory {
        bytes: free + taken,
        loss_kernel: has_loss_kernel(device),
    })
}
