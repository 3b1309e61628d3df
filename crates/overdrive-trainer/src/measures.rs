//! What a run knows of itself: the memory it will take, the time its steps take, a trace of them.

use overdrive_checkpointing::{SavePolicy, Schedule as Recompute};
use overdrive_precision::Precision;
use overdrive_profiling::{
    DecoderShape, MemoryAttention, MemoryPlan, MemoryPrecision, ModelFlops, OptimizerMemory,
    PeakFlops, Profiler, ProfilerConfig, Recomputation, Schedule, StepRecorder, StepRecorderConfig,
};
use overdrive_transformer::AttentionImplementation;
use tch::{Device, Kind};

use crate::{OptimizerName, Result, TrainingArguments};

/// The trace begins after them: caches are full by then, and kernels made.
pub(crate) const STEPS_BEFORE_TRACE: u64 = 5;

impl TrainingArguments {
    /// The memory that the run will take, for a tokenizer of `vocab_size` tokens; displayed by its
    /// [estimate](MemoryPlan::estimate).
    pub fn memory_plan(&self, vocab_size: u64) -> MemoryPlan {
        let shape = DecoderShape {
            layers: self.model.num_hidden_layers,
            hidden: self.model.hidden_size,
            intermediate: self.model.intermediate_size,
            heads: self.model.num_attention_heads,
            kv_heads: self.model.key_value_heads(),
            head_dim: self.model.head_features(),
            vocabulary: vocab_size,
            tied_embeddings: self.model.tie_word_embeddings,
        };
        self.memory_plan_of(shape)
    }

    /// The same for a model of any shape.
    pub fn memory_plan_of(&self, shape: DecoderShape) -> MemoryPlan {
        let how = &self.gradient_checkpointing_kwargs;
        let mut plan =
            MemoryPlan::new(shape, self.per_device_train_batch_size, self.context_length);
        plan.precision = match self.precision() {
            Precision::Fp16 | Precision::Bf16 => MemoryPrecision::Autocast,
            _ => MemoryPrecision::Fp32,
        };
        plan.attention = match self.attn_implementation {
            AttentionImplementation::Eager => MemoryAttention::Eager,
            _ => MemoryAttention::Flash,
        };
        plan.recomputation = match (&how.schedule, &how.policy) {
            _ if !self.gradient_checkpointing => Recomputation::Never,
            (Recompute::EveryBlock, SavePolicy::Nothing) => Recomputation::EveryBlock,
            (Recompute::EveryBlock, _) => Recomputation::Selective,
            (Recompute::EveryNth(n), _) => Recomputation::EveryNth(*n as u64),
            (Recompute::Segments(n), _) => Recomputation::Segments(*n as u64),
            (Recompute::SqrtSegments, _) => Recomputation::SqrtSegments,
            _ => Recomputation::Never,
        };
        plan.fused_kernels = self.fused_kernels;
        plan.optimizer = match self.optim {
            OptimizerName::AdamwTorchFused => OptimizerMemory::AdamW,
            OptimizerName::Adamw8bit => OptimizerMemory::AdamW8bit,
            OptimizerName::PagedAdamw32bit | OptimizerName::PagedAdamw8bit => {
                OptimizerMemory::PagedAdamW
            }
            OptimizerName::Lion32bit => OptimizerMemory::Lion,
            OptimizerName::Adafactor => OptimizerMemory::Adafactor,
            OptimizerName::Sgd => OptimizerMemory::Sgd,
            OptimizerName::Muon => OptimizerMemory::Muon,
        };
        plan.accumulates = self.gradient_accumulation_steps > 1;
        plan
    }

    /// Makes a recorder of the steps of `devices` devices such as `device`, which knows the model's arithmetic
    /// and the device's peak in `precision`. On a CPU the peak is measured, which takes a fraction of a
    /// second.
    ///
    /// # Errors
    /// When the device cannot be measured.
    pub fn new_recorder(
        &self,
        model: ModelFlops,
        precision: Precision,
        device: Device,
        devices: usize,
    ) -> Result<StepRecorder> {
        let kind = match precision {
            Precision::Fp16 => Kind::Half,
            Precision::Bf16 => Kind::BFloat16,
            _ => Kind::Float,
        };
        Ok(StepRecorder::new(StepRecorderConfig {
            device,
            model: Some(ModelFlops {
                sequence_length: self.context_length,
                ..model
            }),
            peak_flops: Some(PeakFlops::of(device, kind)?),
            devices,
            ..StepRecorderConfig::default()
        })?)
    }

    /// The profiler that writes `trace`, if that is wanted: three steps after five. Finish it after the
    /// loop: a run that ends in between leaves the steps it had.
    ///
    /// # Errors
    /// When libtorch's profiler cannot start.
    pub fn new_profiler(&self) -> Result<Option<Profiler<'static>>> {
        let Some(path) = self.trace.clone() else {
            return Ok(None);
        };
        let schedule = Schedule {
            wait: STEPS_BEFORE_TRACE - 1,
            warmup: 1,
            active: 3,
            repeat: 1,
            ..Schedule::default()
        };
        Ok(Some(Profiler::start(
            ProfilerConfig::default(),
            schedule,
            move |mut trace| trace.save_chrome_trace(&path),
        )?))
    }
}
