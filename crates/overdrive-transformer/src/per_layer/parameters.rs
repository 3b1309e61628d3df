use super::altup::Streams;
use super::experts;
use crate::config::PerLayerConfig;
use crate::feed_forward::{FeedForward, WeightSpec};
use crate::moe;
use crate::parameters::{ParameterRole, ParameterSpec};
use crate::{Init, LlamaConfig};

/// Parameters in the order of transformers' modules.
struct List {
    all: Vec<ParameterSpec>,
    prefix: String,
    std: f64,
}

impl List {
    fn add(&mut self, name: &str, shape: &[i64], init: Init, role: ParameterRole) {
        let name = format!("{}.{name}", self.prefix);
        self.all.push(ParameterSpec::new(name, shape, init, role));
    }

    fn weight(&mut self, name: &str, shape: [i64; 2], role: ParameterRole) {
        let init = Init::Normal { std: self.std };
        self.add(&format!("{name}.weight"), &shape, init, role);
    }

    fn linear(&mut self, name: &str, shape: [i64; 2], bias: bool) {
        self.weight(name, shape, ParameterRole::Linear);
        if bias {
            let name = format!("{name}.bias");
            self.add(&name, &shape[..1], Init::Zeros, ParameterRole::Other);
        }
    }

    fn weights(&mut self, weights: Vec<WeightSpec>) {
        let init = Init::Normal { std: self.std };
        let spec = |(name, shape, role): WeightSpec| {
            ParameterSpec::new(format!("{name}.weight"), &shape, init, role)
        };
        self.all.extend(weights.into_iter().map(spec));
    }

    fn norm(&mut self, name: &str, width: i64) {
        let name = format!("{name}.weight");
        self.add(&name, &[width], Init::Ones, ParameterRole::Other);
    }
}

/// Returns the parameters of layer `layer`.
pub(crate) fn block_parameters(
    config: &LlamaConfig,
    sizes: &PerLayerConfig,
    layer: i64,
) -> Vec<ParameterSpec> {
    let mut list = List {
        all: Vec::new(),
        prefix: format!("model.layers.{layer}"),
        std: config.initializer_range,
    };
    if sizes.altup.is_none() {
        // Of Gemma 4; a buffer in transformers.
        list.add("layer_scalar", &[1], Init::Ones, ParameterRole::Other);
    }
    attention_parameters(&mut list, config, layer, sizes.altup.is_some());
    list.weights(FeedForward::weights(config, layer));
    let hidden = config.hidden_size;
    for (_, name) in config.family.block_norms() {
        list.norm(name, hidden);
    }
    if let Some(altup) = &sizes.altup {
        let (streams, rank) = (altup.altup_num_inputs, altup.laurel_rank);
        let name = "altup.correct_output_scale";
        list.add(name, &[hidden], Init::Zeros, ParameterRole::Other);
        for (name, shape) in [
            ("altup.correction_coefs", [streams, streams]),
            ("altup.prediction_coefs", [streams * streams, streams]),
            ("altup.modality_router", [streams, hidden]),
        ] {
            list.weight(name, shape, ParameterRole::Router);
        }
        list.norm("altup.router_norm", hidden);
        list.linear("laurel.linear_left", [rank, hidden], false);
        list.linear("laurel.linear_right", [hidden, rank], false);
        list.norm("laurel.post_laurel_norm", hidden);
    }
    let width = sizes.hidden_size_per_layer_input;
    if width > 0 {
        list.linear("per_layer_input_gate", [width, hidden], false);
        list.linear("per_layer_projection", [hidden, width], false);
        list.norm("post_per_layer_input_norm", hidden);
    }
    if let Some(experts) = &config.experts {
        for (name, width) in moe::router_scale_names(&list.prefix)
            .into_iter()
            .zip([hidden, experts.num_experts])
        {
            let spec = ParameterSpec::new(name, &[width], Init::Ones, ParameterRole::Other);
            list.all.push(spec);
        }
        list.weights(moe::weights(config, &list.prefix, experts));
        for name in experts::NORMS {
            list.norm(name, hidden);
        }
    }
    list.all
}

fn attention_parameters(list: &mut List, config: &LlamaConfig, layer: i64, of_gemma3n: bool) {
    let (hidden, head) = (config.hidden_size, config.head_dim_of(layer));
    let (queries, keys) = (
        config.num_attention_heads * head,
        config.kv_heads_of(layer) * head,
    );
    let bias = config.attention_bias;
    list.linear("self_attn.q_proj", [queries, hidden], bias);
    list.norm("self_attn.q_norm", head);
    if !config.shares_kv(layer) {
        if !of_gemma3n {
            list.norm("self_attn.k_norm", head);
        }
        list.linear("self_attn.k_proj", [keys, hidden], bias);
        if !config.keys_are_values(layer) {
            list.linear("self_attn.v_proj", [keys, hidden], bias);
        }
        if of_gemma3n {
            list.norm("self_attn.k_norm", head);
        }
    }
    list.linear("self_attn.o_proj", [hidden, queries], bias);
}

/// Returns the parameters of the model that are not of a layer and that other families do not have.
pub(crate) fn model_parameters(config: &LlamaConfig, sizes: &PerLayerConfig) -> Vec<ParameterSpec> {
    let mut list = List {
        all: Vec::new(),
        prefix: "model".to_owned(),
        std: config.initializer_range,
    };
    let (hidden, width) = (config.hidden_size, sizes.hidden_size_per_layer_input);
    if width > 0 {
        let all = config.num_hidden_layers * width;
        let rows = sizes.vocab_size_per_layer_input;
        list.weight(
            "embed_tokens_per_layer",
            [rows, all],
            ParameterRole::LayerInputs,
        );
        list.linear("per_layer_model_projection", [all, hidden], false);
        list.norm("per_layer_projection_norm", width);
    }
    if let Some(altup) = &sizes.altup {
        let weight = |name| (name, [hidden, hidden], ParameterRole::Linear);
        list.weights(Streams::names(altup).into_iter().map(weight).collect());
    }
    list.all
}
