use serde_json::Value;

use super::fields::bad;
use crate::{Error, Result};

/// The member of the family that a [`LlamaConfig`](crate::LlamaConfig) describes; they differ in biases, norms
/// and windows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
#[non_exhaustive]
pub enum LlamaFamily {
    /// Llama 1 to 3.
    #[default]
    Llama,
    /// Mistral: every layer may have a sliding window.
    Mistral,
    /// Qwen2: biases on query, key and value.
    Qwen2,
    /// Qwen3: queries and keys are normalised head by head.
    Qwen3,
    /// Phi-1, 1.5 and 2: attention and the feed-forward block read one LayerNorm and are added together, all
    /// layers and the head have biases, and the first channels of a head are rotated.
    Phi,
    /// Phi-3, Phi-3.5 and Phi-4: query, key and value are one layer, and gate and up another one.
    Phi3,
    /// Gemma 1: norms multiply by `1 + weight`, and the embedding is scaled.
    Gemma,
    /// Gemma 2: norms multiply by `1 + weight` and follow attention and the feed-forward block, too; the
    /// embedding is scaled, scores and logits are bounded, and every other layer has a sliding window.
    Gemma2,
    /// Gemma 3 (text): as Gemma 2, with normalised queries and keys instead of the bounds, and with other
    /// rotary frequencies for sliding layers, which are five of six.
    Gemma3,
    /// Mixtral: a Mistral whose feed-forward blocks are mixtures of experts.
    Mixtral,
    /// Qwen3-MoE: a Qwen3 with mixtures of experts in some or all layers.
    Qwen3Moe,
    /// SmolLM3: a Llama in which every fourth layer has no rotary positions.
    SmolLm3,
    /// OLMo 2: norms follow attention and the feed-forward block instead of preceding them, and queries and keys
    /// are normalised as a whole, not head by head.
    Olmo2,
    /// OLMo 3: an OLMo 2 whose layers have a sliding window, except every fourth, and whose scaling of rotary
    /// positions is that of layers without a window.
    Olmo3,
    /// Granite 3: a Llama with factors of the embedding, the scores, the outputs of blocks and the logits.
    Granite,
    /// GLM-4: norms precede and follow attention and the feed-forward block, gate and up are one layer, and
    /// neighbouring channels of the first half of a head are rotated together.
    Glm4,
    /// Qwen2-MoE: a Qwen2 with mixtures of experts, of which one computes every token.
    Qwen2Moe,
    /// gpt-oss: mixtures of experts with bounded gates, every other layer with a sliding window, and for each head a
    /// logit that takes part in the softmax without a value.
    GptOss,
    /// Ministral 3: a Mistral whose queries are multiplied by a factor that grows with their position.
    Ministral3,
    /// Granite 4 without Mamba layers and experts: a Granite 3 whose gate and up are one layer, with or without rotary
    /// positions.
    GraniteMoeHybrid,
    /// DeepSeek-V2: multi-head latent attention, and mixtures of experts beside an expert that computes every token.
    DeepseekV2,
    /// DeepSeek-V3: a DeepSeek-V2 whose routers score experts by sigmoids, and choose them by corrected scores.
    DeepseekV3,
    /// Qwen3-Next: layers of linear attention by the gated delta rule, every fourth of full attention with a gate, and
    /// mixtures of experts.
    Qwen3Next,
    /// Qwen3.5 (text): a Qwen3-Next without experts, whose layers of linear attention have other projections.
    Qwen35,
    /// Qwen3.5 with experts (text).
    Qwen35Moe,
    /// Gemma 3n (text): parallel residual streams, an input of each layer beside them, sparse gates, and last layers that
    /// share the keys and values of earlier ones.
    Gemma3n,
    /// Gemma 4 (text): as Gemma 3n, with one residual stream, and with heads of another size in layers without a window;
    /// with or without a mixture of experts beside the feed-forward block of each layer.
    Gemma4,
    /// Qwen3-VL, dense: a Qwen3 that sees images, with three rotary positions for each token.
    Qwen3Vl,
    /// Qwen3-VL with experts: a Qwen3-MoE that sees images as Qwen3-VL does.
    Qwen3VlMoe,
}

impl LlamaFamily {
    /// All families.
    pub const ALL: [LlamaFamily; 29] = [
        LlamaFamily::Llama,
        LlamaFamily::Mistral,
        LlamaFamily::Qwen2,
        LlamaFamily::Qwen3,
        LlamaFamily::Phi,
        LlamaFamily::Phi3,
        LlamaFamily::Gemma,
        LlamaFamily::Gemma2,
        LlamaFamily::Gemma3,
        LlamaFamily::Mixtral,
        LlamaFamily::Qwen3Moe,
        LlamaFamily::SmolLm3,
        LlamaFamily::Olmo2,
        LlamaFamily::Olmo3,
        LlamaFamily::Granite,
        LlamaFamily::Glm4,
        LlamaFamily::Qwen2Moe,
        LlamaFamily::GptOss,
        LlamaFamily::Ministral3,
        LlamaFamily::GraniteMoeHybrid,
        LlamaFamily::DeepseekV2,
        LlamaFamily::DeepseekV3,
        LlamaFamily::Qwen3Next,
        LlamaFamily::Qwen35,
        LlamaFamily::Qwen35Moe,
        LlamaFamily::Gemma3n,
        LlamaFamily::Gemma4,
        LlamaFamily::Qwen3Vl,
        LlamaFamily::Qwen3VlMoe,
    ];

    /// Returns the `model_type` of transformers.
    pub fn model_type(self) -> &'static str {
        match self {
            LlamaFamily::Llama => "llama",
            LlamaFamily::Mistral => "mistral",
            LlamaFamily::Qwen2 => "qwen2",
            LlamaFamily::Qwen3 => "qwen3",
            LlamaFamily::Phi => "phi",
            LlamaFamily::Phi3 => "phi3",
            LlamaFamily::Gemma => "gemma",
            LlamaFamily::Gemma2 => "gemma2",
            LlamaFamily::Gemma3 => "gemma3_text",
            LlamaFamily::Mixtral => "mixtral",
            LlamaFamily::Qwen3Moe => "qwen3_moe",
            LlamaFamily::SmolLm3 => "smollm3",
            LlamaFamily::Olmo2 => "olmo2",
            LlamaFamily::Olmo3 => "olmo3",
            LlamaFamily::Granite => "granite",
            LlamaFamily::Glm4 => "glm4",
            LlamaFamily::Qwen2Moe => "qwen2_moe",
            LlamaFamily::GptOss => "gpt_oss",
            LlamaFamily::Ministral3 => "ministral3",
            LlamaFamily::GraniteMoeHybrid => "granitemoehybrid",
            LlamaFamily::DeepseekV2 => "deepseek_v2",
            LlamaFamily::DeepseekV3 => "deepseek_v3",
            LlamaFamily::Qwen3Next => "qwen3_next",
            LlamaFamily::Qwen35 => "qwen3_5_text",
            LlamaFamily::Qwen35Moe => "qwen3_5_moe_text",
            LlamaFamily::Gemma3n => "gemma3n_text",
            LlamaFamily::Gemma4 => "gemma4_text",
            LlamaFamily::Qwen3Vl => "qwen3_vl_text",
            LlamaFamily::Qwen3VlMoe => "qwen3_vl_moe_text",
        }
    }

    /// Returns the class that transformers loads it with.
    pub fn architecture(self) -> &'static str {
        match self {
            LlamaFamily::Llama => "LlamaForCausalLM",
            LlamaFamily::Mistral => "MistralForCausalLM",
            LlamaFamily::Qwen2 => "Qwen2ForCausalLM",
            LlamaFamily::Qwen3 => "Qwen3ForCausalLM",
            LlamaFamily::Phi => "PhiForCausalLM",
            LlamaFamily::Phi3 => "Phi3ForCausalLM",
            LlamaFamily::Gemma => "GemmaForCausalLM",
            LlamaFamily::Gemma2 => "Gemma2ForCausalLM",
            LlamaFamily::Gemma3 => "Gemma3ForCausalLM",
            LlamaFamily::Mixtral => "MixtralForCausalLM",
            LlamaFamily::Qwen3Moe => "Qwen3MoeForCausalLM",
            LlamaFamily::SmolLm3 => "SmolLM3ForCausalLM",
            LlamaFamily::Olmo2 => "Olmo2ForCausalLM",
            LlamaFamily::Olmo3 => "Olmo3ForCausalLM",
            LlamaFamily::Granite => "GraniteForCausalLM",
            LlamaFamily::Glm4 => "Glm4ForCausalLM",
            LlamaFamily::Qwen2Moe => "Qwen2MoeForCausalLM",
            LlamaFamily::GptOss => "GptOssForCausalLM",
            LlamaFamily::Ministral3 => "Ministral3ForCausalLM",
            LlamaFamily::GraniteMoeHybrid => "GraniteMoeHybridForCausalLM",
            LlamaFamily::DeepseekV2 => "DeepseekV2ForCausalLM",
            LlamaFamily::DeepseekV3 => "DeepseekV3ForCausalLM",
            LlamaFamily::Qwen3Next => "Qwen3NextForCausalLM",
            LlamaFamily::Qwen35 => "Qwen3_5ForCausalLM",
            LlamaFamily::Qwen35Moe => "Qwen3_5MoeForCausalLM",
            LlamaFamily::Gemma3n => "Gemma3nForCausalLM",
            LlamaFamily::Gemma4 => "Gemma4ForCausalLM",
            LlamaFamily::Qwen3Vl => "Qwen3VLForConditionalGeneration",
            LlamaFamily::Qwen3VlMoe => "Qwen3VLMoeForConditionalGeneration",
        }
    }

    /// Returns `true` for Gemma.
    pub fn is_gemma(self) -> bool {
        self == LlamaFamily::Gemma || self.is_later_gemma() || self.is_newest_gemma()
    }

    /// Returns `true` for Gemma 2 and 3.
    pub(crate) fn is_later_gemma(self) -> bool {
        matches!(self, LlamaFamily::Gemma2 | LlamaFamily::Gemma3)
    }

    /// Returns `true` for Gemma 3n and 4.
    pub(crate) fn is_newest_gemma(self) -> bool {
        matches!(self, LlamaFamily::Gemma3n | LlamaFamily::Gemma4)
    }

    /// Returns `true` for OLMo 2 and 3.
    pub(crate) fn is_olmo(self) -> bool {
        matches!(self, LlamaFamily::Olmo2 | LlamaFamily::Olmo3)
    }

    /// Returns `true` for DeepSeek-V2 and V3.
    pub(crate) fn is_deepseek(self) -> bool {
        matches!(self, LlamaFamily::DeepseekV2 | LlamaFamily::DeepseekV3)
    }

    /// Returns `true` for the families with layers of linear attention.
    pub fn is_hybrid(self) -> bool {
        self == LlamaFamily::Qwen3Next || self.is_qwen35()
    }

    /// Returns the types that a layer may have.
    pub(super) fn layer_types(self) -> &'static [LayerType] {
        match self.is_hybrid() {
            true => &[LayerType::Full, LayerType::Linear],
            false => &[LayerType::Full, LayerType::Sliding],
        }
    }

    /// Returns `true` for Qwen3.5.
    pub(crate) fn is_qwen35(self) -> bool {
        matches!(self, LlamaFamily::Qwen35 | LlamaFamily::Qwen35Moe)
    }

    /// Returns `true` for the families of whose experts a file has all in one tensor, gate and up in one layer.
    pub(crate) fn has_packed_experts(self) -> bool {
        self == LlamaFamily::Gemma4 || self.has_transposed_experts()
    }

    /// Returns `true` for the families of whose experts a file has the weights as `(I, O)`.
    pub(crate) fn has_transposed_experts(self) -> bool {
        matches!(self, LlamaFamily::GptOss | LlamaFamily::Qwen3VlMoe)
    }

    /// Returns `true` for Qwen3-VL, dense and with experts, whose vision tower is read.
    pub(crate) fn is_qwen3_vl(self) -> bool {
        matches!(self, LlamaFamily::Qwen3Vl | LlamaFamily::Qwen3VlMoe)
    }

    /// Returns `true` for Granite 3 and 4.
    pub(crate) fn is_granite(self) -> bool {
        matches!(self, LlamaFamily::Granite | LlamaFamily::GraniteMoeHybrid)
    }

    /// Returns `true` for the families of the text in multimodal models.
    pub(crate) fn may_be_multimodal(self) -> bool {
        matches!(
            self,
            LlamaFamily::Gemma3
                | LlamaFamily::Gemma3n
                | LlamaFamily::Gemma4
                | LlamaFamily::Mistral
                | LlamaFamily::Ministral3
        ) || self.is_qwen35()
    }

    /// Returns `true` for the families that may rotate the first channels of a head only.
    pub(crate) fn rotates_partially(self) -> bool {
        self.is_phi() || self == LlamaFamily::Glm4 || self.is_hybrid()
    }

    /// Returns `true` for the families that have dropouts of the residual stream.
    pub(crate) fn is_phi(self) -> bool {
        matches!(self, LlamaFamily::Phi | LlamaFamily::Phi3)
    }

    /// Returns the families whose `model_type` is that of a folder. Excludes Qwen3-VL, whose `model_type` here is that
    /// of `text_config`; no folder has that type.
    pub(super) fn of_folders() -> impl Iterator<Item = LlamaFamily> {
        let all = LlamaFamily::ALL.into_iter();
        all.filter(|family| !family.is_qwen3_vl())
    }

    pub(super) fn from_name(model_type: &str) -> Option<LlamaFamily> {
        LlamaFamily::of_folders().find(|family| family.model_type() == model_type)
    }
}

/// The attention type of a layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum LayerType {
    /// `full_attention`: all past tokens.
    Full,
    /// `sliding_attention`: the last [`LlamaConfig::sliding_window`](crate::LlamaConfig::sliding_window) tokens.
    Sliding,
    /// `linear_attention`: a state of fixed size (Qwen3-Next, Qwen3.5).
    Linear,
}

impl LayerType {
    pub(crate) fn name(self) -> &'static str {
        match self {
            LayerType::Full => "full_attention",
            LayerType::Sliding => "sliding_attention",
            LayerType::Linear => "linear_attention",
        }
    }
}

/// Reads `layer_types`, whose values are those of `known`.
pub(crate) fn layer_types(value: &Value, known: &[LayerType]) -> Result<Vec<LayerType>> {
    let names = value
        .as_array()
        .ok_or_else(|| bad("layer_types", value, "a list of names"))?;
    names
        .iter()
        .map(|name| {
            known
                .iter()
                .copied()
                .find(|kind| name.as_str() == Some(kind.name()))
                .ok_or_else(|| {
                    Error::unsupported(
                        "layer_types",
                        name,
                        known
                            .iter()
                            .map(|kind| kind.name())
                            .collect::<Vec<_>>()
                            .join(", "),
                    )
                })
        })
        .collect()
}
