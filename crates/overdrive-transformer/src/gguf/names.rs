use crate::ModelConfig;
use crate::config::{LlamaConfig, LlamaFamily, NormPosition};
use crate::moe;
use crate::parameters::{ParameterRole, ParameterSpec};

/// The gate of the expert that computes every token.
const SHARED_GATE: &str = "mlp.shared_expert_gate";

/// The names of the modules of a block in transformers and in llama.cpp.
const MODULES: [(&str, &str); 50] = [
    ("self_attn.q_proj", "attn_q"),
    ("self_attn.k_proj", "attn_k"),
    ("self_attn.v_proj", "attn_v"),
    ("self_attn.o_proj", "attn_output"),
    ("self_attn.qkv_proj", "attn_qkv"),
    ("self_attn.dense", "attn_output"),
    ("self_attn.q_norm", "attn_q_norm"),
    ("self_attn.q_a_proj", "attn_q_a"),
    ("self_attn.q_a_layernorm", "attn_q_a_norm"),
    ("self_attn.q_b_proj", "attn_q_b"),
    ("self_attn.kv_a_proj_with_mqa", "attn_kv_a_mqa"),
    ("self_attn.kv_a_layernorm", "attn_kv_a_norm"),
    ("self_attn.kv_b_proj", "attn_kv_b"),
    ("self_attn.k_norm", "attn_k_norm"),
    ("mlp.gate_proj", "ffn_gate"),
    ("mlp.up_proj", "ffn_up"),
    ("mlp.down_proj", "ffn_down"),
    ("mlp.gate_up_proj", "ffn_up"),
    ("mlp.fc1", "ffn_up"),
    ("mlp.fc2", "ffn_down"),
    ("mlp.shared_expert.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_expert.up_proj", "ffn_up_shexp"),
    ("mlp.shared_expert.down_proj", "ffn_down_shexp"),
    ("mlp.shared_experts.gate_proj", "ffn_gate_shexp"),
    ("mlp.shared_experts.up_proj", "ffn_up_shexp"),
    ("mlp.shared_experts.down_proj", "ffn_down_shexp"),
    (SHARED_GATE, "ffn_gate_inp_shexp"),
    ("per_layer_input_gate", "inp_gate"),
    ("per_layer_projection", "proj"),
    ("post_per_layer_input_norm", "post_norm"),
    ("altup.correction_coefs", "altup_correct_coef"),
    ("altup.prediction_coefs", "altup_predict_coef"),
    ("altup.modality_router", "altup_router"),
    ("altup.router_norm", "altup_router_norm"),
    ("laurel.linear_left", "laurel_l"),
    ("laurel.linear_right", "laurel_r"),
    ("laurel.post_laurel_norm", "laurel_post_norm"),
    ("linear_attn.in_proj_qkvz", "ssm_in"),
    ("linear_attn.in_proj_ba", "ssm_ba"),
    ("linear_attn.in_proj_qkv", "attn_qkv"),
    ("linear_attn.in_proj_z", "attn_gate"),
    ("linear_attn.in_proj_b", "ssm_beta"),
    ("linear_attn.in_proj_a", "ssm_alpha"),
    ("linear_attn.conv1d", "ssm_conv1d"),
    ("linear_attn.norm", "ssm_norm"),
    ("linear_attn.out_proj", "ssm_out"),
    ("router.proj", "ffn_gate_inp"),
    ("post_feedforward_layernorm_1", "post_ffw_norm_1"),
    ("post_feedforward_layernorm_2", "post_ffw_norm_2"),
    ("pre_feedforward_layernorm_2", "pre_ffw_norm_2"),
];

/// The parameters of a block that are not weights or biases of a module, in transformers and in llama.cpp.
const OTHERS: [(&str, &str); 8] = [
    ("mlp.gate.e_score_correction_bias", "exp_probs_b.bias"),
    ("self_attn.sinks", "attn_sinks.weight"),
    ("layer_scalar", "layer_output_scale.weight"),
    ("altup.correct_output_scale", "altup_correct_scale.weight"),
    ("linear_attn.A_log", "ssm_a"),
    ("linear_attn.dt_bias", "ssm_dt.bias"),
    ("router.scale", "ffn_gate_inp.scale"),
    ("router.per_expert_scale", "ffn_down_exps.scale"),
];

/// The stacks of the matrices of all experts, in the order gate, up, down, and gate and up in one.
pub(super) const STACKS: [&str; 4] = [
    "ffn_gate_exps",
    "ffn_up_exps",
    "ffn_down_exps",
    "ffn_gate_up_exps",
];

/// The names of the modules of a block of GPT-2 in transformers and in llama.cpp.
const GPT2_MODULES: [(&str, &str); 6] = [
    ("ln_1", "attn_norm"),
    ("attn.c_attn", "attn_qkv"),
    ("attn.c_proj", "attn_output"),
    ("ln_2", "ffn_norm"),
    ("mlp.c_fc", "ffn_up"),
    ("mlp.c_proj", "ffn_down"),
];

/// Returns llama.cpp's name of the parameter that transformers calls `name`.
pub(super) fn gguf_name(name: &str, config: &ModelConfig) -> Option<String> {
    match config {
        ModelConfig::Llama(config) => llama_name(name, config.family),
        ModelConfig::Gpt2(_) => gpt2_name(name),
    }
}

fn gpt2_name(name: &str) -> Option<String> {
    let (module, end) = name.rsplit_once('.')?;
    let own = match module {
        "transformer.wte" => "token_embd".to_owned(),
        "transformer.wpe" => "position_embd".to_owned(),
        "transformer.ln_f" => "output_norm".to_owned(),
        "lm_head" => "output".to_owned(),
        _ => {
            let (layer, part) = module.strip_prefix("transformer.h.")?.split_once('.')?;
            let (_, part) = GPT2_MODULES.iter().find(|(own, _)| *own == part)?;
            format!("blk.{layer}.{part}")
        }
    };
    Some(format!("{own}.{end}"))
}

pub(super) fn llama_name(name: &str, family: LlamaFamily) -> Option<String> {
    let (module, end) = name.rsplit_once('.')?;
    if let Some((layer, _, part)) = moe::expert_of(module) {
        return Some(format!("blk.{layer}.{}.{end}", STACKS[part]));
    }
    if let Some((stack, _)) = stream_of(module) {
        return Some(format!("{stack}.{end}"));
    }
    if let Some((layer, part)) = name
        .strip_prefix("model.layers.")
        .and_then(|rest| rest.split_once('.'))
        && let Some((_, own)) = OTHERS.iter().find(|(other, _)| *other == part)
    {
        return Some(format!("blk.{layer}.{own}"));
    }
    let own = match module {
        "model.embed_tokens" => "token_embd".to_owned(),
        "model.norm" | "model.final_layernorm" => "output_norm".to_owned(),
        "lm_head" => "output".to_owned(),
        "model.embed_tokens_per_layer" => "per_layer_token_embd".to_owned(),
        "model.per_layer_model_projection" => "per_layer_model_proj".to_owned(),
        "model.per_layer_projection_norm" => "per_layer_proj_norm".to_owned(),
        _ => {
            let (layer, part) = module.strip_prefix("model.layers.")?.split_once('.')?;
            let norm = family.block_norms().iter().find(|(_, name)| *name == part);
            let part = match (norm, part) {
                // llama.cpp has it under the name of a norm after attention.
                (Some((NormPosition::BeforeMlp, _)), _)
                    if family.is_hybrid() || family == LlamaFamily::GptOss =>
                {
                    norm_name(NormPosition::AfterAttention)
                }
                (Some((position, _)), _) => norm_name(*position),
                (None, "mlp.gate" | "mlp.router" | "block_sparse_moe.gate") => "ffn_gate_inp",
                (None, other) => MODULES.iter().find(|(part, _)| *part == other)?.1,
            };
            format!("blk.{layer}.{part}")
        }
    };
    Some(format!("{own}.{end}"))
}

/// The dense layers over the embeddings of EmbeddingGemma, in their order.
pub(crate) const DENSE_OVER_EMBEDDINGS: [&str; 2] = ["dense_2.weight", "dense_3.weight"];

/// Returns `true` for tensors that are no parameters of the decoder: the keys and values, and their norms, of a layer that
/// attends to those of an earlier one (Gemma 3n), and the layers that predict further tokens (Qwen3.5, DeepSeek-V3), and
/// the dense layers over embeddings.
pub(super) fn is_unread(name: &str, config: &LlamaConfig) -> bool {
    if DENSE_OVER_EMBEDDINGS.contains(&name) {
        return config.use_bidirectional_attention;
    }
    let layer = name
        .strip_prefix("blk.")
        .and_then(|rest| rest.split_once('.'));
    let Some((Ok(layer), part)) = layer.map(|(layer, part)| (layer.parse(), part)) else {
        return false;
    };
    let parts = ["attn_k.", "attn_v.", "attn_k_norm."];
    let of_keys = config.shares_kv(layer) && parts.iter().any(|own| part.starts_with(own));
    let predicts = config.family.is_hybrid() || config.family.is_deepseek();
    of_keys || predicts && layer >= config.num_hidden_layers
}

/// Returns the stack of the projections of Gemma 3n's residual streams that `module` is in, and its index.
pub(super) fn stream_of(module: &str) -> Option<(&'static str, usize)> {
    let (list, index) = module.strip_prefix("model.altup_")?.split_once('.')?;
    let stack = match list {
        "projections" => "altup_proj",
        "unembed_projections" => "altup_unembd_proj",
        _ => return None,
    };
    Some((stack, index.parse().ok()?))
}

/// Returns the shape of a parameter in GGUF files, where the gate of the shared expert is a vector.
pub(super) fn gguf_shape(spec: &ParameterSpec) -> Vec<i64> {
    let mut shape = spec.shape.clone();
    match spec.role {
        ParameterRole::Conv1d => shape.reverse(),
        ParameterRole::Router if spec.module().ends_with(SHARED_GATE) => {
            shape.remove(0);
        }
        // The convolution of queries, keys and values `(C, 1, K)`.
        _ if shape.len() == 3 => {
            shape.remove(1);
        }
        _ => {}
    }
    shape
}

/// Returns llama.cpp's name of the norm of a block.
fn norm_name(position: NormPosition) -> &'static str {
    match position {
        NormPosition::BeforeAttention => "attn_norm",
        NormPosition::AfterAttention => "post_attention_norm",
        NormPosition::BeforeMlp => "ffn_norm",
        NormPosition::AfterMlp => "post_ffw_norm",
    }
}

/// Returns the tensor that holds query, key and value of a layer of Phi-2 in older files, if `name` is one of
/// them: its name, the number of its rows, and the rows of `name`.
pub(super) fn fused_rows(name: &str, config: &LlamaConfig) -> Option<(String, i64, Vec<i64>)> {
    if config.family != LlamaFamily::Phi {
        return None;
    }
    let (module, end) = name.rsplit_once('.')?;
    let (layer, part) = module.strip_prefix("model.layers.")?.split_once('.')?;
    let queries = config.num_attention_heads * config.head_dim();
    let keys = config.kv_heads() * config.head_dim();
    let rows = match part {
        "self_attn.q_proj" => 0..queries,
        "self_attn.k_proj" => queries..queries + keys,
        "self_attn.v_proj" => queries + keys..queries + 2 * keys,
        _ => return None,
    };
    let fused = format!("blk.{layer}.attn_qkv.{end}");
    Some((fused, queries + 2 * keys, rows.collect()))
}

/// Returns the index of the stored row for each row of the parameter `name`, if the orders differ.
///
/// llama.cpp rotates neighbouring channels of a head together, transformers channels that are half a head
/// apart; in the architectures `llama`, `mistral3`, `smollm3` and `granite` the rows of queries and keys are stored in
/// llama.cpp's order.
pub(super) fn row_order(name: &str, config: &LlamaConfig) -> Option<Vec<i64>> {
    use LlamaFamily::{Granite, Llama, Ministral3, Mistral, Mixtral, SmolLm3};
    let families = [Granite, Llama, Ministral3, Mistral, Mixtral, SmolLm3];
    if !families.contains(&config.family) {
        return None;
    }
    let heads = if name.contains(".q_proj.") {
        config.num_attention_heads
    } else if name.contains(".k_proj.") {
        config.kv_heads()
    } else {
        return None;
    };
    let (width, half) = (config.head_dim(), config.head_dim() / 2);
    let of_head =
        |head: i64| (0..width).map(move |row| head * width + 2 * (row % half) + row / half);
    Some((0..heads).flat_map(of_head).collect())
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::super::placement::inverse;
    use super::*;

    #[test]
    fn every_parameter_of_every_family_has_a_name_of_its_own() {
        use LlamaFamily as F;
        // The tower of a Qwen3-VL is in a file of its own. GGUF has no architecture for Granite 4 without Mamba layers;
        // such a file is read as Granite 3.
        let has_files = |family: &F| !family.is_qwen3_vl() && *family != F::GraniteMoeHybrid;
        for family in F::ALL.into_iter().filter(has_files) {
            let mut config = LlamaConfig {
                num_hidden_layers: 2,
                tie_word_embeddings: false,
                ..LlamaConfig::of(family)
            };
            if let Some(own) = &mut config.per_layer {
                own.num_kv_shared_layers = 0;
            }
            let parameters = crate::ModelConfig::Llama(config).parameters();
            let names = parameters
                .iter()
                .map(|spec| llama_name(&spec.name, family).unwrap());
            let names: std::collections::BTreeSet<String> = names.collect();
            // The matrices of all experts lie in one tensor for each of the three parts, and so do projections.
            let of_experts = |spec: &&crate::ParameterSpec| {
                moe::expert_of(spec.module()).is_some() || stream_of(spec.module()).is_some()
            };
            let in_experts = parameters.iter().filter(of_experts).count();
            let stacks = match in_experts {
                0 => 0,
                // The projections of residual streams lie in two.
                _ if family == F::Gemma3n => 2,
                // Weights and biases of both layers of an expert, in two blocks.
                _ if family == F::GptOss => 2 * 4,
                // Gate, up and down of two layers.
                _ => 2 * 3,
            };
            assert_eq!(
                names.len(),
                parameters.len() - in_experts + stacks,
                "{family:?}"
            );
        }
        assert_eq!(llama_name("model.layers.0.unknown.weight", F::Llama), None);
        let parameters = crate::ModelConfig::Gpt2(Default::default()).parameters();
        let names = parameters.iter().map(|spec| gpt2_name(&spec.name).unwrap());
        let names: std::collections::BTreeSet<String> = names.collect();
        assert_eq!(names.len(), parameters.len());
    }

    #[test]
    fn rows_of_heads_are_reordered_from_adjacent_pairs() {
        let config = LlamaConfig {
            hidden_size: 8,
            num_attention_heads: 2,
            ..LlamaConfig::default()
        };
        let order = row_order("model.layers.0.self_attn.q_proj.weight", &config);
        assert_eq!(order, Some(vec![0, 2, 1, 3, 4, 6, 5, 7]));
        assert_eq!(inverse(&[2, 0, 1]), [1, 2, 0]);
        assert_eq!(
            row_order("model.layers.0.self_attn.v_proj.weight", &config),
            None
        );
    }
}
