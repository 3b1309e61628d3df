use std::fmt;
use std::str::FromStr;

use overdrive_checkpointing::{CheckpointOptions, Schedule};

/// How a model computes what it computes. The results differ by rounding only.
///
/// The defaults are the fastest measured; the others are there to compare with, to rule one out in the
/// search for a difference, and to trade time for memory.
#[derive(Debug, Clone, PartialEq)]
#[non_exhaustive]
pub struct Execution {
    /// Norms, rotary positions, gates and the loss in one pass each, with one product for query, key
    /// and value and one for gate and up (`overdrive-fused`), instead of libtorch's operators one by
    /// one. The loss then never holds all logits. Gradients of gradients need it off. Default true.
    pub fused_kernels: bool,
    /// The kernel of attention. Default: flash.
    pub attention: AttentionImplementation,
    /// Which blocks are computed again in backward instead of keeping what they made; not where a cache
    /// is given. Default: none. transformers' `gradient_checkpointing_enable` is `Schedule::EveryBlock`.
    pub checkpointing: Schedule,
    /// How they are: what they keep none the less, whether dropout repeats.
    pub checkpoint_options: CheckpointOptions,
}

impl Default for Execution {
    fn default() -> Self {
        Execution {
            fused_kernels: true,
            attention: AttentionImplementation::default(),
            checkpointing: Schedule::Never,
            checkpoint_options: CheckpointOptions::default(),
        }
    }
}

/// The kernel of attention, by transformers' names.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub enum AttentionImplementation {
    /// `eager`: a product, a mask, a softmax and a product. Memory grows with the square of the length.
    Eager,
    /// `sdpa`: libtorch's `scaled_dot_product_attention`, which picks a kernel.
    Sdpa,
    /// `flash_attention_2`: the best kernel of `overdrive-attention` for the device and the mask; memory
    /// grows with the length.
    #[default]
    Flash,
}

impl AttentionImplementation {
    /// Every implementation.
    pub const ALL: [Self; 3] = [Self::Eager, Self::Sdpa, Self::Flash];

    /// The name in transformers' configurations.
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

impl FromStr for AttentionImplementation {
    type Err = String;

    /// Also `flash`, `flash_attention` and `flash_attention_3`.
    fn from_str(name: &str) -> Result<Self, String> {
        match name {
            "eager" => Ok(Self::Eager),
            "sdpa" => Ok(Self::Sdpa),
            "flash" | "flash_attention" | "flash_attention_2" | "flash_attention_3" => {
                Ok(Self::Flash)
            }
            other => Err(format!(
                "{other:?} is no attention implementation: eager, sdpa or flash_attention_2"
            )),
        }
    }
}
