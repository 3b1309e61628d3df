use serde_json::{Map, Value};

use super::delta_net::DeltaNetConfig;
use super::experts::ExpertsConfig;
use super::family::{LayerType, LlamaFamily};
use super::mla::MlaConfig;
use super::per_layer::PerLayerConfig;
use super::rope_scaling::RopeScaling;
use super::vision::VisionConfig;
use crate::rope::QueryScaling;

mod defaults;
mod json;
mod validate;

/// The configuration of a decoder of the Llama family, with the keys of its `config.json`. Defaults are those
/// of transformers' `LlamaConfig`; [`LlamaConfig::of`] returns those of the other members.
#[derive(Debug, Clone, PartialEq)]
pub struct LlamaConfig {
    /// The member of the family (`model_type`); default Llama.
    pub family: LlamaFamily,
    /// The number of tokens in the vocabulary; default 32000.
    pub vocab_size: i64,
    /// The width of the hidden states; default 4096.
    pub hidden_size: i64,
    /// The inner width of the feed-forward block; default 11008.
    pub intermediate_size: i64,
    /// The number of layers; default 32.
    pub num_hidden_layers: i64,
    /// The number of query heads; default 32.
    pub num_attention_heads: i64,
    /// The number of key/value heads; default `None`, as many as query heads.
    pub num_key_value_heads: Option<i64>,
    /// The number of channels of a head; default `None`, `hidden_size / num_attention_heads`.
    pub head_dim: Option<i64>,
    /// The activation of the feed-forward block; default `"silu"`. Gemma calls it `hidden_activation`; in
    /// Gemma 1 `"gelu"` means the tanh approximation under either key.
    pub hidden_act: String,
    /// The context length in tokens; default 2048.
    pub max_position_embeddings: i64,
    /// The standard deviation of random weights; default 0.02.
    pub initializer_range: f64,
    /// The number that norms add to the mean square; default 1e-6. Phi-2 calls it `layer_norm_eps`.
    pub rms_norm_eps: f64,
    /// If `true`, the head is the embedding; default `false`.
    pub tie_word_embeddings: bool,
    /// The base of the rotary frequencies; default 10000.
    pub rope_theta: f64,
    /// The fraction of a head's channels that is rotated, starting with the first one (Phi-2, Phi-3 and GLM-4);
    /// default 1 (GLM-4: 0.5).
    pub partial_rotary_factor: f64,
    /// The rope scaling; default none (gpt-oss: YaRN by 32 from 4096 tokens).
    pub rope_scaling: RopeScaling,
    /// The layers with rotary positions, in the order of the layers (SmolLM3, Granite 4); default `None`: all but every
    /// `no_rope_layer_interval`-th of SmolLM3, and all of Granite 4.
    pub no_rope_layers: Option<Vec<bool>>,
    /// The distance of layers without rotary positions (SmolLM3); default 4.
    pub no_rope_layer_interval: i64,
    /// The base of the rotary frequencies of the sliding layers of Gemma 3, 3n and 4 and of OLMo 3; default 10000
    /// (OLMo 3: 500000).
    pub rope_local_base_freq: f64,
    /// The rope scaling of the sliding layers of Gemma 3, 3n and 4 and of OLMo 3; default none.
    pub rope_local_scaling: RopeScaling,
    /// If `true`, query, key, value and output projections have biases (Llama, Qwen3, Gemma, SmolLM3, OLMo,
    /// Granite and gpt-oss), or all but the output projection (GLM-4, and Qwen2-MoE, which calls it `qkv_bias`);
    /// default `false` (GLM-4, Qwen2-MoE and gpt-oss: `true`).
    pub attention_bias: bool,
    /// If `true`, the feed-forward block has biases (Llama, SmolLM3 and Granite 3); default `false`. The experts and
    /// routers of gpt-oss have biases without this key.
    pub mlp_bias: bool,
    /// The dropout of attention weights in training; default 0.
    pub attention_dropout: f64,
    /// The dropout of the outputs of attention and the feed-forward block in training (Phi-2 and Phi-3); default 0.
    pub resid_pdrop: f64,
    /// The dropout of embeddings in training (Phi-2); default 0. Phi-3 has the key but ignores it, as in
    /// transformers.
    pub embd_pdrop: f64,
    /// If `true`, queries and keys are normalised head by head (Phi-2); default `false`.
    pub qk_layernorm: bool,
    /// The number of tokens that a sliding layer attends to, its own included (Mistral, Qwen, Phi-3, Gemma 2 and 3,
    /// SmolLM3, OLMo 3 and gpt-oss); default `None`.
    pub sliding_window: Option<i64>,
    /// If `true`, a token attends to those after it, too (Gemma 3, for [`EmbeddingModel`](crate::EmbeddingModel)), and in
    /// a sliding layer to `sliding_window / 2` tokens on each side; default `false`.
    pub use_bidirectional_attention: bool,
    /// If `true`, the windows of Qwen and SmolLM3 are in effect; default `false`.
    pub use_sliding_window: bool,
    /// The first of Qwen's layers with a window, or the first without in Qwen2-MoE; default 28.
    pub max_window_layers: i64,
    /// The attention types of the layers of Qwen, Gemma 2 and 3, SmolLM3, OLMo 3 and gpt-oss; default `None`: Qwen's
    /// slide from `max_window_layers` on, every other one of Qwen2-MoE's before it, all of Gemma 2's and gpt-oss's
    /// except every second, all of Gemma 3's except every sixth, all of OLMo 3's except every fourth, and SmolLM3's
    /// without rotary positions.
    pub layer_types: Option<Vec<LayerType>>,
    /// The number that replaces the head's width in Gemma's scale of scores, one over its root; default 256.
    pub query_pre_attn_scalar: f64,
    /// The bound `c` of Gemma 2's scores, `c · tanh(score / c)`; default `None`.
    pub attn_logit_softcapping: Option<f64>,
    /// The bound of Gemma's logits, likewise; default `None`.
    pub final_logit_softcapping: Option<f64>,
    /// The factor of the embedding (Granite); default 1.
    pub embedding_multiplier: f64,
    /// The factor of the scores (Granite), in place of one over the root of the head's width; default 1.
    pub attention_multiplier: f64,
    /// The factor of the outputs of attention and of the feed-forward block (Granite); default 1.
    pub residual_multiplier: f64,
    /// The divisor of the logits (Granite); default 1.
    pub logits_scaling: f64,
    /// The factor `b` in `1 + b · ln(1 + floor(p / n))`, by which the query at position `p` is multiplied (Ministral 3),
    /// where `n` is the original context of [`rope_scaling`](LlamaConfig::rope_scaling); default 0.
    pub llama_4_scaling_beta: f64,
    /// The mixture of experts: required for Mixtral, Qwen2-MoE, Qwen3-MoE, gpt-oss and DeepSeek, `None` for a Gemma 4
    /// without experts and all other
    /// families; default `None`.
    pub experts: Option<ExpertsConfig>,
    /// The sizes of multi-head latent attention: required for DeepSeek, where they replace `head_dim`, `None` for all
    /// other families; default `None`.
    pub mla: Option<MlaConfig>,
    /// The sizes of layers of linear attention (Qwen3-Next, Qwen3.5); default `None`, no such layers.
    pub delta_net: Option<DeltaNetConfig>,
    /// What differs from layer to layer: required for Gemma 3n and 4, `None` for all other families; default `None`.
    pub per_layer: Option<PerLayerConfig>,
    /// The vision tower and the tokens of images: required for Qwen3-VL, `None` for all other families; default `None`.
    pub vision: Option<VisionConfig>,
    /// The id of the beginning-of-sequence token; default 1.
    pub bos_token_id: Option<i64>,
    /// The ids of the end-of-sequence tokens; default 2.
    pub eos_token_id: Vec<i64>,
    /// The id of padding; default none.
    pub pad_token_id: Option<i64>,
    /// The keys that this crate does not know; they are written back unchanged.
    pub extra: Map<String, Value>,
}

impl LlamaConfig {
    /// Returns the number of channels of a head; with multi-head latent attention, that of the one head that a cache
    /// holds.
    pub fn head_dim(&self) -> i64 {
        if let Some(mla) = &self.mla {
            return mla.cached_dim();
        }
        // `max(1)`: this runs in `validate`, too, before the heads are known to be positive.
        self.head_dim
            .unwrap_or(self.hidden_size / self.num_attention_heads.max(1))
    }

    /// Returns the name of the decoder in a checkpoint.
    pub(crate) fn backbone_name(&self) -> &'static str {
        match self.family {
            family if family.is_qwen3_vl() => "model.language_model",
            _ => "model",
        }
    }

    /// Returns the name of a layer in a checkpoint.
    pub(crate) fn layer_name(&self, layer: i64) -> String {
        format!("{}.layers.{layer}", self.backbone_name())
    }

    /// Returns the number of a head's channels that are rotated.
    pub(crate) fn rotary_dim(&self) -> i64 {
        if let Some(mla) = &self.mla {
            return mla.qk_rope_head_dim;
        }
        // Rounded down, as in transformers.
        (self.head_dim() as f64 * self.partial_rotary_factor) as i64
    }

    /// Returns the number of a head's channels that are rotated in layers without a window.
    pub(crate) fn global_rotary_dim(&self) -> i64 {
        let own = self.per_layer.as_ref();
        let global = own.and_then(|own| own.global_head_dim);
        global.unwrap_or(self.rotary_dim())
    }

    /// Returns the number of key/value heads; with multi-head latent attention, of those that a cache holds: one.
    pub fn kv_heads(&self) -> i64 {
        if self.mla.is_some() {
            return 1;
        }
        self.num_key_value_heads.unwrap_or(self.num_attention_heads)
    }

    /// Returns the largest number of positions that the model takes. A rope scaling that starts at
    /// `max_position_embeddings`, or has the factor by which the original context was extended, raises it.
    pub(crate) fn context(&self) -> i64 {
        let given = self.max_position_embeddings;
        match &self.rope_scaling {
            RopeScaling::Dynamic { factor } => given.max((given as f64 * factor) as i64),
            RopeScaling::Yarn(yarn) => {
                let original = yarn.original_max_position_embeddings as f64;
                given.max((original * yarn.factor) as i64)
            }
            _ => given,
        }
    }

    /// Returns the number of positions up to which no frequency depends on the length of a forward pass, and the key
    /// that sets it.
    pub(crate) fn ragged_context(&self) -> (i64, &'static str) {
        let key = "max_position_embeddings";
        let fixed = |scaling: &RopeScaling| match scaling {
            RopeScaling::Dynamic { .. } => (self.max_position_embeddings, key),
            RopeScaling::LongRope(long) => {
                let original = long.original_max_position_embeddings;
                (original, "original_max_position_embeddings")
            }
            _ => (self.context(), key),
        };
        fixed(&self.rope_scaling)
            .min(fixed(&self.rope_local_scaling))
            .min((self.context(), key))
    }

    /// Returns the number of positions beyond which a generation starts its cache again.
    pub(crate) fn cache_restart(&self) -> Option<i64> {
        match (self.family, &self.rope_scaling) {
            (LlamaFamily::Phi3, RopeScaling::LongRope(long)) => {
                Some(long.original_max_position_embeddings)
            }
            _ => None,
        }
    }

    /// Returns `true` if query, key and value projections have biases.
    pub(crate) fn qkv_bias(&self) -> bool {
        match self.family {
            // transformers hard-codes both; their files have no key for it.
            LlamaFamily::Qwen2 | LlamaFamily::Phi => true,
            LlamaFamily::Mistral
            | LlamaFamily::Ministral3
            | LlamaFamily::Mixtral
            | LlamaFamily::Phi3 => false,
            _ => self.attention_bias,
        }
    }

    /// Returns `true` if the output projection of attention has a bias.
    pub(crate) fn output_bias(&self) -> bool {
        self.qkv_bias()
            && !matches!(
                self.family,
                LlamaFamily::Qwen2 | LlamaFamily::Qwen2Moe | LlamaFamily::Glm4
            )
    }

    /// Returns `true` if the layers of feed-forward blocks, and routers, have biases.
    pub(crate) fn has_mlp_bias(&self) -> bool {
        self.mlp_bias || self.family == LlamaFamily::GptOss
    }

    pub(crate) fn qk_norm(&self) -> bool {
        match self.family {
            LlamaFamily::Qwen3 | LlamaFamily::Qwen3Moe | LlamaFamily::Gemma3 => true,
            family if family.is_hybrid() || family.is_qwen3_vl() => true,
            LlamaFamily::Gemma3n | LlamaFamily::Gemma4 => true,
            LlamaFamily::Olmo2 | LlamaFamily::Olmo3 => true,
            LlamaFamily::Phi => self.qk_layernorm,
            _ => false,
        }
    }

    /// Returns the widths of the norms of queries and keys: that of a head, or of all heads together (OLMo).
    pub(crate) fn qk_norm_widths(&self) -> [i64; 2] {
        let head = self.head_dim();
        match self.family.is_olmo() {
            true => [self.num_attention_heads * head, self.kv_heads() * head],
            false => [head, head],
        }
    }

    /// Returns `true` if query, key and value are one layer.
    pub(crate) fn has_joint_qkv(&self) -> bool {
        self.family == LlamaFamily::Phi3
    }

    /// Returns `true` if gate and up are one layer.
    pub(crate) fn has_joint_gate_up(&self) -> bool {
        matches!(
            self.family,
            LlamaFamily::Phi3 | LlamaFamily::Glm4 | LlamaFamily::GraniteMoeHybrid
        )
    }

    /// Returns `true` if neighbouring channels of a head are rotated together (GLM-4, DeepSeek), and not those that are
    /// half of the rotated channels apart.
    pub fn rotates_neighbours(&self) -> bool {
        match &self.mla {
            Some(mla) => mla.rope_interleave,
            None => self.family == LlamaFamily::Glm4,
        }
    }

    /// Returns the factor of the scores of multi-head latent attention.
    pub(crate) fn mla_scale(&self, sizes: &MlaConfig) -> f64 {
        let usual = (sizes.qk_head_dim() as f64).sqrt().recip();
        match &self.rope_scaling {
            RopeScaling::Yarn(yarn) => usual * yarn.all_dim_scale().powi(2),
            _ => usual,
        }
    }

    /// Returns `true` if the head has a bias.
    pub(crate) fn head_bias(&self) -> bool {
        self.family == LlamaFamily::Phi
    }

    /// Returns `true` if norms multiply by `1 + weight`.
    pub fn norm_adds_one(&self) -> bool {
        self.family.is_gemma() && self.per_layer.is_none() || self.family.is_hybrid()
    }

    /// Returns `true` if layer `layer` has a state of fixed size in place of keys and values.
    pub fn is_linear(&self, layer: i64) -> bool {
        if self.delta_net.is_none() {
            return false;
        }
        match &self.layer_types {
            Some(types) => types.get(layer.unsigned_abs() as usize) == Some(&LayerType::Linear),
            None => (layer + 1) % 4 != 0,
        }
    }

    /// Returns the sizes of layer `layer` if it is one of linear attention.
    pub(crate) fn delta_net_of(&self, layer: i64) -> Option<&DeltaNetConfig> {
        self.delta_net.as_ref().filter(|_| self.is_linear(layer))
    }

    /// Returns `true` if the outputs of attention are multiplied by a gate, which `q_proj` computes beside the queries.
    pub(crate) fn gates_attention(&self) -> bool {
        self.family.is_hybrid()
    }

    /// Returns the factor of the embedding.
    pub fn embedding_scale(&self) -> Option<f64> {
        match self.family {
            family if family.is_granite() => Some(self.embedding_multiplier),
            family => family.is_gemma().then(|| (self.hidden_size as f64).sqrt()),
        }
    }

    /// Returns the factor of the scores; `None` is one over the root of the head's width.
    pub fn attention_scale(&self) -> Option<f64> {
        match self.family {
            family if family.is_granite() => Some(self.attention_multiplier),
            family if family.is_newest_gemma() => Some(1.0),
            family => {
                let scale = 1.0 / self.query_pre_attn_scalar.sqrt();
                family.is_later_gemma().then_some(scale)
            }
        }
    }

    /// Returns the factor of queries beyond the original context; `None` if there is none.
    pub(crate) fn query_scaling(&self) -> Option<QueryScaling> {
        let beta = self.llama_4_scaling_beta;
        match &self.rope_scaling {
            RopeScaling::Yarn(yarn) if self.family == LlamaFamily::Ministral3 && beta != 0.0 => {
                Some(QueryScaling {
                    beta,
                    original: yarn.original_max_position_embeddings,
                })
            }
            _ => None,
        }
    }

    /// Returns the factor of the outputs of attention and of the feed-forward block.
    pub(crate) fn residual_scale(&self) -> Option<f64> {
        let granite = self.family.is_granite();
        granite.then_some(self.residual_multiplier)
    }

    /// Returns the divisor of the logits.
    pub(crate) fn logit_divisor(&self) -> Option<f64> {
        let granite = self.family.is_granite();
        granite.then_some(self.logits_scaling)
    }

    /// Returns the bound of scores. transformers reads it for Gemma 3 as well, and does not use it there.
    pub fn attention_softcap(&self) -> Option<f64> {
        let second = self.family == LlamaFamily::Gemma2;
        self.attn_logit_softcapping.filter(|_| second)
    }

    /// Returns the bound of logits.
    pub fn logit_softcap(&self) -> Option<f64> {
        let gemma = self.family.is_later_gemma() || self.per_layer.is_some();
        self.final_logit_softcapping.filter(|_| gemma)
    }

    /// Returns `true` if layer `layer` has other rotary frequencies than most layers: those of sliding layers
    /// (Gemma 3, OLMo 3), or none (SmolLM3, Granite 4), for which the model has frequencies of zero.
    pub fn has_second_rotary(&self, layer: i64) -> bool {
        match self.family {
            LlamaFamily::Gemma3 | LlamaFamily::Olmo3 => self.slides(layer),
            LlamaFamily::Gemma3n | LlamaFamily::Gemma4 => self.slides(layer),
            LlamaFamily::SmolLm3 | LlamaFamily::GraniteMoeHybrid => !self.has_rotary(layer),
            _ => false,
        }
    }

    /// Returns `true` if layer `layer` of a SmolLM3 or a Granite 4 rotates queries and keys.
    fn has_rotary(&self, layer: i64) -> bool {
        match &self.no_rope_layers {
            Some(layers) => layers.get(layer.unsigned_abs() as usize) == Some(&true),
            None if self.family == LlamaFamily::GraniteMoeHybrid => true,
            // `max(1)`: this runs before the configuration is known to be valid, too.
            None => (layer + 1) % self.no_rope_layer_interval.max(1) != 0,
        }
    }

    /// Returns the number of tokens that layer `layer` attends to, or `None` for all.
    pub(crate) fn window(&self, layer: i64) -> Option<i64> {
        self.sliding_window.filter(|_| self.slides(layer))
    }

    /// Returns `true` if layer `layer` is of the sliding type.
    pub(super) fn slides(&self, layer: i64) -> bool {
        let listed = || {
            let types = self.layer_types.as_ref()?;
            Some(types.get(layer.unsigned_abs() as usize) == Some(&LayerType::Sliding))
        };
        match self.family {
            LlamaFamily::Llama
            | LlamaFamily::Phi
            | LlamaFamily::Gemma
            | LlamaFamily::Olmo2
            | LlamaFamily::Granite
            | LlamaFamily::GraniteMoeHybrid
            | LlamaFamily::DeepseekV2
            | LlamaFamily::DeepseekV3
            | LlamaFamily::Qwen3Next
            | LlamaFamily::Qwen35
            | LlamaFamily::Qwen35Moe
            | LlamaFamily::Qwen3Vl
            | LlamaFamily::Qwen3VlMoe
            | LlamaFamily::Glm4 => false,
            LlamaFamily::Mistral
            | LlamaFamily::Ministral3
            | LlamaFamily::Mixtral
            | LlamaFamily::Phi3 => true,
            // All of its layers or none, whatever the file lists.
            LlamaFamily::Qwen3Moe => self.use_sliding_window,
            LlamaFamily::SmolLm3 => {
                self.use_sliding_window && listed().unwrap_or(!self.has_rotary(layer))
            }
            LlamaFamily::Qwen2Moe => {
                let usual = layer % 2 == 0 && layer < self.max_window_layers;
                self.use_sliding_window && listed().unwrap_or(usual)
            }
            LlamaFamily::Qwen2 | LlamaFamily::Qwen3 => {
                self.use_sliding_window && listed().unwrap_or(layer >= self.max_window_layers)
            }
            LlamaFamily::Gemma2 | LlamaFamily::GptOss => listed().unwrap_or((layer + 1) % 2 != 0),
            LlamaFamily::Gemma3 => listed().unwrap_or((layer + 1) % 6 != 0),
            LlamaFamily::Olmo3 => listed().unwrap_or((layer + 1) % 4 != 0),
            LlamaFamily::Gemma3n => listed().unwrap_or((layer + 1) % 5 != 0),
            // The last layer has no window, whatever the file lists.
            LlamaFamily::Gemma4 => {
                listed().unwrap_or((layer + 1) % 6 != 0) && layer + 1 != self.num_hidden_layers
            }
        }
    }

    /// Returns the mixture of experts that layer `layer` has in place of a feed-forward block, or `None` if the layer has
    /// such a block. Gemma 4 has experts beside it.
    pub(crate) fn experts_of(&self, layer: i64) -> Option<&ExpertsConfig> {
        self.experts
            .as_ref()
            .filter(|experts| self.per_layer.is_none() && experts.is_sparse(layer))
    }

    /// Returns the inner width of an expert, or of the feed-forward block of a family without experts.
    pub fn expert_intermediate_size(&self) -> i64 {
        match &self.experts {
            Some(experts) if !matches!(self.family, LlamaFamily::Mixtral | LlamaFamily::GptOss) => {
                experts.moe_intermediate_size
            }
            _ => self.intermediate_size,
        }
    }
}
