use std::collections::HashMap;

use overdrive_quantization::QuantizedWeight;
use serde_json::{Map, Value};
use tch::{Kind, Tensor};

use super::multimodal;
use super::packed_experts;
use super::quantized::{LAYOUT_KEY, Views};
use crate::model_parts::ModelParts;
use crate::moe::is_correction;
use crate::parameters::{ParameterRole, ParameterSpec};
use crate::{CausalLm, LlamaConfig, LlamaFamily, ModelConfig, Result};

/// The properties of a configuration that are needed to read and write its checkpoints.
pub(crate) trait CheckpointConfig {
    /// Returns every parameter in the order of transformers' `named_parameters`, without tied ones.
    fn parameters(&self) -> Vec<ParameterSpec>;

    /// Returns the key of the number of layers, and the number.
    fn layers(&self) -> (&'static str, i64);

    /// Returns the keys of `config.json` that this crate does not know.
    fn extra(&self) -> &Map<String, Value>;

    /// Replaces the object `quantization_config`, whose lists have the names of another model in the folder of a larger
    /// one. Only a `ModelConfig` is read from such a folder.
    fn set_quantization(&mut self, layout: Value) {
        let _ = layout;
    }

    /// Returns the object of `config.json`.
    fn to_json(&self) -> Map<String, Value>;

    /// Returns the groups of parameters that should lie next to one another in memory.
    fn adjacent(&self) -> Vec<Vec<String>>;

    /// Returns the module of the output layer that shares the weight of the embedding, if one does.
    fn tied_head(&self) -> Option<&'static str>;

    /// Unties the output layer.
    fn untie_head(&mut self);

    /// Returns the prefix of the backbone's names in a checkpoint of a model with a head.
    fn prefix(&self) -> &'static str;

    /// Returns the tensors of a checkpoint that belong to this model, under the names of this model's own checkpoints:
    /// a checkpoint may hold a larger model.
    fn own_tensors<'a>(&self, views: Views<'a>) -> Views<'a> {
        views
    }

    /// Returns the tensors of a checkpoint that is written: the inverse of [`own_tensors`](Self::own_tensors).
    ///
    /// # Errors
    /// An error of libtorch when memory runs out.
    fn stacked(&self, tensors: Vec<(String, Tensor)>) -> Result<Vec<(String, Tensor)>> {
        Ok(tensors)
    }

    /// Returns the name of the parameter that the tensor `name` holds in a file where some names begin with the
    /// [prefix](Self::prefix) if `prefixed`; `None` if the model has no use for it.
    fn parameter_name(&self, name: &str, prefixed: bool) -> Option<String>;

    /// Returns the dtype of a parameter in a model of dtype `kind`.
    fn kind_of(&self, parameter: &ParameterSpec, kind: Kind) -> Kind {
        let _ = parameter;
        kind
    }

    /// Returns `true` if files have the matrix of the parameter in either order of its inputs and outputs.
    fn may_be_transposed(&self, parameter: &ParameterSpec) -> bool {
        let _ = parameter;
        false
    }

    /// Returns `true` if a checkpoint without the parameter is complete: the model initializes it.
    fn may_be_missing(&self, parameter: &ParameterSpec) -> bool {
        let _ = parameter;
        false
    }
}

impl CheckpointConfig for ModelConfig {
    fn parameters(&self) -> Vec<ParameterSpec> {
        ModelConfig::parameters(self)
    }

    fn kind_of(&self, parameter: &ParameterSpec, kind: Kind) -> Kind {
        match kind {
            // transformers' `_keep_in_fp32_modules_strict`: the differences of the corrections are small.
            Kind::Half | Kind::BFloat16 if is_correction(&parameter.name) => Kind::Float,
            kind => kind,
        }
    }

    fn may_be_transposed(&self, parameter: &ParameterSpec) -> bool {
        // Qwen3-VL's experts are published as `(E, I, O)`; transformers 5 saves them as `(E, O, I)`, and reads both.
        let ModelConfig::Llama(config) = self else {
            return false;
        };
        config.family == LlamaFamily::Qwen3VlMoe && parameter.role == ParameterRole::Conv1d
    }

    fn layers(&self) -> (&'static str, i64) {
        match self {
            ModelConfig::Llama(config) => ("num_hidden_layers", config.num_hidden_layers),
            ModelConfig::Gpt2(config) => ("n_layer", config.n_layer),
        }
    }

    fn extra(&self) -> &Map<String, Value> {
        match self {
            ModelConfig::Llama(config) => &config.extra,
            ModelConfig::Gpt2(config) => &config.extra,
        }
    }

    fn set_quantization(&mut self, layout: Value) {
        if let ModelConfig::Llama(config) = self {
            config.extra.insert(LAYOUT_KEY.to_owned(), layout);
        }
    }

    fn to_json(&self) -> Map<String, Value> {
        ModelConfig::to_json(self)
    }

    fn adjacent(&self) -> Vec<Vec<String>> {
        match self {
            ModelConfig::Llama(config) => crate::llama::Llama::adjacent(config),
            ModelConfig::Gpt2(_) => Vec::new(),
        }
    }

    fn tied_head(&self) -> Option<&'static str> {
        self.tie_word_embeddings().then_some("lm_head")
    }

    fn untie_head(&mut self) {
        self.set_tied(false);
    }

    fn prefix(&self) -> &'static str {
        match self {
            ModelConfig::Llama(_) => "model.",
            ModelConfig::Gpt2(_) => "transformer.",
        }
    }

    fn own_tensors<'a>(&self, mut views: Views<'a>) -> Views<'a> {
        let ModelConfig::Llama(config) = self else {
            return views;
        };
        let family = config.family;
        views.retain(|name, _| !predicts_further_tokens(name, config));
        if family.may_be_multimodal() {
            views = multimodal::text(views, family);
        }
        match family == LlamaFamily::Qwen35Moe || family.has_packed_experts() {
            true => packed_experts::split(views, config),
            false => views,
        }
    }

    fn stacked(&self, tensors: Vec<(String, Tensor)>) -> Result<Vec<(String, Tensor)>> {
        match self {
            ModelConfig::Llama(config) if config.family.has_packed_experts() => {
                packed_experts::stacked(tensors, config)
            }
            _ => Ok(tensors),
        }
    }

    /// Adds the decoder's prefix to the names of a checkpoint of the bare decoder; transformers reads both.
    fn parameter_name(&self, name: &str, prefixed: bool) -> Option<String> {
        // The head lies beside the decoder, not in it.
        let name = match prefixed || name.starts_with("lm_head.") {
            true => name.to_owned(),
            false => format!("{}{name}", self.prefix()),
        };
        match self {
            ModelConfig::Llama(config) if is_of_shared_keys(&name, config) => None,
            _ => Some(name),
        }
    }
}

/// Returns `true` for the keys and values, and their norms, of a layer that attends to those of an earlier one: files of
/// Gemma 3n and 4 may hold them, and nothing reads them.
fn is_of_shared_keys(name: &str, config: &LlamaConfig) -> bool {
    let layer = name.strip_prefix("model.layers.");
    let layer = layer.and_then(|rest| rest.split_once(".self_attn."));
    let Some((layer, part)) = layer else {
        return false;
    };
    let shares = layer.parse().is_ok_and(|layer| config.shares_kv(layer));
    let parts = ["k_proj.", "v_proj.", "k_norm.", "v_norm."];
    shares && parts.iter().any(|own| part.starts_with(own))
}

/// Returns `true` for a tensor of the modules that predict the tokens after the next one, which transformers does not
/// read either: `mtp.` in Qwen3-Next and Qwen3.5, and the `num_nextn_predict_layers` layers after the last one in
/// DeepSeek-V3.
fn predicts_further_tokens(name: &str, config: &LlamaConfig) -> bool {
    if config.family.is_hybrid() {
        return name.starts_with("mtp.");
    }
    if config.family != LlamaFamily::DeepseekV3 {
        return false;
    }
    let layer = name.strip_prefix("model.layers.");
    let layer = layer.and_then(|rest| rest.split('.').next()?.parse::<i64>().ok());
    let further = config.extra.get("num_nextn_predict_layers");
    let further = further.and_then(Value::as_i64).unwrap_or(0);
    layer.is_some_and(|layer| {
        layer >= config.num_hidden_layers && layer - config.num_hidden_layers < further
    })
}

/// The contents of a checkpoint to write.
pub(crate) struct Contents<'m> {
    pub(crate) config: &'m dyn CheckpointConfig,
    /// The dense parameters by name.
    pub(crate) dense: Vec<(String, Tensor)>,
    /// The quantized weights by the names of their layers.
    pub(crate) quantized: HashMap<String, QuantizedWeight>,
    /// The dtype of the dense parameters.
    pub(crate) kind: Kind,
    /// The object of `generation_config.json`, for a model that generates.
    pub(crate) generation: Option<Map<String, Value>>,
}

impl<'m> Contents<'m> {
    pub(crate) fn of(model: &'m CausalLm) -> Contents<'m> {
        let generation = model.generation_config().cloned();
        Contents {
            config: model.config(),
            dense: model.named_parameters(),
            quantized: model.quantized_weights(),
            kind: model.kind(),
            generation: Some(generation.unwrap_or_else(|| model.config().generation_defaults())),
        }
    }
}
