//! T5's parameters and stacks (Raffel et al. 2020, arXiv:1910.10683; v1.1: Shazeer 2020, arXiv:2002.05202).

use overdrive_checkpointing::Shared;

use super::attention::{Attention, AttentionLayout};
use super::block::{Block, Bounded};
use super::feed_forward::FeedForward;
use super::norm::Norm;
use super::relative_bias::RelativeBias;
use super::stack::{Dropouts, Positions, Stack};
use crate::activation_names::activation_named;
use crate::config::T5Config;
use crate::parameters::{ParameterMap, ParameterRole, ParameterSpec};
use crate::{Init, Result};

/// One of the two stacks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Encoder,
    Decoder,
}

impl Side {
    pub(super) fn name(self) -> &'static str {
        match self {
            Side::Encoder => "encoder",
            Side::Decoder => "decoder",
        }
    }

    /// Returns the number of layers and the names of the attentions of a block.
    fn shape(self, config: &T5Config) -> (i64, &'static [&'static str]) {
        match self {
            Side::Encoder => (config.num_layers, &["SelfAttention"]),
            Side::Decoder => (
                config.decoder_layers(),
                &["SelfAttention", "EncDecAttention"],
            ),
        }
    }
}

/// Returns the names of the input projections of the feed-forward block.
fn inputs(config: &T5Config) -> &'static [&'static str] {
    match config.feed_forward().1 {
        true => &["wi_0", "wi_1"],
        false => &["wi"],
    }
}

/// Returns the parameters of a T5 in the order of transformers' `named_parameters`.
pub(crate) fn parameters(config: &T5Config) -> Vec<ParameterSpec> {
    use ParameterRole::{Embedding, Head, Linear, Other};
    let (hidden, inner, ff) = (config.d_model, config.inner(), config.d_ff);
    // Initialized as in transformers: scores are not scaled, so queries are smaller.
    let normal = |inputs: i64| Init::Normal {
        std: config.initializer_factor * (inputs as f64).powf(-0.5),
    };
    let mut all = Vec::new();
    let mut add = |name: String, shape: &[i64], init, role| {
        all.push(ParameterSpec::new(
            format!("{name}.weight"),
            shape,
            init,
            role,
        ));
    };
    let vocabulary = [config.vocab_size, hidden];
    add("shared".to_owned(), &vocabulary, normal(1), Embedding);
    for side in [Side::Encoder, Side::Decoder] {
        let (layers, attentions) = side.shape(config);
        for layer in 0..layers {
            let prefix = format!("{}.block.{layer}.layer", side.name());
            for (sublayer, attention) in attentions.iter().enumerate() {
                let name = |part: &str| format!("{prefix}.{sublayer}.{attention}.{part}");
                let query = normal(hidden.saturating_mul(config.d_kv));
                add(name("q"), &[inner, hidden], query, Linear);
                add(name("k"), &[inner, hidden], normal(hidden), Linear);
                add(name("v"), &[inner, hidden], normal(hidden), Linear);
                add(name("o"), &[hidden, inner], normal(inner), Linear);
                if layer == 0 && sublayer == 0 {
                    let shape = [config.relative_attention_num_buckets, config.num_heads];
                    add(
                        name("relative_attention_bias"),
                        &shape,
                        normal(hidden),
                        Other,
                    );
                }
                let norm = format!("{prefix}.{sublayer}.layer_norm");
                add(norm, &[hidden], Init::Ones, Other);
            }
            let prefix = format!("{prefix}.{}", attentions.len());
            for name in inputs(config) {
                let name = format!("{prefix}.DenseReluDense.{name}");
                add(name, &[ff, hidden], normal(hidden), Linear);
            }
            let name = format!("{prefix}.DenseReluDense.wo");
            add(name, &[hidden, ff], normal(ff), Linear);
            add(format!("{prefix}.layer_norm"), &[hidden], Init::Ones, Other);
        }
        let norm = format!("{}.final_layer_norm", side.name());
        add(norm, &[hidden], Init::Ones, Other);
    }
    if !config.tie_word_embeddings {
        add("lm_head".to_owned(), &vocabulary, normal(1), Head);
    }
    all
}

/// Returns the groups of parameters that one matmul reads.
pub(crate) fn adjacent(config: &T5Config) -> Vec<Vec<String>> {
    let mut groups = Vec::new();
    for side in [Side::Encoder, Side::Decoder] {
        let (layers, attentions) = side.shape(config);
        for layer in 0..layers {
            for (sublayer, attention) in attentions.iter().enumerate() {
                // Queries of the other tokens are not those of keys and values.
                let parts: &[&str] = if sublayer == 0 {
                    &["q", "k", "v"]
                } else {
                    &["k", "v"]
                };
                let name = |part: &&str| {
                    let side = side.name();
                    format!("{side}.block.{layer}.layer.{sublayer}.{attention}.{part}.weight")
                };
                groups.push(parts.iter().map(name).collect());
            }
        }
    }
    groups
}

/// Takes the parameters of a stack.
pub(super) fn take(parameters: &mut ParameterMap, config: &T5Config, side: Side) -> Result<Stack> {
    let (layers, _) = side.shape(config);
    let name = side.name();
    let blocks = (0..layers)
        .map(|layer| block(parameters, config, side, layer).map(Shared::new))
        .collect::<Result<_>>()?;
    let bias = RelativeBias::take(
        parameters,
        &format!("{name}.block.0.layer.0.SelfAttention.relative_attention_bias"),
        side == Side::Encoder,
        config.relative_attention_max_distance,
    )?;
    let norm = format!("{name}.final_layer_norm");
    let dropout = config.dropout_rate;
    Ok(Stack {
        blocks,
        positions: Positions::Relative(bias),
        embedding_scale: None,
        padding_index: -1,
        embedding_norm: None,
        final_norm: Some(Norm::rms(parameters, &norm, config.layer_norm_epsilon)?),
        dropouts: Dropouts {
            hidden: dropout,
            attention: dropout,
            activation: dropout,
            output: dropout,
            layers: 0.0,
        },
    })
}

fn block(
    parameters: &mut ParameterMap,
    config: &T5Config,
    side: Side,
    layer: i64,
) -> Result<Block> {
    let (_, attentions) = side.shape(config);
    let prefix = format!("{}.block.{layer}.layer", side.name());
    let layout = AttentionLayout {
        names: ["q", "k", "v", "o"],
        bias: false,
        heads: config.num_heads,
        scale: Some(1.0),
    };
    let eps = config.layer_norm_epsilon;
    let mut sublayers = Vec::new();
    for (sublayer, attention) in attentions.iter().enumerate() {
        let prefix = format!("{prefix}.{sublayer}");
        let attention = Attention::take(parameters, &format!("{prefix}.{attention}"), layout)?;
        let norm = Norm::rms(parameters, &format!("{prefix}.layer_norm"), eps)?;
        sublayers.push((attention, norm));
    }
    let mut sublayers = sublayers.into_iter();
    let (Some((attention, attention_norm)), cross) = (sublayers.next(), sublayers.next()) else {
        unreachable!("each stack has an attention over its own tokens")
    };
    let prefix = format!("{prefix}.{}", attentions.len());
    let mut linear =
        |name: &str| parameters.take_linear(&format!("{prefix}.DenseReluDense.{name}"), false);
    let (activation, gated) = config.feed_forward();
    let feed_forward = FeedForward {
        input: linear(inputs(config)[0])?,
        gate: gated.then(|| linear("wi_1")).transpose()?,
        output: linear("wo")?,
        activation: activation_named("feed_forward_proj", activation)?,
    };
    Ok(Block {
        attention,
        attention_norm,
        cross,
        feed_forward,
        feed_forward_norm: Norm::rms(parameters, &format!("{prefix}.layer_norm"), eps)?,
        pre_norm: true,
        bounded: Bounded::Sublayers,
    })
}
