//! The metadata of a GGUF file that is written: the inverse of [`config`](super::config).

use std::collections::BTreeMap;

use overdrive_quantization::{GgufArray, GgufValue};

use super::config::LARGEST_GEMMAS;
use crate::config::{Gpt2Config, LlamaConfig, LlamaFamily, ModelConfig, RopeScaling};
use crate::{Error, Result};

/// The keys of `general.architecture` and of the architecture, and what a loader reads from tensors.
pub(super) struct Metadata {
    pub(super) architecture: &'static str,
    pub(super) values: BTreeMap<String, GgufValue>,
    /// Small tensors of rotary frequencies: name and elements.
    pub(super) rope: Vec<(&'static str, Vec<f64>)>,
}

/// Returns the metadata of a configuration.
///
/// # Errors
/// [`Error::Unsupported`] for an option that llama.cpp does not have in this architecture.
pub(super) fn metadata(config: &ModelConfig) -> Result<Metadata> {
    match config {
        ModelConfig::Llama(config) => of_llama(config),
        ModelConfig::Gpt2(config) => of_gpt2(config),
    }
}

impl Metadata {
    fn new(architecture: &'static str) -> Metadata {
        let mut metadata = Metadata {
            architecture,
            values: BTreeMap::new(),
            rope: Vec::new(),
        };
        let name = GgufValue::String(architecture.to_owned());
        metadata
            .values
            .insert("general.architecture".to_owned(), name);
        metadata
    }

    pub(super) fn put(&mut self, name: &str, value: GgufValue) {
        self.values
            .insert(format!("{}.{name}", self.architecture), value);
    }

    /// Sets integers, of which all are sizes or counts.
    pub(super) fn sizes<const N: usize>(&mut self, sizes: [(&str, i64); N]) -> Result<()> {
        for (name, size) in sizes {
            let size = u32::try_from(size).map_err(|_| {
                overdrive_core::Error::option(
                    format!("{}.{name}", self.architecture),
                    size,
                    "a number of 32 bits",
                )
            })?;
            self.put(name, GgufValue::U32(size));
        }
        Ok(())
    }

    pub(super) fn number(&mut self, name: &str, number: f64) {
        self.put(name, GgufValue::F32(number as f32));
    }

    /// Sets which layers have a sliding window.
    pub(super) fn sliding_layers(&mut self, config: &LlamaConfig) {
        let slides = |layer| config.window(layer).is_some();
        let slides = (0..config.num_hidden_layers).map(slides).collect();
        let slides = GgufValue::Array(GgufArray::Bool(slides));
        self.put("attention.sliding_window_pattern", slides);
    }

    /// Returns the error of an option that the architecture does not have.
    pub(super) fn without(
        &self,
        key: &str,
        found: impl std::fmt::Display,
        supported: &str,
    ) -> Error {
        Error::unsupported(
            key,
            found,
            format!(
                "{supported}, in GGUF files of the architecture `{}`",
                self.architecture
            ),
        )
    }

    /// Checks an option against the only value that llama.cpp implements.
    pub(super) fn only(
        &self,
        is_so: bool,
        key: &str,
        found: impl std::fmt::Display,
        supported: &str,
    ) -> Result<()> {
        match is_so {
            true => Ok(()),
            false => Err(self.without(key, found, supported)),
        }
    }
}

fn of_llama(config: &LlamaConfig) -> Result<Metadata> {
    use LlamaFamily as F;
    let family = config.family;
    let mut own = Metadata::new(match family {
        F::Llama | F::Mistral | F::Mixtral => "llama",
        F::Qwen2 => "qwen2",
        F::Qwen3 => "qwen3",
        F::Qwen3Moe => "qwen3moe",
        F::Phi => "phi2",
        F::Phi3 => "phi3",
        F::Gemma => "gemma",
        F::Gemma2 => "gemma2",
        F::Gemma3 => "gemma3",
        F::Gemma4 => "gemma4",
        F::SmolLm3 => "smollm3",
        F::Olmo2 | F::Olmo3 => "olmo2",
        F::Granite => "granite",
        F::Glm4 => "glm4",
        F::Qwen2Moe => "qwen2moe",
        F::Qwen3Next => "qwen3next",
        F::Qwen35 => "qwen35",
        F::Qwen35Moe => "qwen35moe",
        F::GptOss => "gpt-oss",
        F::Ministral3 => "mistral3",
        F::GraniteMoeHybrid
        | F::DeepseekV2
        | F::DeepseekV3
        | F::Gemma3n
        | F::Qwen3Vl
        | F::Qwen3VlMoe => {
            return Err(Error::unsupported(
                "model_type",
                format!("{:?}", family.model_type()),
                "the other families in GGUF files; save this one as a folder",
            ));
        }
    });
    check_llama(&own, config)?;
    let context = config.max_position_embeddings;
    own.sizes([
        ("block_count", config.num_hidden_layers),
        ("context_length", context),
        ("embedding_length", config.hidden_size),
        ("feed_forward_length", config.intermediate_size),
        ("vocab_size", config.vocab_size),
        ("attention.head_count", config.num_attention_heads),
        ("attention.head_count_kv", config.kv_heads()),
        ("attention.key_length", config.head_dim()),
        ("attention.value_length", config.head_dim()),
        ("rope.dimension_count", config.rotary_dim()),
    ])?;
    own.number("rope.freq_base", config.rope_theta);
    own.number(
        match family {
            F::Phi => "attention.layer_norm_epsilon",
            _ => "attention.layer_norm_rms_epsilon",
        },
        config.rms_norm_eps,
    );
    if let Some(experts) = &config.experts {
        own.sizes([
            ("expert_count", experts.num_experts),
            ("expert_used_count", experts.num_experts_per_tok),
        ])?;
        if let Some(shared) = experts.shared_expert_intermediate_size {
            own.sizes([("expert_shared_feed_forward_length", shared)])?;
        }
        let width = match family {
            F::GptOss => config.intermediate_size,
            _ => experts.moe_intermediate_size,
        };
        if family != F::Mixtral {
            own.sizes([("expert_feed_forward_length", width)])?;
        }
    }
    if let (true, Some(window)) = (
        !matches!(
            family,
            F::Qwen2 | F::Qwen3 | F::Qwen2Moe | F::Qwen3Moe | F::SmolLm3
        ) && !family.is_hybrid(),
        config.sliding_window,
    ) {
        own.sizes([("attention.sliding_window", window)])?;
        if family == F::Olmo3 {
            own.sliding_layers(config);
        } else if !family.is_gemma() && family != F::GptOss && window < context {
            tracing::warn!(
                "llama.cpp attends to all tokens where this model attends to the last {window}"
            );
        }
    }
    if let Some(sizes) = &config.delta_net {
        super::delta_net::metadata(&mut own, config, sizes)?;
    }
    if let Some(bound) = config.attention_softcap() {
        own.number("attn_logit_softcapping", bound);
    }
    if let Some(bound) = config.logit_softcap() {
        own.number("final_logit_softcapping", bound);
    }
    if family == F::Granite {
        own.number("embedding_scale", config.embedding_multiplier);
        own.number("attention.scale", config.attention_multiplier);
        own.number("residual_scale", config.residual_multiplier);
        own.number("logit_scale", config.logits_scaling);
    }
    if family == F::Ministral3 {
        own.number("attention.temperature_scale", config.llama_4_scaling_beta);
    }
    if matches!(family, F::Gemma3 | F::Gemma4) {
        own.number("rope.freq_base_swa", config.rope_local_base_freq);
    }
    match &config.per_layer {
        Some(sizes) => super::gemma::metadata(&mut own, config, sizes)?,
        None => super::rope::metadata(&mut own, config)?,
    }
    Ok(own)
}

/// Checks the options that GGUF files have no keys for.
fn check_llama(own: &Metadata, config: &LlamaConfig) -> Result<()> {
    use LlamaFamily as F;
    let family = config.family;
    let activations: &[&str] = match family {
        F::Gemma => &["gelu_pytorch_tanh", "gelu", "gelu_new"],
        F::Gemma2 | F::Gemma3 | F::Gemma4 => &["gelu_pytorch_tanh", "gelu_new"],
        F::Phi => &["gelu_new", "gelu_pytorch_tanh"],
        _ => &["silu", "swish"],
    };
    let activation = config.hidden_act.as_str();
    own.only(
        activations.contains(&activation),
        "hidden_act",
        activation,
        activations[0],
    )?;
    let has_biases = matches!(
        family,
        F::Llama
            | F::Mistral
            | F::Mixtral
            | F::Qwen2
            | F::Qwen2Moe
            | F::Granite
            | F::Glm4
            | F::GptOss
    );
    let biased = config.attention_bias && !has_biases;
    own.only(!biased, "attention_bias", true, "false")?;
    own.only(!config.qk_layernorm, "qk_layernorm", true, "false")?;
    if family.is_phi() || family.is_olmo() || family == F::Qwen2Moe {
        let width = config.hidden_size / config.num_attention_heads;
        own.only(
            config.head_dim() == width,
            "head_dim",
            config.head_dim(),
            &width.to_string(),
        )?;
    }
    if family == F::SmolLm3 {
        let usual = |layer: i64| config.has_second_rotary(layer) == ((layer + 1) % 4 == 0);
        let is_usual = (0..config.num_hidden_layers).all(usual);
        let supported = "every fourth layer without rotary positions";
        own.only(is_usual, "no_rope_layers", "another pattern", supported)?;
        own.only(!config.mlp_bias, "mlp_bias", true, "false")?;
    }
    if matches!(
        family,
        F::Qwen2 | F::Qwen3 | F::Qwen2Moe | F::Qwen3Moe | F::SmolLm3
    ) {
        let slides = (0..config.num_hidden_layers).any(|layer| config.window(layer).is_some());
        own.only(!slides, "use_sliding_window", true, "false")?;
    }
    if let Some(experts) = &config.experts {
        let (alpha, limit) = (experts.swiglu_alpha, experts.swiglu_limit);
        own.only(alpha == 1.702, "swiglu_alpha", alpha, "1.702")?;
        own.only(limit == 7.0, "swiglu_limit", limit, "7")?;
        let (divides, usual) = (experts.norm_topk_prob, family != F::Qwen2Moe);
        own.only(
            divides == usual,
            "norm_topk_prob",
            divides,
            &usual.to_string(),
        )?;
        let all = (0..config.num_hidden_layers).all(|layer| experts.is_sparse(layer));
        own.only(
            all,
            "decoder_sparse_step",
            "a model with some layers without experts",
            "experts in every layer",
        )?;
    }
    if family.is_olmo() || matches!(family, F::Qwen2Moe | F::GptOss) {
        let tied = config.tie_word_embeddings;
        own.only(!tied, "tie_word_embeddings", true, "false")?;
    }
    if family == F::GptOss {
        own.only(config.attention_bias, "attention_bias", false, "true")?;
        has_usual_windows(own, config, 2)?;
    }
    if family == F::Olmo3 {
        has_usual_windows(own, config, 4)?;
        let (local, all) = (config.rope_local_base_freq, config.rope_theta);
        let key = "rope_parameters.sliding_attention.rope_theta";
        own.only(local == all, key, local, &all.to_string())?;
    }
    if family.is_gemma() && !matches!(family, F::Gemma3 | F::Gemma4) {
        own.only(
            config.tie_word_embeddings,
            "tie_word_embeddings",
            false,
            "true",
        )?;
    }
    if family.is_later_gemma() {
        let largest = LARGEST_GEMMAS.contains(&(family, config.num_hidden_layers));
        let expected = match largest {
            true => config.hidden_size as f64 / config.num_attention_heads as f64,
            false => config.head_dim() as f64,
        };
        let found = config.query_pre_attn_scalar;
        own.only(
            found == expected,
            "query_pre_attn_scalar",
            found,
            &expected.to_string(),
        )?;
        has_usual_windows(own, config, if family == F::Gemma2 { 2 } else { 6 })?;
    }
    if family == F::Gemma2 {
        let has_bounds = config.attention_softcap().is_some() && config.logit_softcap().is_some();
        own.only(
            has_bounds,
            "attn_logit_softcapping, final_logit_softcapping",
            "null",
            "two numbers",
        )?;
    }
    Ok(())
}

/// Checks that all layers but each `every`-th one have a window, and rotary positions that are not scaled.
fn has_usual_windows(own: &Metadata, config: &LlamaConfig, every: i64) -> Result<()> {
    let usual = |layer: i64| config.window(layer).is_some() == ((layer + 1) % every != 0);
    let is_usual = (0..config.num_hidden_layers).all(usual);
    let supported = format!("a window in all layers but every {every}th");
    own.only(is_usual, "layer_types", "another pattern", &supported)?;
    own.only(
        config.rope_local_scaling == RopeScaling::Default,
        "rope_parameters.sliding_attention",
        "scaled",
        "not scaled",
    )
}

fn of_gpt2(config: &Gpt2Config) -> Result<Metadata> {
    let mut own = Metadata::new("gpt2");
    let activation = config.activation_function.as_str();
    let is_gelu = ["gelu_new", "gelu_pytorch_tanh"].contains(&activation);
    own.only(is_gelu, "activation_function", activation, "gelu_new")?;
    own.only(
        config.scale_attn_weights,
        "scale_attn_weights",
        false,
        "true",
    )?;
    own.only(
        !config.scale_attn_by_inverse_layer_idx,
        "scale_attn_by_inverse_layer_idx",
        true,
        "false",
    )?;
    own.sizes([
        ("block_count", config.n_layer),
        ("context_length", config.n_positions),
        ("embedding_length", config.n_embd),
        ("feed_forward_length", config.inner()),
        ("vocab_size", config.vocab_size),
        ("attention.head_count", config.n_head),
    ])?;
    own.number("attention.layer_norm_epsilon", config.layer_norm_epsilon);
    Ok(own)
}
