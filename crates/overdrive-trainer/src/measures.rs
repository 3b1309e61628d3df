//! What a run knows of itself: the memory it will take, the time its steps take, a trace of them.

use overdrive_checkpointing::{SavePolicy, Schedule as Recompute};
use overdrive_precision::Precision;
use overdrive_profiling::{
    DecoderShape, MemoryAttention, MemoryPlan, MemoryPrecision, ModelFlops, OptimizerMemory,
    PeakFlops, Profiler, ProfilerConfig, Recomputation, Schedule, StepRecorder, StepRecorderConfig,
};
use overdrive_transformer::{AttentionImplementation, CausalLm, ModelConfig};
use tch::Kind;

use crate::{OptimizerName, Result, TrainingArguments};

/// The trace begins after them: caches are full by then, and kernels made.
pub(crate) const STEPS_BEFORE_TRACE: u64 = 5;

/// The arithmetic of a token without its attention.
fn flops_of(model: &CausalLm) -> ModelFlops {
    let shape = shape_of(model);
    ModelFlops {
        parameters: u64::try_from(model.num_parameters()).unwrap_or(0),
        layers: shape.layers,
        heads: shape.heads,
        head_dim: shape.head_dim,
        sequence_length: 0,
    }
}

/// The shape of a model. GPT-2's feed-forward part has two matrices where Llama's has three: its width
/// is given so that they have as many weights.
pub(crate) fn shape_of(model: &CausalLm) -> DecoderShape {
    let count = |number: i64| u64::try_from(number).unwrap_or(0);
    let config = model.config();
    let intermediate = match config {
        ModelConfig::Llama(llama) => llama.intermediate_size,
        ModelConfig::Gpt2(gpt2) => gpt2.inner() * 2 / 3,
        // A family that this crate does not know yet: the usual proportion.
        _ => config.hidden_size() * 8 / 3,
    };
    DecoderShape {
        layers: model.num_layers() as u64,
        hidden: count(config.hidden_size()),
        intermediate: count(intermediate),
        heads: count(config.num_attention_heads()),
        kv_heads: count(config.num_key_value_heads()),
        head_dim: count(config.head_dim()),
        vocabulary: count(config.vocab_size()),
        tied_embeddings: config.tie_word_embeddings(),
    }
}

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
    pub(crate) fn memory_plan_of(&self, shape: DecoderShape) -> MemoryPlan {
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

    /// A recorder of this run's steps, which knows the model's arithmetic and the device's peak. On a
    /// CPU the peak is measured, which takes a fraction of a second.
    ///
    /// # Errors
    /// When the device cannot be measured.
    pub fn new_recorder(&self, model: &CausalLm) -> Result<StepRecorder> {
        let kind = match self.precision() {
            Precision::Fp16 => Kind::Half,
            Precision::Bf16 => Kind::BFloat16,
            _ => Kind::Float,
        };
        Ok(StepRecorder::new(StepRecorderConfig {
            device: model.device(),
            model: Some(ModelFlops {
                sequence_length: self.context_length,
                ..flops_of(model)
            }),
            peak_flops: Some(PeakFlops::of(model.device(), kind)?),
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
