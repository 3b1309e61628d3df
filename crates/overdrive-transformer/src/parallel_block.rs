//! The layers of Phi-1, 1.5 and 2: attention and the feed-forward block share one norm and run in parallel.

use overdrive_fused::Activation;
use overdrive_nn::Linear;
use tch::Tensor;

use crate::activation_names::activation_named;
use crate::attention::{AttentionStep, RotaryAttention};
use crate::gpt2::dropped;
use crate::layer_norm::LayerNorm;
use crate::parameters::{ParameterMap, ParameterRole, ParameterSpec};
use crate::projections::{LinearVisitor, ParameterVisitor, visit_linear};
use crate::{Init, LlamaConfig, Result};

/// A layer with attention and a feed-forward block of the same input.
#[derive(Debug)]
pub(crate) struct ParallelBlock {
    norm: LayerNorm,
    attention: RotaryAttention,
    inner: Linear,
    output: Linear,
    activation: Activation,
}

/// Returns the parameters of a Phi-2 in the order of transformers' `named_parameters`.
pub(crate) fn parameters(config: &LlamaConfig) -> Vec<ParameterSpec> {
    let (hidden, inner) = (config.hidden_size, config.intermediate_size);
    let head = config.head_dim();
    let (queries, keys) = (config.num_attention_heads * head, config.kv_heads() * head);
    let normal = Init::Normal {
        std: config.initializer_range,
    };
    use ParameterRole::{Embedding, Head, Linear, Other};
    let table = [config.vocab_size, hidden];
    let mut all = vec![ParameterSpec::new(
        "model.embed_tokens.weight".to_owned(),
        &table,
        normal,
        Embedding,
    )];
    let mut pair = |name: String, weight: &[i64], init, role| {
        all.push(ParameterSpec::new(
            format!("{name}.weight"),
            weight,
            init,
            role,
        ));
        let bias = format!("{name}.bias");
        all.push(ParameterSpec::new(bias, &weight[..1], Init::Zeros, Other));
    };
    for layer in 0..config.num_hidden_layers {
        let name = |part: &str| format!("model.layers.{layer}.{part}");
        for (part, shape) in [
            ("self_attn.q_proj", [queries, hidden]),
            ("self_attn.k_proj", [keys, hidden]),
            ("self_attn.v_proj", [keys, hidden]),
            ("self_attn.dense", [hidden, queries]),
        ] {
            pair(name(part), &shape, normal, Linear);
        }
        if config.qk_norm() {
            pair(name("self_attn.q_layernorm"), &[head], Init::Ones, Other);
            pair(name("self_attn.k_layernorm"), &[head], Init::Ones, Other);
        }
        pair(name("mlp.fc1"), &[inner, hidden], normal, Linear);
        pair(name("mlp.fc2"), &[hidden, inner], normal, Linear);
        pair(name("input_layernorm"), &[hidden], Init::Ones, Other);
    }
    pair(
        "model.final_layernorm".to_owned(),
        &[hidden],
        Init::Ones,
        Other,
    );
    pair("lm_head".to_owned(), &table, normal, Head);
    // A tied head has a bias of its own.
    all.retain(|spec| !config.tie_word_embeddings || spec.name != "lm_head.weight");
    all
}

impl ParallelBlock {
    pub(crate) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
    ) -> Result<ParallelBlock> {
        let norm = format!("{prefix}.input_layernorm");
        Ok(ParallelBlock {
            norm: LayerNorm::take(parameters, &norm, true, config.rms_norm_eps)?,
            attention: RotaryAttention::take(parameters, prefix, config)?,
            inner: parameters.take_linear(&format!("{prefix}.mlp.fc1"), true)?,
            output: parameters.take_linear(&format!("{prefix}.mlp.fc2"), true)?,
            activation: activation_named("hidden_act", &config.hidden_act)?,
        })
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.attention.layers().chain([&self.inner, &self.output])
    }

    pub(crate) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        self.attention.visit(visit)?;
        visit_linear(&mut self.inner, visit)?;
        visit_linear(&mut self.output, visit)
    }

    pub(crate) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        self.attention.visit_parameters(prefix, visit)?;
        self.norm
            .visit_parameters(&format!("{prefix}.input_layernorm"), visit)
    }

    /// Returns the layer's addition to the residual stream `x`.
    pub(crate) fn forward(&self, x: &Tensor, step: AttentionStep<'_, '_>) -> Result<Tensor> {
        let (fused, dropout) = (step.execution.fused_kernels, step.residual_dropout);
        let normalised = self.norm.forward(x)?;
        let mixed = dropped(self.attention.forward(&normalised, step)?, dropout)?;
        let inner = self.inner.forward_with(&normalised, fused)?;
        let fed = self.activation.apply(&inner)?;
        let fed = dropped(self.output.forward_with(&fed, fused)?, dropout)?;
        Ok(mixed.f_add(&fed)?)
    }
}
