//! The defaults of transformers by family.

use serde_json::Map;

use super::LlamaConfig;
use crate::config::{
    DeltaNetConfig, ExpertsConfig, LlamaFamily, MlaConfig, PerLayerConfig, RopeScaling,
    VisionConfig, Yarn,
};

impl Default for LlamaConfig {
    fn default() -> Self {
        LlamaConfig {
            family: LlamaFamily::Llama,
            vocab_size: 32000,
            hidden_size: 4096,
            intermediate_size: 11008,
            num_hidden_layers: 32,
            num_attention_heads: 32,
            num_key_value_heads: None,
            head_dim: None,
            hidden_act: "silu".to_owned(),
            max_position_embeddings: 2048,
            initializer_range: 0.02,
            rms_norm_eps: 1e-6,
            tie_word_embeddings: false,
            rope_theta: 10000.0,
            partial_rotary_factor: 1.0,
            rope_scaling: RopeScaling::Default,
            no_rope_layers: None,
            no_rope_layer_interval: 4,
            rope_local_base_freq: 10000.0,
            rope_local_scaling: RopeScaling::Default,
            attention_bias: false,
            mlp_bias: false,
            attention_dropout: 0.0,
            resid_pdrop: 0.0,
            embd_pdrop: 0.0,
            qk_layernorm: false,
            sliding_window: None,
            use_bidirectional_attention: false,
            use_sliding_window: false,
            max_window_layers: 28,
            layer_types: None,
            query_pre_attn_scalar: 256.0,
            attn_logit_softcapping: None,
            final_logit_softcapping: None,
            embedding_multiplier: 1.0,
            attention_multiplier: 1.0,
            residual_multiplier: 1.0,
            logits_scaling: 1.0,
            llama_4_scaling_beta: 0.0,
            experts: None,
            mla: None,
            delta_net: None,
            vision: None,
            per_layer: None,
            bos_token_id: Some(1),
            eos_token_id: vec![2],
            pad_token_id: None,
            extra: Map::new(),
        }
    }
}

impl LlamaConfig {
    /// Returns the defaults of transformers for `family`.
    pub fn of(family: LlamaFamily) -> LlamaConfig {
        let llama = LlamaConfig {
            family,
            experts: ExpertsConfig::of(family),
            mla: MlaConfig::of(family),
            delta_net: DeltaNetConfig::of(family),
            per_layer: PerLayerConfig::of(family),
            ..LlamaConfig::default()
        };
        match family {
            LlamaFamily::Llama | LlamaFamily::Granite => llama,
            LlamaFamily::DeepseekV2 => LlamaConfig {
                vocab_size: 102_400,
                ..llama
            },
            LlamaFamily::DeepseekV3 => LlamaConfig {
                vocab_size: 129_280,
                hidden_size: 7168,
                intermediate_size: 18432,
                num_hidden_layers: 61,
                num_attention_heads: 128,
                num_key_value_heads: Some(128),
                max_position_embeddings: 4096,
                bos_token_id: Some(0),
                eos_token_id: vec![1],
                ..llama
            },
            LlamaFamily::GraniteMoeHybrid => LlamaConfig {
                intermediate_size: 1024,
                ..llama
            },
            LlamaFamily::Mistral => LlamaConfig {
                intermediate_size: 14336,
                num_key_value_heads: Some(8),
                max_position_embeddings: 4096 * 32,
                sliding_window: Some(4096),
                ..llama
            },
            LlamaFamily::Ministral3 => LlamaConfig {
                vocab_size: 131_072,
                intermediate_size: 14336,
                num_hidden_layers: 34,
                num_key_value_heads: Some(8),
                head_dim: Some(128),
                max_position_embeddings: 262_144,
                rms_norm_eps: 1e-5,
                rope_theta: 1e6,
                rope_scaling: RopeScaling::Yarn(Yarn {
                    mscale: Some(1.0),
                    mscale_all_dim: Some(1.0),
                    ..Yarn::new(16.0, 16384)
                }),
                llama_4_scaling_beta: 0.1,
                pad_token_id: Some(11),
                ..llama
            },
            LlamaFamily::Mixtral => LlamaConfig {
                intermediate_size: 14336,
                num_key_value_heads: Some(8),
                max_position_embeddings: 4096 * 32,
                rms_norm_eps: 1e-5,
                rope_theta: 1e6,
                ..llama
            },
            LlamaFamily::Qwen3Moe => LlamaConfig {
                vocab_size: 151_936,
                hidden_size: 2048,
                intermediate_size: 6144,
                num_hidden_layers: 24,
                num_key_value_heads: Some(4),
                max_position_embeddings: 32768,
                sliding_window: Some(4096),
                bos_token_id: None,
                eos_token_id: Vec::new(),
                ..llama
            },
            LlamaFamily::Qwen3Next | LlamaFamily::Qwen35 | LlamaFamily::Qwen35Moe => {
                let (next, dense) = (
                    family == LlamaFamily::Qwen3Next,
                    family == LlamaFamily::Qwen35,
                );
                LlamaConfig {
                    vocab_size: if next { 151_936 } else { 248_320 },
                    hidden_size: if dense { 4096 } else { 2048 },
                    intermediate_size: if dense { 12288 } else { 5632 },
                    num_hidden_layers: match family {
                        LlamaFamily::Qwen3Next => 48,
                        LlamaFamily::Qwen35 => 32,
                        _ => 40,
                    },
                    num_attention_heads: 16,
                    num_key_value_heads: Some(if dense { 4 } else { 2 }),
                    head_dim: Some(256),
                    max_position_embeddings: 32768,
                    partial_rotary_factor: 0.25,
                    bos_token_id: None,
                    eos_token_id: Vec::new(),
                    ..llama
                }
            }
            LlamaFamily::Qwen3Vl => LlamaConfig {
                vocab_size: 151_936,
                intermediate_size: 22016,
                num_key_value_heads: Some(32),
                head_dim: Some(128),
                max_position_embeddings: 128_000,
                rope_theta: 5e5,
                vision: Some(VisionConfig {
                    out_hidden_size: 4096,
                    ..VisionConfig::default()
                }),
                bos_token_id: None,
                eos_token_id: Vec::new(),
                ..llama
            },
            LlamaFamily::Qwen3VlMoe => LlamaConfig {
                vocab_size: 151_936,
                hidden_size: 2048,
                intermediate_size: 5632,
                num_hidden_layers: 24,
                num_attention_heads: 16,
                max_position_embeddings: 128_000,
                rope_theta: 5e5,
                vision: Some(VisionConfig {
                    out_hidden_size: 2048,
                    ..VisionConfig::default()
                }),
                bos_token_id: None,
                eos_token_id: Vec::new(),
                ..llama
            },
            LlamaFamily::Qwen2 | LlamaFamily::Qwen3 => LlamaConfig {
                vocab_size: 151_936,
                intermediate_size: 22016,
                num_key_value_heads: Some(32),
                // Qwen3 fixes the width of a head, whatever the hidden size.
                head_dim: (family == LlamaFamily::Qwen3).then_some(128),
                max_position_embeddings: 32768,
                sliding_window: Some(4096),
                bos_token_id: None,
                eos_token_id: Vec::new(),
                ..llama
            },
            LlamaFamily::Phi => LlamaConfig {
                vocab_size: 51200,
                hidden_size: 2048,
                intermediate_size: 8192,
                num_hidden_layers: 24,
                hidden_act: "gelu_new".to_owned(),
                rms_norm_eps: 1e-5,
                partial_rotary_factor: 0.5,
                ..llama
            },
            LlamaFamily::Phi3 => LlamaConfig {
                vocab_size: 32064,
                hidden_size: 3072,
                intermediate_size: 8192,
                max_position_embeddings: 4096,
                rms_norm_eps: 1e-5,
                eos_token_id: vec![32000],
                pad_token_id: Some(32000),
                ..llama
            },
            LlamaFamily::Qwen2Moe => LlamaConfig {
                vocab_size: 151_936,
                hidden_size: 2048,
                intermediate_size: 5632,
                num_hidden_layers: 24,
                num_attention_heads: 16,
                num_key_value_heads: Some(16),
                max_position_embeddings: 32768,
                attention_bias: true,
                sliding_window: Some(4096),
                bos_token_id: None,
                eos_token_id: Vec::new(),
                ..llama
            },
            LlamaFamily::GptOss => LlamaConfig {
                vocab_size: 201_088,
                hidden_size: 2880,
                intermediate_size: 2880,
                num_hidden_layers: 36,
                num_attention_heads: 64,
                num_key_value_heads: Some(8),
                head_dim: Some(64),
                max_position_embeddings: 131_072,
                rms_norm_eps: 1e-5,
                rope_theta: 150_000.0,
                rope_scaling: RopeScaling::Yarn(Yarn {
                    truncate: false,
                    ..Yarn::new(32.0, 4096)
                }),
                attention_bias: true,
                sliding_window: Some(128),
                bos_token_id: None,
                eos_token_id: Vec::new(),
                ..llama
            },
            LlamaFamily::Glm4 => LlamaConfig {
                vocab_size: 151_552,
                intermediate_size: 13696,
                num_hidden_layers: 40,
                num_key_value_heads: Some(2),
                head_dim: Some(128),
                max_position_embeddings: 131_072,
                rms_norm_eps: 1.5625e-7,
                partial_rotary_factor: 0.5,
                attention_bias: true,
                bos_token_id: None,
                eos_token_id: vec![151_329, 151_336, 151_338],
                pad_token_id: Some(151_329),
                ..llama
            },
            LlamaFamily::Olmo2 | LlamaFamily::Olmo3 => {
                let third = family == LlamaFamily::Olmo3;
                LlamaConfig {
                    vocab_size: 50304,
                    rms_norm_eps: 1e-5,
                    rope_theta: if third { 5e5 } else { 1e4 },
                    rope_local_base_freq: 5e5,
                    sliding_window: third.then_some(4096),
                    bos_token_id: None,
                    eos_token_id: vec![50279],
                    pad_token_id: Some(1),
                    ..llama
                }
            }
            LlamaFamily::SmolLm3 => LlamaConfig {
                vocab_size: 128_256,
                hidden_size: 2048,
                num_hidden_layers: 36,
                num_attention_heads: 16,
                num_key_value_heads: Some(4),
                max_position_embeddings: 32768,
                rope_theta: 2e6,
                tie_word_embeddings: true,
                bos_token_id: Some(128_000),
                eos_token_id: vec![128_001],
                pad_token_id: Some(128_004),
                ..llama
            },
            LlamaFamily::Gemma => LlamaConfig {
                vocab_size: 256_000,
                hidden_size: 3072,
                intermediate_size: 24576,
                num_hidden_layers: 28,
                num_attention_heads: 16,
                num_key_value_heads: Some(16),
                head_dim: Some(256),
                hidden_act: "gelu_pytorch_tanh".to_owned(),
                max_position_embeddings: 8192,
                tie_word_embeddings: true,
                bos_token_id: Some(2),
                eos_token_id: vec![1],
                pad_token_id: Some(0),
                ..llama
            },
            LlamaFamily::Gemma2 | LlamaFamily::Gemma3 => {
                let second = family == LlamaFamily::Gemma2;
                LlamaConfig {
                    vocab_size: if second { 256_000 } else { 262_208 },
                    hidden_size: 2304,
                    intermediate_size: 9216,
                    num_hidden_layers: 26,
                    num_attention_heads: 8,
                    num_key_value_heads: Some(4),
                    head_dim: Some(256),
                    hidden_act: "gelu_pytorch_tanh".to_owned(),
                    max_position_embeddings: if second { 8192 } else { 131_072 },
                    rope_theta: if second { 1e4 } else { 1e6 },
                    tie_word_embeddings: true,
                    sliding_window: Some(4096),
                    attn_logit_softcapping: second.then_some(50.0),
                    final_logit_softcapping: second.then_some(30.0),
                    bos_token_id: Some(2),
                    eos_token_id: vec![1],
                    pad_token_id: Some(0),
                    ..llama
                }
            }
            LlamaFamily::Gemma3n | LlamaFamily::Gemma4 => {
                let third = family == LlamaFamily::Gemma3n;
                LlamaConfig {
                    vocab_size: if third { 262_400 } else { 262_144 },
                    hidden_size: if third { 2048 } else { 2304 },
                    intermediate_size: if third { 16384 } else { 9216 },
                    num_hidden_layers: if third { 35 } else { 30 },
                    num_attention_heads: 8,
                    num_key_value_heads: Some(if third { 2 } else { 4 }),
                    head_dim: Some(256),
                    hidden_act: "gelu_pytorch_tanh".to_owned(),
                    max_position_embeddings: if third { 32768 } else { 131_072 },
                    rope_theta: 1e6,
                    rope_scaling: match third {
                        true => RopeScaling::Default,
                        false => RopeScaling::Proportional {
                            partial_rotary_factor: 0.25,
                            factor: 1.0,
                        },
                    },
                    tie_word_embeddings: true,
                    sliding_window: Some(512),
                    final_logit_softcapping: third.then_some(30.0),
                    bos_token_id: Some(2),
                    eos_token_id: vec![1],
                    pad_token_id: Some(0),
                    ..llama
                }
            }
        }
    }
}
