//! An estimate of the memory of a training run, before it runs.
//!
//! The estimate is arithmetic on the shape of a decoder, without measurements. It names the largest consumers
//! of a step and the changes that make it fit. For `N = batch · length` tokens and the
//! widths `C` (hidden), `Q` (query heads together), `K` (key heads together), `I` (intermediate), `H`
//! (query heads), `T` (length) and `V` (vocabulary), a block keeps for its backward pass, in elements a
//! token:
//!
//! | kept by | libtorch's operators | fused kernels |
//! |---|---|---|
//! | each of two norms: the residual stream, the normalized stream | 2 C, fp32 | C, fp32 |
//! | the input of the joint projections under a norm | C; under autocast a half copy for each projection | C; under autocast one half copy |
//! | flash attention: query, key, value, output; log-sum-exp | 2 Q + 2 K; H fp32 | the same |
//! | eager attention: query, key, value, exponentials and probabilities, all fp32; output | Q + 2 K + 2 H T; Q | the same |
//! | the feed-forward layer: gate, its activation, up, their product | 4 I | 3 I |
//!
//! Elements without "fp32" are half precision under autocast. A checkpointed block keeps
//! only its input (C, fp32), and all of the above while it is recomputed. Backward also holds gradients of
//! activations: those of the loss at its start, those of one block later; the larger of both counts.

mod advice;
mod block;
mod loss;
mod optimizer;

pub use advice::{Change, MemoryAdvice};
pub use optimizer::OptimizerMemory;

use std::fmt;

use overdrive_checkpointing::{SavePolicy, Schedule};
use overdrive_core::{check_at_least, check_option, units};
use overdrive_precision::Precision;
use overdrive_transformer::AttentionImplementation;

use crate::Result;

/// The bytes of an element of the weights and of the residual stream, which are fp32 under autocast too.
const WEIGHT: f64 = 4.0;
/// The largest number of blocks of an estimate.
const MOST_LAYERS: u64 = 1 << 20;

/// The shape of a decoder of the Llama family.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct DecoderShape {
    /// The number of decoder blocks.
    pub layers: u64,
    /// The hidden size: features of a token between the blocks (C).
    pub hidden: u64,
    /// The intermediate size: features inside the feed-forward layer, or inside one expert of it (I).
    pub intermediate: u64,
    /// The number of query heads (H).
    pub heads: u64,
    /// The number of key and value heads.
    pub kv_heads: u64,
    /// The number of features per head.
    pub head_dim: u64,
    /// The size of the vocabulary (V).
    pub vocabulary: u64,
    /// If `true`, the head uses the weights of the embeddings.
    pub tied_embeddings: bool,
    /// The experts of every feed-forward layer; default: none, one layer for all tokens.
    pub experts: Option<ExpertShape>,
}

/// The experts of a feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ExpertShape {
    /// The number of experts (E).
    pub count: u64,
    /// The number of experts that compute a token (K).
    pub per_token: u64,
}

impl DecoderShape {
    /// Returns the number of weights of embeddings, linear layers and norms, without biases.
    pub fn parameters(&self) -> u64 {
        self.weights() as u64
    }

    // Sizes are `f64`, which are exact up to 2^53 and do not overflow, whatever a shape says.
    fn weights(&self) -> f64 {
        let blocks = self.layers as f64 * self.block_weights();
        self.tables() * self.embedding() + blocks + self.norms()
    }

    /// Returns the number of tables of the embeddings' size: the embeddings, and an untied head.
    fn tables(&self) -> f64 {
        if self.tied_embeddings { 1.0 } else { 2.0 }
    }

    /// Returns the number of weights of the embeddings.
    fn embedding(&self) -> f64 {
        self.vocabulary as f64 * self.hidden as f64
    }

    fn norms(&self) -> f64 {
        (2.0 * self.layers as f64 + 1.0) * self.hidden as f64
    }

    /// Returns the number of weights of the linear layers of a block.
    fn block_weights(&self) -> f64 {
        let router = self.experts.map_or(0.0, |experts| experts.count as f64);
        let feed_forward = 3.0 * self.intermediate as f64 * self.expert_count() + router;
        self.hidden as f64 * (2.0 * (self.queries() + self.keys()) + feed_forward)
    }

    fn expert_count(&self) -> f64 {
        self.experts.map_or(1.0, |experts| experts.count as f64)
    }

    /// Returns the number of features inside the feed-forward layer that compute a token.
    fn active_intermediate(&self) -> f64 {
        let experts = self.experts.map_or(1, |experts| experts.per_token);
        self.intermediate as f64 * experts as f64
    }

    fn queries(&self) -> f64 {
        self.heads as f64 * self.head_dim as f64
    }

    fn keys(&self) -> f64 {
        self.kv_heads as f64 * self.head_dim as f64
    }
}

/// The run to estimate.
#[derive(Debug, Clone)]
pub struct MemoryPlan {
    /// The model.
    pub shape: DecoderShape,
    /// The number of sequences of a micro-batch.
    pub batch: u64,
    /// The number of tokens per sequence.
    pub length: u64,
    /// The precision.
    pub precision: Precision,
    /// The attention.
    pub attention: AttentionImplementation,
    /// The blocks that backward recomputes.
    pub schedule: Schedule,
    /// The results of recomputed blocks that are kept nevertheless.
    pub policy: SavePolicy,
    /// If `true`, norms, rotary positions, gates and the loss are fused; the loss then never holds all
    /// logits.
    pub fused_kernels: bool,
    /// The state of the optimizer.
    pub optimizer: OptimizerMemory,
    /// If `true`, gradients of several micro-batches are accumulated, and so exist during forward.
    pub accumulates: bool,
    /// If `true`, the loss holds all logits in fp32 even with fused kernels, as that of preferences does.
    pub whole_logits: bool,
    /// The memory of the GPU, of which the fused loss uses a part of what the other tensors leave; `None` for a CPU, where
    /// it works in smaller chunks.
    pub gpu_memory: Option<GpuMemory>,
}

/// The memory of a GPU, as far as the fused loss depends on it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct GpuMemory {
    /// The bytes that the tensors of the run may take.
    pub bytes: u64,
    /// If `true`, a kernel of overdrive-gpu computes the loss in place; libtorch's operators, which other GPUs run, take
    /// 8 bytes more for each logit of a chunk.
    pub loss_kernel: bool,
}

impl MemoryPlan {
    /// Creates a plan with defaults: a CPU, fp32, flash attention, no recomputation, libtorch's
    /// operators, AdamW, one micro-batch per step.
    pub fn new(shape: DecoderShape, batch: u64, length: u64) -> Self {
        Self {
            shape,
            batch,
            length,
            precision: Precision::Fp32,
            attention: AttentionImplementation::Flash,
            schedule: Schedule::Never,
            policy: SavePolicy::Nothing,
            fused_kernels: false,
            optimizer: OptimizerMemory::default(),
            accumulates: false,
            whole_logits: false,
            gpu_memory: None,
        }
    }

    fn tokens(&self) -> f64 {
        self.batch as f64 * self.length as f64
    }

    fn hidden(&self) -> f64 {
        self.shape.hidden as f64
    }

    /// Returns `true` if matrix products are in half precision, under autocast.
    fn is_half(&self) -> bool {
        self.precision.autocast_dtype().is_some()
    }

    /// Returns the bytes of an element between matrix products.
    fn inner_bytes(&self) -> f64 {
        if self.is_half() { 2.0 } else { 4.0 }
    }

    /// Returns the estimate.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`] for a shape, a batch or a length of 0; a schedule of other blocks than the
    /// model's.
    ///
    /// ```
    /// use overdrive_checkpointing::Schedule;
    /// use overdrive_trainer::{DecoderShape, MemoryPlan};
    ///
    /// let shape = DecoderShape {
    ///     layers: 6, hidden: 256, intermediate: 688, heads: 4, kv_heads: 4, head_dim: 64,
    ///     vocabulary: 4096, tied_embeddings: true, experts: None,
    /// };
    /// let plan = MemoryPlan::new(shape, 8, 256);
    /// let whole = plan.estimate()?;
    /// assert_eq!(whole.parameters, 4 * 5_795_072);
    /// let recomputed = MemoryPlan { schedule: Schedule::EveryBlock, ..plan }.estimate()?;
    /// assert!(2 * recomputed.activations < whole.activations);
    /// println!("{whole}");
    /// # Ok::<(), overdrive_trainer::Error>(())
    /// ```
    pub fn estimate(&self) -> Result<MemoryEstimate> {
        self.validate()?;
        let shape = &self.shape;
        let parameters = WEIGHT * shape.weights();
        let gradients = parameters;
        let optimizer = self.optimizer.bytes(shape) as f64;
        // Autocast caches the half-precision weights until its outermost region ends, and backward keeps them.
        let casts = match self.is_half() {
            true => 2.0 * (shape.layers as f64 * shape.block_weights() + shape.embedding()),
            false => 0.0,
        };
        let during_forward = if self.accumulates { gradients } else { 0.0 };
        let tail = block::tail(self);
        let (kept, in_blocks) = block::kept_and_peak(self)?;
        let before_loss = during_forward + casts + kept + tail;
        let loss = loss::peak(self, parameters + optimizer + before_loss);
        let head_gradient = WEIGHT * shape.embedding();
        // The points of a step at which memory can peak, in addition to weights and optimizer state.
        let points = [
            (PeakPoint::Loss, before_loss + loss),
            (
                PeakPoint::Blocks,
                during_forward.max(head_gradient) + casts + in_blocks,
            ),
            // The dense gradient of the embedding lookup exists beside the one that it is added to.
            (
                PeakPoint::EndOfBackward,
                gradients + head_gradient + casts + block::one_block_backward(self),
            ),
            (
                PeakPoint::Optimizer,
                gradients + self.optimizer.working_bytes(shape),
            ),
        ];
        let (peak_point, extra) = points
            .into_iter()
            .max_by(|(_, one), (_, other)| one.total_cmp(other))
            .unwrap_or((PeakPoint::Loss, 0.0));
        Ok(MemoryEstimate {
            parameters: parameters as u64,
            gradients: gradients as u64,
            optimizer: optimizer as u64,
            cast_weights: casts as u64,
            activations: (kept + tail) as u64,
            recomputed: (in_blocks - kept) as u64,
            logits: loss as u64,
            peak: (parameters + optimizer + extra) as u64,
            peak_point,
        })
    }

    fn validate(&self) -> Result<()> {
        let shape = &self.shape;
        for (name, value) in [
            ("layers", shape.layers),
            ("hidden", shape.hidden),
            ("intermediate", shape.intermediate),
            ("heads", shape.heads),
            ("kv_heads", shape.kv_heads),
            ("head_dim", shape.head_dim),
            ("vocabulary", shape.vocabulary),
            ("batch", self.batch),
            ("length", self.length),
        ] {
            check_at_least(name, value, 1)?;
        }
        // The blocks are counted one by one.
        let valid = shape.layers <= MOST_LAYERS;
        Ok(check_option(
            valid,
            "layers",
            shape.layers,
            format!("at most {MOST_LAYERS}"),
        )?)
    }
}

/// The point of a step at which memory peaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum PeakPoint {
    /// Between forward and backward: all activations and the logits.
    Loss,
    /// In backward through the blocks.
    Blocks,
    /// At the end of backward: all gradients.
    EndOfBackward,
    /// In the update.
    Optimizer,
}

impl PeakPoint {
    fn description(self) -> &'static str {
        match self {
            Self::Loss => "at the loss, with all activations alive",
            Self::Blocks => "in backward through the blocks",
            Self::EndOfBackward => "at the end of backward, with all gradients alive",
            Self::Optimizer => "in the optimizer's update",
        }
    }
}

/// The estimated memory of a run, in bytes. [`Display`](fmt::Display) is a table.
///
/// Not everything is alive at once, so the sum is more than [`peak`](Self::peak).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryEstimate {
    /// The weights.
    pub parameters: u64,
    /// Their gradients.
    pub gradients: u64,
    /// The resident state of the optimizer.
    pub optimizer: u64,
    /// The copies of the weights in half precision under autocast.
    pub cast_weights: u64,
    /// The activations that forward keeps for backward, without the logits.
    pub activations: u64,
    /// The additional memory of backward through the blocks: recomputed blocks, gradients of activations.
    pub recomputed: u64,
    /// The logits, their softmax and its gradient; of a fused loss a chunk of them and the gradients of the head.
    pub logits: u64,
    /// The peak of live tensors.
    pub peak: u64,
    /// The point of the step at which memory peaks.
    pub peak_point: PeakPoint,
}

impl fmt::Display for MemoryEstimate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (name, bytes) in [
            ("parameters", self.parameters),
            ("gradients", self.gradients),
            ("optimizer states", self.optimizer),
            ("half-precision weights", self.cast_weights),
            ("activations", self.activations),
            ("backward and recomputation", self.recomputed),
            ("logits and loss", self.logits),
        ] {
            if bytes > 0 {
                writeln!(f, "{name:<28} {:>10}", units::bytes(bytes))?;
            }
        }
        let peak = units::bytes(self.peak);
        write!(
            f,
            "{:<28} {peak:>10}  {}",
            "peak",
            self.peak_point.description()
        )
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    pub(super) fn tiny() -> DecoderShape {
        DecoderShape {
            layers: 6,
            hidden: 256,
            intermediate: 688,
            heads: 4,
            kv_heads: 4,
            head_dim: 64,
            vocabulary: 4096,
            tied_embeddings: true,
            experts: None,
        }
    }

    fn peak(plan: MemoryPlan) -> u64 {
        plan.estimate().expect("a plan").peak
    }

    #[test]
    fn the_parameters_are_counted_to_the_last_one() {
        assert_eq!(tiny().parameters(), 5_795_072);
        // Llama 3.1 8B.
        let llama = DecoderShape {
            layers: 32,
            hidden: 4096,
            intermediate: 14336,
            heads: 32,
            kv_heads: 8,
            head_dim: 128,
            vocabulary: 128_256,
            tied_embeddings: false,
            experts: None,
        };
        assert_eq!(llama.parameters(), 8_030_261_248);
        // Mixtral 8x7B: the weights are those of all experts, the activations those of two.
        let mixtral = DecoderShape {
            vocabulary: 32_000,
            experts: Some(ExpertShape {
                count: 8,
                per_token: 2,
            }),
            ..llama
        };
        assert_eq!(mixtral.parameters(), 46_702_792_704);
        assert_eq!(mixtral.active_intermediate(), 2.0 * 14336.0);
    }

    #[test]
    fn a_plan_without_a_batch_is_an_error_that_names_the_field() {
        let error = MemoryPlan::new(tiny(), 0, 256)
            .estimate()
            .expect_err("no batch");
        assert_eq!(error.to_string(), "`batch` is 0; it must be at least 1");
    }

    #[test]
    fn eager_attention_grows_with_the_square_of_the_length_and_flash_does_not() {
        let activations = |attention, length| {
            let plan = MemoryPlan {
                attention,
                ..MemoryPlan::new(tiny(), 1, length)
            };
            plan.estimate().expect("a plan").activations as f64
        };
        let growth = |attention| activations(attention, 8192) / activations(attention, 4096);
        assert!((growth(AttentionImplementation::Flash) - 2.0).abs() < 0.01);
        assert!(growth(AttentionImplementation::Eager) > 3.0);
    }

    #[test]
    fn root_segments_grow_with_the_root_of_the_depth() {
        let kept = |layers, schedule: &Schedule| {
            let shape = DecoderShape { layers, ..tiny() };
            let plan = MemoryPlan {
                schedule: schedule.clone(),
                ..MemoryPlan::new(shape, 8, 256)
            };
            block::kept_and_peak(&plan).expect("a plan").1
        };
        let growth = |schedule| kept(256, &schedule) / kept(64, &schedule);
        assert!((growth(Schedule::Never) - 4.0).abs() < 0.05);
        let root = growth(Schedule::SqrtSegments);
        assert!((1.9..2.3).contains(&root), "{root}");
    }

    #[test]
    fn a_schedule_of_other_blocks_is_an_error() {
        let plan = MemoryPlan {
            schedule: Schedule::Segments(7),
            ..MemoryPlan::new(tiny(), 8, 256)
        };
        let error = plan.estimate().expect_err("six blocks").to_string();
        assert!(error.starts_with("`segments` is 7; "), "{error}");
    }

    #[test]
    fn kept_results_take_memory_in_every_recomputed_block() {
        let kept = |policy, schedule| {
            let plan = MemoryPlan {
                policy,
                schedule,
                ..MemoryPlan::new(tiny(), 8, 256)
            };
            plan.estimate().expect("a plan").activations
        };
        let added = |policy, schedule: Schedule| {
            kept(policy, schedule.clone()) - kept(SavePolicy::Nothing, schedule)
        };
        let attention = 4 * 2048 * 256;
        let one = added(SavePolicy::Attention, Schedule::EveryBlock);
        assert_eq!(one, 6 * attention);
        let two = added(SavePolicy::Attention, Schedule::Segments(2));
        assert_eq!(two, 3 * attention, "the last segment is not recomputed");
        assert_eq!(
            added(SavePolicy::MatmulsAndAttention, Schedule::EveryBlock),
            one + added(SavePolicy::Matmuls, Schedule::EveryBlock)
        );
    }

    #[test]
    fn a_gpu_has_larger_chunks_of_logits_which_shrink_with_what_is_left() {
        // Of Qwen2.5 0.5B.
        let shape = DecoderShape {
            layers: 24,
            hidden: 896,
            intermediate: 4864,
            heads: 14,
            kv_heads: 2,
            head_dim: 64,
            vocabulary: 151_936,
            tied_embeddings: true,
            experts: None,
        };
        let logits = |gpu_memory, batch| {
            let plan = MemoryPlan {
                precision: Precision::Bf16,
                fused_kernels: true,
                gpu_memory,
                ..MemoryPlan::new(shape, batch, 1024)
            };
            let gradients = 2 * batch * 1024 * 896 + 4 * 151_936 * 896;
            let estimate = plan.estimate().expect("a plan");
            ((estimate.logits - gradients) / 151_936, estimate.peak)
        };
        let gpu = |bytes, loss_kernel| Some(GpuMemory { bytes, loss_kernel });
        assert_eq!(logits(None, 8).0, 256 * 2);
        assert_eq!(logits(gpu(140 << 30, true), 8).0, 4096 * 2);
        let operators = logits(gpu(140 << 30, false), 8).0;
        assert_eq!(operators, 4096 * (2 + 8), "two fp32 tensors of the chunk");
        let all = logits(gpu(140 << 30, true), 1).0;
        assert_eq!(all, 1024 * 2, "all rows of the batch");
        assert_eq!(logits(gpu(1 << 30, true), 8).0, 256 * 2, "nothing is left");
        // A chunk takes at most a quarter of what is left.
        let (bytes, peak) = logits(gpu(24 << 30, true), 4);
        let rows = bytes / 2;
        assert!(
            256 < rows && rows < 4096 && peak < 24 << 30,
            "{rows} {peak}"
        );
    }

    #[test]
    fn preferences_hold_all_logits_whatever_the_kernels() {
        let plan = MemoryPlan {
            fused_kernels: true,
            whole_logits: true,
            ..MemoryPlan::new(tiny(), 8, 256)
        };
        let of_operators = MemoryPlan::new(tiny(), 8, 256).estimate().expect("a plan");
        assert_eq!(plan.estimate().expect("a plan").logits, of_operators.logits);
    }

    #[test]
    fn no_size_overflows() {
        let huge = u64::MAX;
        let shape = DecoderShape {
            layers: 6,
            hidden: huge,
            intermediate: huge,
            heads: huge,
            kv_heads: huge,
            head_dim: huge,
            vocabulary: huge,
            tied_embeddings: false,
            experts: Some(ExpertShape {
                count: huge,
                per_token: huge,
            }),
        };
        for optimizer in [
            OptimizerMemory::AdamW8bit,
            OptimizerMemory::Adafactor,
            OptimizerMemory::Muon,
            OptimizerMemory::Other(f64::MAX),
        ] {
            for fused_kernels in [false, true] {
                let plan = MemoryPlan {
                    optimizer,
                    fused_kernels,
                    gpu_memory: Some(GpuMemory {
                        bytes: huge,
                        loss_kernel: false,
                    }),
                    ..MemoryPlan::new(shape, huge, huge)
                };
                assert_eq!(peak(plan), u64::MAX);
            }
        }
    }

    #[test]
    fn the_table_names_the_consumers_and_the_peak_point() {
        let estimate = MemoryPlan::new(tiny(), 8, 256).estimate().expect("a plan");
        let text = estimate.to_string();
        assert!(
            text.contains("parameters                     22.1 MiB\n"),
            "{text}"
        );
        assert!(
            text.contains("optimizer states               44.2 MiB\n"),
            "{text}"
        );
        assert!(
            text.ends_with("at the loss, with all activations alive"),
            "{text}"
        );
        assert!(!text.contains("half-precision"), "{text}");
    }

    proptest! {
        #[test]
        fn less_of_anything_never_takes_more(
            layers in 1_u64..40, hidden in 1_u64..64, heads in 1_u64..8, batch in 1_u64..32,
            length in 1_u64..4096, fused in any::<bool>(), accumulates in any::<bool>(),
        ) {
            let shape = DecoderShape {
                layers, hidden: 64 * hidden, intermediate: 128 * hidden, heads, kv_heads: heads,
                head_dim: 64, vocabulary: 1000, tied_embeddings: true, experts: None,
            };
            let plan = MemoryPlan {
                fused_kernels: fused, accumulates, ..MemoryPlan::new(shape, batch, length)
            };
            let whole = peak(plan.clone());
            let half = peak(MemoryPlan { batch: batch.div_ceil(2), ..plan.clone() });
            let small = peak(MemoryPlan { optimizer: OptimizerMemory::AdamW8bit, ..plan.clone() });
            let eager = AttentionImplementation::Eager;
            let eager = peak(MemoryPlan { attention: eager, ..plan.clone() });
            prop_assert!(half <= whole && small <= whole && whole <= eager);
            let fused = peak(MemoryPlan { fused_kernels: true, ..plan.clone() });
            let unfused = peak(MemoryPlan { fused_kernels: false, ..plan.clone() });
            // A short batch has fewer logits than the chunk that the fused loss works in.
            prop_assert!(fused <= unfused + (32 << 20));
            let estimate = plan.estimate().expect("a plan");
            prop_assert!(estimate.peak >= estimate.parameters + estimate.optimizer + estimate.gradients);
        }
    }
}
