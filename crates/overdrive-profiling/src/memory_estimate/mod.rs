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

use overdrive_core::{check_at_least, units};
use serde::{Deserialize, Serialize};

use crate::Result;

/// The shape of a decoder of the Llama family.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
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
    #[serde(default)]
    pub experts: Option<ExpertShape>,
}

/// The experts of a feed-forward layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertShape {
    /// The number of experts (E).
    pub count: u64,
    /// The number of experts that compute a token (K).
    pub per_token: u64,
}

impl DecoderShape {
    /// Returns the number of weights of embeddings, linear layers and norms, without biases.
    pub fn parameters(&self) -> u64 {
        let heads = if self.tied_embeddings { 1 } else { 2 };
        heads * self.embedding() + self.layers * self.block_weights() + self.norms()
    }

    /// Returns the number of weights of the embeddings.
    fn embedding(&self) -> u64 {
        self.vocabulary * self.hidden
    }

    fn norms(&self) -> u64 {
        (2 * self.layers + 1) * self.hidden
    }

    /// Returns the number of weights of the linear layers of a block.
    fn block_weights(&self) -> u64 {
        let (queries, keys) = (self.queries(), self.keys());
        let router = self.experts.map_or(0, |experts| experts.count);
        let feed_forward = 3 * self.intermediate * self.expert_count() + router;
        self.hidden * (2 * queries + 2 * keys + feed_forward)
    }

    fn expert_count(&self) -> u64 {
        self.experts.map_or(1, |experts| experts.count)
    }

    /// Returns the number of features inside the feed-forward layer that compute a token.
    fn active_intermediate(&self) -> u64 {
        self.intermediate * self.experts.map_or(1, |experts| experts.per_token)
    }

    fn queries(&self) -> u64 {
        self.heads * self.head_dim
    }

    fn keys(&self) -> u64 {
        self.kv_heads * self.head_dim
    }
}

/// The precision of a run.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MemoryPrecision {
    /// Weights and arithmetic in fp32 (or TF32).
    #[default]
    Fp32,
    /// fp32 weights, matrix products in fp16 or bf16 under autocast.
    Autocast,
    /// bf16 weights and arithmetic; fp32 master weights count as state of the optimizer.
    Bf16,
}

/// The implementation of attention.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum MemoryAttention {
    /// A kernel that never stores the probabilities.
    #[default]
    Flash,
    /// Matrix products and a softmax, which keep the probabilities of all heads.
    Eager,
}

/// The blocks that backward recomputes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Recomputation {
    /// No block.
    #[default]
    Never,
    /// Each block individually.
    EveryBlock,
    /// Every n-th block individually, starting with the first.
    EveryNth(u64),
    /// This many segments, each recomputed as a whole, except the last one.
    Segments(u64),
    /// The square root of the number of blocks as the number of segments.
    SqrtSegments,
    /// Each block, except the results of its matrix products and attention, which are kept.
    Selective,
}

impl Recomputation {
    /// Returns the sizes of the groups of blocks in order, each with `true` if it is recomputed.
    fn groups(self, layers: u64) -> Vec<(u64, bool)> {
        let single = |checkpointed: &dyn Fn(u64) -> bool| {
            (0..layers).map(|layer| (1, checkpointed(layer))).collect()
        };
        match self {
            Self::Never => single(&|_| false),
            Self::EveryBlock | Self::Selective => single(&|_| true),
            Self::EveryNth(n) => single(&|layer| layer % n.max(1) == 0),
            Self::Segments(count) => segments(layers, count.clamp(1, layers.max(1))),
            Self::SqrtSegments => {
                let root = (layers as f64).sqrt().round() as u64;
                segments(layers, root.max(1))
            }
        }
    }
}

fn segments(layers: u64, count: u64) -> Vec<(u64, bool)> {
    let size = layers / count;
    (1..=count)
        .map(|index| {
            let last = index == count;
            // The last segment is kept: its backward begins at once, so recomputing it would save nothing. It also
            // takes the remainder, as torch's `checkpoint_sequential` does.
            let length = if last {
                layers - size * (count - 1)
            } else {
                size
            };
            (length, !last)
        })
        .collect()
}

/// The run to estimate.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MemoryPlan {
    /// The model.
    pub shape: DecoderShape,
    /// The number of sequences of a micro-batch.
    pub batch: u64,
    /// The number of tokens per sequence.
    pub length: u64,
    /// The precision.
    #[serde(default)]
    pub precision: MemoryPrecision,
    /// The attention.
    #[serde(default)]
    pub attention: MemoryAttention,
    /// The blocks that are recomputed.
    #[serde(default)]
    pub recomputation: Recomputation,
    /// If `true`, norms, rotary positions, gates and the loss are fused; the loss then never holds all
    /// logits.
    #[serde(default)]
    pub fused_kernels: bool,
    /// The state of the optimizer.
    #[serde(default)]
    pub optimizer: OptimizerMemory,
    /// If `true`, gradients of several micro-batches are accumulated, and so exist during forward.
    #[serde(default)]
    pub accumulates: bool,
}

impl MemoryPlan {
    /// Creates a plan with defaults: fp32, flash attention, no recomputation, libtorch's
    /// operators, AdamW, one micro-batch per step.
    pub fn new(shape: DecoderShape, batch: u64, length: u64) -> Self {
        Self {
            shape,
            batch,
            length,
            precision: MemoryPrecision::default(),
            attention: MemoryAttention::default(),
            recomputation: Recomputation::default(),
            fused_kernels: false,
            optimizer: OptimizerMemory::default(),
            accumulates: false,
        }
    }

    fn tokens(&self) -> u64 {
        self.batch * self.length
    }

    /// Returns the bytes of an element of the weights.
    fn weight_bytes(&self) -> u64 {
        match self.precision {
            MemoryPrecision::Fp32 | MemoryPrecision::Autocast => 4,
            MemoryPrecision::Bf16 => 2,
        }
    }

    /// Returns the bytes of an element of the residual stream.
    fn stream_bytes(&self) -> u64 {
        self.weight_bytes()
    }

    /// Returns the bytes of an element between matrix products.
    fn inner_bytes(&self) -> u64 {
        match self.precision {
            MemoryPrecision::Fp32 => 4,
            MemoryPrecision::Autocast | MemoryPrecision::Bf16 => 2,
        }
    }

    /// Returns the estimate.
    ///
    /// # Errors
    /// [`overdrive_core::Error::InvalidOption`] for a shape, a batch or a length of 0.
    ///
    /// ```
    /// use overdrive_profiling::{DecoderShape, MemoryPlan, Recomputation};
    ///
    /// let shape = DecoderShape {
    ///     layers: 6, hidden: 256, intermediate: 688, heads: 4, kv_heads: 4, head_dim: 64,
    ///     vocabulary: 4096, tied_embeddings: true, experts: None,
    /// };
    /// let plan = MemoryPlan::new(shape, 8, 256);
    /// let whole = plan.estimate()?;
    /// assert_eq!(whole.parameters, 4 * 5_795_072);
    /// let recomputed = MemoryPlan { recomputation: Recomputation::EveryBlock, ..plan }.estimate()?;
    /// assert!(2 * recomputed.activations < whole.activations);
    /// println!("{whole}");
    /// # Ok::<(), overdrive_profiling::Error>(())
    /// ```
    pub fn estimate(&self) -> Result<MemoryEstimate> {
        self.validate()?;
        let shape = &self.shape;
        let parameters = self.weight_bytes() * shape.parameters();
        let gradients = parameters;
        let optimizer = self.optimizer.bytes(shape);
        // Autocast caches the half-precision weights until its outermost region ends, and backward keeps them.
        let casts = match self.precision {
            MemoryPrecision::Autocast => {
                2 * (shape.layers * shape.block_weights() + shape.embedding())
            }
            MemoryPrecision::Fp32 | MemoryPrecision::Bf16 => 0,
        };
        let during_forward = if self.accumulates { gradients } else { 0 };
        let tail = block::tail(self);
        let (kept, in_blocks) = block::kept_and_peak(self);
        let loss = loss::peak(self);
        let head_gradient = self.weight_bytes() * shape.embedding();
        // The points of a step at which memory can peak, in addition to weights and optimizer state.
        let points = [
            (PeakPoint::Loss, during_forward + casts + kept + tail + loss),
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
            .max_by_key(|&(_, bytes)| bytes)
            .unwrap_or((PeakPoint::Loss, 0));
        Ok(MemoryEstimate {
            parameters,
            gradients,
            optimizer,
            cast_weights: casts,
            activations: kept + tail,
            recomputed: in_blocks.saturating_sub(kept),
            logits: loss,
            peak: parameters + optimizer + extra,
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
        Ok(())
    }
}

/// The point of a step at which memory peaks.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
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
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
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
        assert_eq!(mixtral.active_intermediate(), 2 * 14336);
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
        assert!((growth(MemoryAttention::Flash) - 2.0).abs() < 0.01);
        assert!(growth(MemoryAttention::Eager) > 3.0);
    }

    #[test]
    fn root_segments_grow_with_the_root_of_the_depth() {
        let kept = |layers, recomputation| {
            let shape = DecoderShape { layers, ..tiny() };
            let plan = MemoryPlan {
                recomputation,
                ..MemoryPlan::new(shape, 8, 256)
            };
            block::kept_and_peak(&plan).1 as f64
        };
        let growth = |recomputation| kept(256, recomputation) / kept(64, recomputation);
        assert!((growth(Recomputation::Never) - 4.0).abs() < 0.05);
        let root = growth(Recomputation::SqrtSegments);
        assert!((1.9..2.3).contains(&root), "{root}");
    }

    #[test]
    fn segments_are_those_of_overdrive_checkpointing() {
        assert_eq!(
            Recomputation::SqrtSegments.groups(9),
            [(3, true), (3, true), (3, false)]
        );
        assert_eq!(
            Recomputation::Segments(2).groups(5),
            [(2, true), (3, false)]
        );
        assert_eq!(
            Recomputation::EveryNth(2).groups(3),
            [(1, true), (1, false), (1, true)]
        );
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
            let whole = peak(plan);
            let half = peak(MemoryPlan { batch: batch.div_ceil(2), ..plan });
            let small = peak(MemoryPlan { optimizer: OptimizerMemory::AdamW8bit, ..plan });
            let eager = peak(MemoryPlan { attention: MemoryAttention::Eager, ..plan });
            prop_assert!(half <= whole && small <= whole && whole <= eager);
            let fused = peak(MemoryPlan { fused_kernels: true, ..plan });
            let unfused = peak(MemoryPlan { fused_kernels: false, ..plan });
            // A short batch has fewer logits than the chunk that the fused loss works in.
            prop_assert!(fused <= unfused + (32 << 20));
            let estimate = plan.estimate().expect("a plan");
            prop_assert!(estimate.peak >= estimate.parameters + estimate.optimizer + estimate.gradients);
        }
    }
}
