use std::fmt;

use overdrive_checkpointing::{CheckpointOptions, Schedule};
use serde::{Deserialize, Serialize};

/// The implementations that compute a model. The results differ only by rounding.
///
/// The defaults are the fastest ones measured. The others are there for comparison, to narrow down the source
/// of a difference, and to trade time for memory.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Execution {
    /// If `true`, norms, rotary positions, gates and the loss are computed in one pass each, with one matmul
    /// for query, key and value and one for gate and up (`overdrive-fused`); if `false`, with separate libtorch
    /// operators. The fused loss never holds all logits. Higher-order gradients need `false`. Default: `true`.
    pub fused_kernels: bool,
    /// If `true`, a forward pass of few tokens over a cache, on a CPU in fp32 without gradients, runs on buffers that
    /// are reused from step to step, without a tensor for each result, so that small models decode faster. Needs
    /// `fused_kernels`. Default: `true`.
    pub fused_decoding: bool,
    /// The implementation of attention. Default: flash.
    pub attention: AttentionImplementation,
    /// If `false`, the residual stream of a decoder has the dtype of autocast in training with mixed precision, which saves
    /// memory; sums over the layers are then rounded to 16 bits. Megatron's option of the same name. Default: `true`,
    /// fp32, as PyTorch's autocast leaves it.
    pub fp32_residual_connection: bool,
    /// The blocks that are recomputed in backward instead of saving their activations; ignored with a cache.
    /// Default: none. transformers' `gradient_checkpointing_enable` is `Schedule::EveryBlock`.
    pub checkpointing: Schedule,
    /// The options of recomputation: the activations that are still saved, and how dropout is repeated.
    pub checkpoint_options: CheckpointOptions,
}

impl Default for Execution {
    fn default() -> Self {
        Execution {
            fused_kernels: true,
            fused_decoding: true,
            attention: AttentionImplementation::default(),
            fp32_residual_connection: true,
            checkpointing: Schedule::Never,
            checkpoint_options: CheckpointOptions::default(),
        }
    }
}

/// The implementations of attention, by transformers' names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AttentionImplementation {
    /// `eager`: a matmul, a mask, a softmax and a matmul. Memory grows with the square of the sequence length.
    Eager,
    /// `sdpa`: libtorch's `scaled_dot_product_attention`, which picks a kernel.
    Sdpa,
    /// `flash_attention_2`: the best kernel of `overdrive-attention` for the device and the mask; memory grows
    /// with the sequence length.
    #[default]
    #[serde(
        rename = "flash_attention_2",
        alias = "flash",
        alias = "flash_attention",
        alias = "flash_attention_3"
    )]
    Flash,
}

impl AttentionImplementation {
    /// All implementations.
    pub const ALL: [Self; 3] = [Self::Eager, Self::Sdpa, Self::Flash];

    /// Returns the name in transformers' configurations.
    pub fn name(self) -> &'static str {
        match self {
            Self::Eager => "eager",
            Self::Sdpa => "sdpa",
            Self::Flash => "flash_attention_2",
        }
    }
}

impl fmt::Display for AttentionImplementation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}
