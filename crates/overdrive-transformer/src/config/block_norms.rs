//! The norms of a block: where they are, and what they are called.

use super::family::LlamaFamily;

/// The position of a norm in a block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum NormPosition {
    /// The input of attention is normalised.
    BeforeAttention,
    /// The output of attention is normalised, before it is added to the residual stream.
    AfterAttention,
    /// The input of the feed-forward block is normalised.
    BeforeMlp,
    /// The output of the feed-forward block is normalised, before it is added to the residual stream.
    AfterMlp,
}

impl LlamaFamily {
    /// Returns the norms of a block with their names, in the order of transformers' modules.
    pub(crate) fn block_norms(self) -> &'static [(NormPosition, &'static str)] {
        use NormPosition::{AfterAttention, AfterMlp, BeforeAttention, BeforeMlp};
        match self {
            LlamaFamily::Gemma2
            | LlamaFamily::Gemma3
            | LlamaFamily::Gemma3n
            | LlamaFamily::Gemma4 => &[
                (BeforeAttention, "input_layernorm"),
                (AfterAttention, "post_attention_layernorm"),
                (BeforeMlp, "pre_feedforward_layernorm"),
                (AfterMlp, "post_feedforward_layernorm"),
            ],
            LlamaFamily::Olmo2 | LlamaFamily::Olmo3 => &[
                (AfterAttention, "post_attention_layernorm"),
                (AfterMlp, "post_feedforward_layernorm"),
            ],
            LlamaFamily::Glm4 => &[
                (BeforeAttention, "input_layernorm"),
                (BeforeMlp, "post_attention_layernorm"),
                (AfterAttention, "post_self_attn_layernorm"),
                (AfterMlp, "post_mlp_layernorm"),
            ],
            _ => &[
                (BeforeAttention, "input_layernorm"),
                (BeforeMlp, "post_attention_layernorm"),
            ],
        }
    }
}
