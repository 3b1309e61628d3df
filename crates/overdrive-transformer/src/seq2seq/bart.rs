//! BART's parameters and stacks (Lewis et al. 2020, arXiv:1910.13461).

use overdrive_checkpointing::Shared;

use super::attention::{Attention, AttentionLayout};
use super::block::{Block, Bounded};
use super::feed_forward::FeedForward;
use super::norm::Norm;
use super::stack::{Dropouts, LearnedPositions, Positions, Stack};
use super::t5::Side;
use crate::activation_names::activation_named;
use crate::config::BartConfig;
use crate::parameters::{ParameterMap, ParameterRole, ParameterSpec};
use crate::{Init, Result};

/// The name of the bias of the logits, a buffer of transformers.
pub(super) const LOGITS_BIAS: &str = "final_logits_bias";

/// The sizes of a stack.
struct StackShape {
    layers: i64,
    ff: i64,
    heads: i64,
    layerdrop: f64,
    attentions: &'static [&'static str],
}

fn shape(config: &BartConfig, side: Side) -> StackShape {
    match side {
        Side::Encoder => StackShape {
            layers: config.encoder_layers,
            ff: config.encoder_ffn_dim,
            heads: config.encoder_attention_heads,
            layerdrop: config.encoder_layerdrop,
            attentions: &["self_attn"],
        },
        Side::Decoder => StackShape {
            layers: config.decoder_layers,
            ff: config.decoder_ffn_dim,
            heads: config.decoder_attention_heads,
            layerdrop: config.decoder_layerdrop,
            attentions: &["self_attn", "encoder_attn"],
        },
    }
}

/// Returns the parameters of a BART in the order of transformers' `named_parameters`, and the bias of the logits.
pub(crate) fn parameters(config: &BartConfig) -> Vec<ParameterSpec> {
    use ParameterRole::{Embedding, Head, Linear, Other};
    let hidden = config.d_model;
    let normal = Init::Normal {
        std: config.init_std,
    };
    let mut all = Vec::new();
    let mut add = |name: String, shape: &[i64], init, role| {
        all.push(ParameterSpec::new(name, shape, init, role));
    };
    let vocabulary = [config.vocab_size, hidden];
    add(
        "model.shared.weight".to_owned(),
        &vocabulary,
        normal,
        Embedding,
    );
    for side in [Side::Encoder, Side::Decoder] {
        let (stack, prefix) = (shape(config, side), format!("model.{}", side.name()));
        let rows = config.max_position_embeddings + LearnedPositions::OFFSET;
        add(
            format!("{prefix}.embed_positions.weight"),
            &[rows, hidden],
            normal,
            Other,
        );
        let mut linear = |name: String, outputs: i64, inputs: i64| {
            add(format!("{name}.weight"), &[outputs, inputs], normal, Linear);
            add(format!("{name}.bias"), &[outputs], Init::Zeros, Other);
            // A norm follows each residual sum, and with it the last projection before it.
            let norm = match name.rsplit_once('.') {
                Some((attention, "out_proj")) => format!("{attention}_layer_norm"),
                Some((layer, "fc2")) => format!("{layer}.final_layer_norm"),
                _ => return,
            };
            add(format!("{norm}.weight"), &[hidden], Init::Ones, Other);
            add(format!("{norm}.bias"), &[hidden], Init::Zeros, Other);
        };
        for layer in 0..stack.layers {
            let layer = format!("{prefix}.layers.{layer}");
            for attention in stack.attentions {
                for part in ["k_proj", "v_proj", "q_proj", "out_proj"] {
                    linear(format!("{layer}.{attention}.{part}"), hidden, hidden);
                }
            }
            linear(format!("{layer}.fc1"), stack.ff, hidden);
            linear(format!("{layer}.fc2"), hidden, stack.ff);
        }
        let norm = format!("{prefix}.layernorm_embedding");
        add(format!("{norm}.weight"), &[hidden], Init::Ones, Other);
        add(format!("{norm}.bias"), &[hidden], Init::Zeros, Other);
    }
    if !config.tie_word_embeddings {
        add("lm_head.weight".to_owned(), &vocabulary, normal, Head);
    }
    add(
        LOGITS_BIAS.to_owned(),
        &[1, config.vocab_size],
        Init::Zeros,
        Other,
    );
    all
}

/// Returns the groups of parameters that one matmul reads.
pub(crate) fn adjacent(config: &BartConfig) -> Vec<Vec<String>> {
    let mut groups = Vec::new();
    for side in [Side::Encoder, Side::Decoder] {
        let (stack, side) = (shape(config, side), side.name());
        for layer in 0..stack.layers {
            for (number, attention) in stack.attentions.iter().enumerate() {
                // Queries of the other tokens are not those of keys and values.
                let parts: &[&str] = match number {
                    0 => &["q_proj", "k_proj", "v_proj"],
                    _ => &["k_proj", "v_proj"],
                };
                for kind in ["weight", "bias"] {
                    let name = |part: &&str| {
                        format!("model.{side}.layers.{layer}.{attention}.{part}.{kind}")
                    };
                    groups.push(parts.iter().map(name).collect());
                }
            }
        }
    }
    groups
}

/// Takes the parameters of a stack.
pub(super) fn take(
    parameters: &mut ParameterMap,
    config: &BartConfig,
    side: Side,
) -> Result<Stack> {
    let stack = shape(config, side);
    let prefix = format!("model.{}", side.name());
    let blocks = (0..stack.layers)
        .map(|layer| block(parameters, config, side, layer).map(Shared::new))
        .collect::<Result<_>>()?;
    let name = format!("{prefix}.embed_positions.weight");
    let positions = LearnedPositions {
        table: parameters.take(&name)?,
        name,
    };
    let scale = (config.d_model as f64).sqrt();
    Ok(Stack {
        blocks,
        positions: Positions::Learned(positions),
        embedding_scale: config.scale_embedding.then_some(scale),
        padding_index: config.pad_token_id.unwrap_or(-1),
        embedding_norm: Some(Norm::layer(
            parameters,
            &format!("{prefix}.layernorm_embedding"),
        )?),
        final_norm: None,
        dropouts: Dropouts {
            hidden: config.dropout,
            attention: config.attention_dropout,
            activation: config.activation_dropout,
            output: 0.0,
            layers: stack.layerdrop,
        },
    })
}

fn block(
    parameters: &mut ParameterMap,
    config: &BartConfig,
    side: Side,
    layer: i64,
) -> Result<Block> {
    let stack = shape(config, side);
    let prefix = format!("model.{}.layers.{layer}", side.name());
    let layout = AttentionLayout {
        names: ["q_proj", "k_proj", "v_proj", "out_proj"],
        bias: true,
        heads: stack.heads,
        scale: None,
    };
    let mut attention = |name: &str| -> Result<(Attention, Norm)> {
        let name = format!("{prefix}.{name}");
        let attention = Attention::take(parameters, &name, layout)?;
        Ok((
            attention,
            Norm::layer(parameters, &format!("{name}_layer_norm"))?,
        ))
    };
    let (own, own_norm) = attention("self_attn")?;
    let cross = match side {
        Side::Encoder => None,
        Side::Decoder => Some(attention("encoder_attn")?),
    };
    let activation = activation_named("activation_function", &config.activation_function)?;
    Ok(Block {
        attention: own,
        attention_norm: own_norm,
        cross,
        feed_forward: FeedForward {
            input: parameters.take_linear(&format!("{prefix}.fc1"), true)?,
            gate: None,
            output: parameters.take_linear(&format!("{prefix}.fc2"), true)?,
            activation,
        },
        feed_forward_norm: Norm::layer(parameters, &format!("{prefix}.final_layer_norm"))?,
        pre_norm: false,
        bounded: match side {
            Side::Encoder => Bounded::Block,
            Side::Decoder => Bounded::Never,
        },
    })
}
