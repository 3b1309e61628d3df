use crate::feed_forward::FeedForward;
use crate::gated_delta_net::GatedDeltaNet;
use crate::latent_attention::LatentAttention;
use crate::moe::correction_name;
use crate::parameters::{ParameterRole, ParameterSpec};
use crate::{Init, LlamaConfig, LlamaFamily, parallel_block, per_layer, vision};

/// Returns the parameters of a Llama in the order of transformers' `named_parameters`, with those of images last.
pub(crate) fn parameters(config: &LlamaConfig) -> Vec<ParameterSpec> {
    if config.family == LlamaFamily::Phi {
        return parallel_block::parameters(config);
    }
    let (hidden, head) = (config.hidden_size, config.head_dim());
    let (queries, keys) = (config.num_attention_heads * head, config.kv_heads() * head);
    let normal = Init::Normal {
        std: config.initializer_range,
    };
    // Gemma's norms multiply by `1 + weight`, so zeros are its gain of 1.
    let one = match config.norm_adds_one() {
        true => Init::Zeros,
        false => Init::Ones,
    };
    let mut all = Vec::new();
    let spec =
        |name: String, shape: &[i64], init, role| ParameterSpec::new(name, shape, init, role);
    use ParameterRole::{Conv1d, Embedding, Head, Linear, Other, Router};
    all.push(spec(
        format!("{}.embed_tokens.weight", config.backbone_name()),
        &[config.vocab_size, hidden],
        normal,
        Embedding,
    ));
    for layer in 0..config.num_hidden_layers {
        if let Some(sizes) = &config.per_layer {
            all.extend(per_layer::block_parameters(config, sizes, layer));
            continue;
        }
        let prefix = config.layer_name(layer);
        let [mut attention, mut mlp, mut norms] = [Vec::new(), Vec::new(), Vec::new()];
        let mut add =
            |name, shape: &[i64], init, role| attention.push(spec(name, shape, init, role));
        if config.family == LlamaFamily::GptOss {
            let name = format!("{prefix}.self_attn.sinks");
            add(name, &[config.num_attention_heads], normal, Other);
        }
        if let Some(mla) = &config.mla {
            for (name, shape, role, bias) in LatentAttention::layers_of(&prefix, config, mla) {
                let [outputs, inputs] = shape;
                match role {
                    Other => add(format!("{name}.weight"), &[inputs], one, Other),
                    role => add(format!("{name}.weight"), &shape, normal, role),
                }
                if bias {
                    add(format!("{name}.bias"), &[outputs], Init::Zeros, Other);
                }
            }
        }
        let delta_net = config.delta_net_of(layer);
        let mut linear = |name: &str, output, input, bias| {
            let name = format!("{prefix}.{name}");
            add(format!("{name}.weight"), &[output, input], normal, Linear);
            if bias {
                add(format!("{name}.bias"), &[output], Init::Zeros, Other);
            }
        };
        if config.mla.is_some() || delta_net.is_some() {
            // Listed elsewhere.
        } else if config.has_joint_qkv() {
            linear("self_attn.o_proj", hidden, queries, false);
            linear("self_attn.qkv_proj", queries + 2 * keys, hidden, false);
        } else {
            let gates = if config.gates_attention() { queries } else { 0 };
            linear(
                "self_attn.q_proj",
                queries + gates,
                hidden,
                config.qkv_bias(),
            );
            linear("self_attn.k_proj", keys, hidden, config.qkv_bias());
            linear("self_attn.v_proj", keys, hidden, config.qkv_bias());
            linear("self_attn.o_proj", hidden, queries, config.output_bias());
        }
        if config.qk_norm() && delta_net.is_none() {
            for (name, width) in ["q_norm", "k_norm"]
                .into_iter()
                .zip(config.qk_norm_widths())
            {
                let name = format!("{prefix}.self_attn.{name}.weight");
                add(name, &[width], one, Other);
            }
        }
        if let Some(sizes) = delta_net {
            attention = GatedDeltaNet::parameters(&prefix, config, sizes);
        }
        for (name, shape, role) in FeedForward::weights(config, layer) {
            let is_router = role == Router;
            mlp.push(spec(format!("{name}.weight"), &shape, normal, role));
            if is_router && config.family == LlamaFamily::DeepseekV3 {
                let name = correction_name(&prefix);
                mlp.push(spec(name, &shape[..1], Init::Zeros, Other));
            }
            if config.has_mlp_bias() {
                let [first, second] = shape;
                let (outputs, init) = match role {
                    Conv1d => (second, Init::Zeros),
                    // As in transformers, where those of the router alone are random.
                    Router => (first, normal),
                    _ => (first, Init::Zeros),
                };
                mlp.push(spec(format!("{name}.bias"), &[outputs], init, Other));
            }
        }
        for (_, name) in config.family.block_norms() {
            let name = format!("{prefix}.{name}.weight");
            norms.push(spec(name, &[hidden], one, Other));
        }
        let parts = match config.family {
            LlamaFamily::GraniteMoeHybrid => [norms, mlp, attention],
            _ => [attention, mlp, norms],
        };
        all.extend(parts.into_iter().flatten());
    }
    let norm = format!("{}.norm.weight", config.backbone_name());
    all.push(spec(norm, &[hidden], one, Other));
    if let Some(sizes) = &config.per_layer {
        all.extend(per_layer::model_parameters(config, sizes));
    }
    if !config.tie_word_embeddings {
        all.push(spec(
            "lm_head.weight".to_owned(),
            &[config.vocab_size, hidden],
            normal,
            Head,
        ));
    }
    if let Some(vision) = &config.vision {
        all.extend(vision::parameters(vision));
    }
    all
}
