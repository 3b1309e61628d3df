//! The memory estimate, the step recorder and the profiler of a run.

use overdrive_checkpointing::{SavePolicy, Schedule as Recompute};
use overdrive_precision::Precision;
use overdrive_profiling::{
    DecoderShape, MemoryAttention, MemoryPlan, MemoryPrecision, ModelFlops, OptimizerMemory,
    PeakFlops, Profiler, ProfilerConfig, Recomputation, Schedule, StepRecorder, StepRecorderConfig,
};
use overdrive_transformer::AttentionImplementation;
use tch::{Device, Kind};

use crate::{OptimizerName, Result, TrainingArguments};

/// The number of steps before the trace: by then caches are warm and kernels compiled.
pub(crate) const STEPS_BEFORE_TRACE: u64 = 5;

/// Returns the size of an optimizer's states in a snapshot, where paged ones are as large as others.
pub(crate) fn stored_states(optimizer: OptimizerName) -> OptimizerMemory {
    match optimizer {
        OptimizerName::AdamwTorchFused | OptimizerName::PagedAdamw32bit => OptimizerMemory::AdamW,
        OptimizerName::Adamw8bit | OptimizerName::PagedAdamw8bit => OptimizerMemory::AdamW8bit,
        OptimizerName::Lion32bit => OptimizerMemory::Lion,
        OptimizerName::Adafactor => OptimizerMemory::Adafactor,
        OptimizerName::Sgd => OptimizerMemory::Sgd,
        OptimizerName::Muon => OptimizerMemory::Muon,
    }
}

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
            Precision::Fp16 | Precision::Bf16 => MemoryPrecision::Autocast,
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
        plan.optimizer = match self.optim {
            // Paged states are outside the device's memory, whatever their width.
            OptimizerName::PagedAdamw32bit | OptimizerName::PagedAdamw8bit => {
                OptimizerMemory::PagedAdamW
            }
            other => stored_states(other),
        };
        plan.accumulates = self.gradient_accumulation_steps > 1;
        plan
    }

    /// Returns a recorder of the steps on `devices` devices like `device`. If the FLOPs of the `model` are known, it
    /// records the MFU, with the peak of the device in `precision`. On a CPU the peak is measured, which takes a fraction
    /// of a second.
    ///
    /// # Errors
    /// An error of the measurement.
    pub fn new_recorder(
        &self,
        model: Option<ModelFlops>,
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
            peak_flops: model.map(|_| PeakFlops::of(device, kind)).transpose()?,
            model: model.map(|model| ModelFlops {
                sequence_length: self.context_length,
                ..model
            }),
            devices,
            ..StepRecorderConfig::default()
        })?)
    }

    /// Returns the profiler that writes `trace`, if it is set: three steps after the first five. Finish it
    /// after the loop: a run that ends earlier writes the steps it has.
    ///
    /// # Errors
    /// An error of libtorch's profiler.
    pub fn new_profiler(&self) -> Result<Option<Profiler<'static>>> {
        let Some(path) = self.trace.clone() else {
            return Ok(None);
        };
        let schedule = Schedule {
            // One of the skipped steps is the profiler's own warm-up, whose overhead must not be in the trace.
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
