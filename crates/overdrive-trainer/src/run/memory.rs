//! The memory estimate of a run.

use overdrive_checkpointing::{SavePolicy, Schedule as Recompute};
use overdrive_precision::Precision;
use overdrive_profiling::{
    DecoderShape, MemoryAttention, MemoryPlan, MemoryPrecision, Recomputation,
};
use overdrive_transformer::AttentionImplementation;

use crate::arguments::TrainingArguments;

impl TrainingArguments {
    /// Returns the plan of the memory that the run needs in `precision` with a tokenizer of `vocab_size` tokens;
    /// its [estimate](MemoryPlan::estimate) can be displayed.
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
        let mut plan =
            MemoryPlan::new(shape, self.per_device_train_batch_size, self.context_length);
        plan.precision = match precision {
            // Under autocast parameters stay in fp32, with copies in half precision.
            Precision::Fp16 | Precision::Bf16 | Precision::Fp8 => MemoryPrecision::Autocast,
            _ => MemoryPrecision::Fp32,
        };
        plan.attention = match self.attn_implementation {
            // Only eager attention stores the T × T scores.
            AttentionImplementation::Eager => MemoryAttention::Eager,
            _ => MemoryAttention::Flash,
        };
        plan.recomputation = match (&checkpointing.schedule, &checkpointing.policy) {
            _ if !self.gradient_checkpointing => Recomputation::Never,
            (Recompute::EveryBlock, SavePolicy::Nothing) => Recomputation::EveryBlock,
            (Recompute::EveryBlock, _) => Recomputation::Selective,
            (Recompute::EveryNth(n), _) => Recomputation::EveryNth(*n as u64),
            (Recompute::Segments(n), _) => Recomputation::Segments(*n as u64),
            (Recompute::SqrtSegments, _) => Recomputation::SqrtSegments,
            _ => Recomputation::Never,
        };
        plan.fused_kernels = self.fused_kernels;
        plan.optimizer = self.optim.memory();
        plan.accumulates = self.gradient_accumulation_steps > 1;
        plan
    }
}
