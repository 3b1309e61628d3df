//! The graph of a Llama, Mistral, Qwen, Gemma or SmolLM3 model.

use overdrive_transformer::{CausalLm, LlamaConfig, LlamaFamily};

use crate::attention::{Context, Heads, Layer};
use crate::embedding::embedding;
use crate::graph::{Graph, Value};
use crate::layers::{activate, norm_weight, rms_norm};
use crate::linear::linear;
use crate::model_weights::Source;
use crate::rope::{Frequencies, Rotation, rotation};
use crate::{Attention, Error, ExportOptions, Result};

/// The values of `model_type` that can be exported, for messages.
pub(crate) const EXPORTED: &str =
    "llama, mistral, qwen2, qwen3, gemma, gemma2, gemma3_text, smollm3 and gpt2 can be";

/// Checks that the family can be exported.
fn check_family(config: &LlamaConfig) -> Result<()> {
    match config.family {
        LlamaFamily::Llama
        | LlamaFamily::Mistral
        | LlamaFamily::Qwen2
        | LlamaFamily::Qwen3
        | LlamaFamily::Gemma
        | LlamaFamily::Gemma2
        | LlamaFamily::Gemma3
        | LlamaFamily::SmolLm3 => Ok(()),
        other => Err(Error::unsupported(
            "config key `model_type`",
            format!("{:?}", other.model_type()),
            EXPORTED,
        )),
    }
}

/// The graph of a model that is being built.
struct Builder<'a> {
    graph: &'a mut Graph,
    source: &'a Source,
    options: &'a ExportOptions,
    config: &'a LlamaConfig,
    heads: Heads,
}

/// Writes the decoder and returns its normalized hidden states `(B, T, C)`.
pub(crate) fn hidden_states(
    graph: &mut Graph,
    source: &Source,
    options: &ExportOptions,
    model: &CausalLm,
    config: &LlamaConfig,
) -> Result<Value> {
    check_family(config)?;
    let windows = model.layer_windows();
    let softcap = config.attention_softcap().is_some();
    let heads = Heads::of(model.config());
    let context = Context::new(graph, options, heads, &windows, softcap)?;
    graph.enter("/model/rotary_emb");
    let rotations = rotations(graph, model, config, context.form())?;

    let mut builder = Builder {
        graph,
        source,
        options,
        config,
        heads,
    };
    let mut x = builder.embedded()?;
    for (number, window) in windows.into_iter().enumerate() {
        let rotation = &rotations[usize::from(config.has_second_rotary(number as i64))];
        let Some(rotation) = rotation else {
            continue; // `rotations` has one entry for each kind of layer.
        };
        x = builder.block(number, window, &x, rotation, &context)?;
    }
    builder.graph.enter("/model/norm");
    builder.norm("model.norm", &x)
}

/// Writes the rotations of full and of sliding layers, if the model has such layers.
fn rotations(
    graph: &mut Graph,
    model: &CausalLm,
    config: &LlamaConfig,
    form: Attention,
) -> Result<[Option<Rotation>; 2]> {
    let kinds = [
        (config.rope_theta, &config.rope_scaling),
        (config.rope_local_base_freq, &config.rope_local_scaling),
    ];
    // All layers with the same frequencies share one rotation.
    let mut rotations = [None, None];
    for (kind, (theta, scaling)) in kinds.into_iter().enumerate() {
        let layer = (0..model.num_layers())
            .find(|&layer| usize::from(config.has_second_rotary(layer as i64)) == kind);
        let short = layer.and_then(|layer| model.rotary_inverse_frequencies(layer));
        let Some(short) = short else {
            continue;
        };
        let frequencies = Frequencies {
            short,
            scaling,
            theta,
            context: config.max_position_embeddings,
        };
        rotations[kind] = Some(rotation(graph, &frequencies, form)?);
    }
    Ok(rotations)
}

impl Builder<'_> {
    fn embedded(&mut self) -> Result<Value> {
        self.graph.enter("/model/embed_tokens");
        let name = "model.embed_tokens";
        let table = self.source.table(name)?;
        let x = embedding(self.graph, name, &table, "input_ids")?;
        let Some(scale) = self.config.embedding_scale() else {
            return Ok(x);
        };
        // Rounded to the dtype of activations, as transformers rounds it to the model's.
        let scale = self.graph.number(scale)?;
        Ok(self.graph.op("Mul", &[&x, &scale], &[]))
    }

    fn norm(&mut self, name: &str, x: &str) -> Result<Value> {
        let name = format!("{name}.weight");
        let weight = self.source.parameter(&name)?;
        let weight = norm_weight(self.graph, &name, weight, self.config.norm_adds_one());
        Ok(rms_norm(self.graph, x, &weight, self.config.rms_norm_eps))
    }

    fn linear(&mut self, name: &str, x: &str) -> Result<Value> {
        linear(self.graph, self.source, self.options, name, x)
    }

    fn enter(&mut self, number: usize, part: &str) -> String {
        self.graph.enter(&format!("/model/layers.{number}/{part}"));
        format!("model.layers.{number}.{part}")
    }

    fn block(
        &mut self,
        number: usize,
        window: Option<i64>,
        x: &str,
        rotation: &Rotation,
        context: &Context,
    ) -> Result<Value> {
        let norm = self.enter(number, "input_layernorm");
        let normal = self.norm(&norm, x)?;
        let mut mixed = self.attend(number, window, &normal, rotation, context)?;
        // Gemma has norms before and after attention and the feed-forward block.
        let before_mlp = format!("model.layers.{number}.pre_feedforward_layernorm");
        let doubled = self.source.has(&format!("{before_mlp}.weight"));
        let after = self.enter(number, "post_attention_layernorm");
        if doubled {
            mixed = self.norm(&after, &mixed)?;
        }
        let x = self.graph.op("Add", &[x, &mixed], &[]);
        let normal = match doubled {
            true => {
                let norm = self.enter(number, "pre_feedforward_layernorm");
                self.norm(&norm, &x)?
            }
            false => self.norm(&after, &x)?,
        };
        let mut fed = self.feed(number, &normal)?;
        if doubled {
            let norm = self.enter(number, "post_feedforward_layernorm");
            fed = self.norm(&norm, &fed)?;
        }
        Ok(self.graph.op("Add", &[&x, &fed], &[]))
    }

    fn attend(
        &mut self,
        number: usize,
        window: Option<i64>,
        x: &str,
        rotation: &Rotation,
        context: &Context,
    ) -> Result<Value> {
        let module = self.enter(number, "self_attn");
        let heads = self.heads;
        let scale = self.config.attention_scale();
        let layer = Layer {
            number,
            heads,
            scale: scale.unwrap_or((heads.dim as f64).sqrt().recip()),
            softcap: self.config.attention_softcap(),
            window,
        };
        let [query, key, value] = ["q", "k", "v"].map(|part| format!("{module}.{part}_proj"));
        let (query, key) = (self.linear(&query, x)?, self.linear(&key, x)?);
        let value = self.linear(&value, x)?;
        let query = self.normalised(&module, "q_norm", &query, heads)?;
        let key = self.normalised(&module, "k_norm", &key, heads)?;
        let parts = match context.form() {
            Attention::GroupQuery => [
                rotation.apply_joined(self.graph, &query),
                rotation.apply_joined(self.graph, &key),
                value,
            ],
            _ => {
                let query = self.by_head(&query, heads.dim);
                let key = self.by_head(&key, heads.dim);
                let value = self.by_head(&value, heads.dim);
                [
                    rotation.apply(self.graph, &query),
                    rotation.apply(self.graph, &key),
                    value,
                ]
            }
        };
        let [query, key, value] = &parts;
        let mixed = context.attend(self.graph, layer, [query, key, value])?;
        self.linear(&format!("{module}.o_proj"), &mixed)
    }

    /// Splits heads, `(B, T, H·D)` to `(B, H, T, D)`.
    fn by_head(&mut self, x: &str, dim: i64) -> Value {
        let apart = self.graph.reshape(x, &[0, 0, -1, dim]);
        self.graph.transpose(&apart, &[0, 2, 1, 3])
    }

    /// Normalises each head, if the model has such norms.
    fn normalised(&mut self, module: &str, norm: &str, x: &str, heads: Heads) -> Result<Value> {
        let name = format!("{module}.{norm}");
        if !self.source.has(&format!("{name}.weight")) {
            return Ok(x.to_owned());
        }
        let apart = self.graph.reshape(x, &[0, 0, -1, heads.dim]);
        let normal = self.norm(&name, &apart)?;
        let width = match norm {
            "q_norm" => heads.queries * heads.dim,
            _ => heads.keys * heads.dim,
        };
        Ok(self.graph.reshape(&normal, &[0, 0, width]))
    }

    fn feed(&mut self, number: usize, x: &str) -> Result<Value> {
        let module = self.enter(number, "mlp");
        let gate = self.linear(&format!("{module}.gate_proj"), x)?;
        let up = self.linear(&format!("{module}.up_proj"), x)?;
        let key = match self.config.family.is_gemma() {
            true => "hidden_activation",
            false => "hidden_act",
        };
        let gate = activate(self.graph, key, &self.config.hidden_act, &gate)?;
        let inner = self.graph.op("Mul", &[&gate, &up], &[]);
        self.linear(&format!("{module}.down_proj"), &inner)
    }
}
