//! The graph of a GPT-2.

use overdrive_transformer::{CausalLm, Gpt2Config};

use crate::attention::{Context, Heads, Layer};
use crate::embedding::embedding;
use crate::graph::{Attribute, Graph, Value};
use crate::layers::activate;
use crate::linear::{linear, vector};
use crate::model_weights::Source;
use crate::{Attention, ExportOptions, Result};

/// The graph of a model that is being built.
struct Builder<'a> {
    graph: &'a mut Graph,
    source: &'a Source,
    options: &'a ExportOptions,
    config: &'a Gpt2Config,
    heads: Heads,
}

/// Writes the decoder and returns its normalized hidden states `(B, T, C)`.
pub(crate) fn hidden_states(
    graph: &mut Graph,
    source: &Source,
    options: &ExportOptions,
    model: &CausalLm,
    config: &Gpt2Config,
) -> Result<Value> {
    let windows = model.layer_windows();
    let heads = Heads::of(model.config());
    let context = Context::new(graph, options, heads, &windows, false)?;
    let mut builder = Builder {
        graph,
        source,
        options,
        config,
        heads,
    };
    let mut x = builder.embedded()?;
    for layer in 0..windows.len() {
        x = builder.block(layer, &x, &context)?;
    }
    builder.graph.enter("/transformer/ln_f");
    builder.norm("transformer.ln_f", &x)
}

impl Builder<'_> {
    fn embedded(&mut self) -> Result<Value> {
        self.graph.enter("/transformer/wte");
        let name = "transformer.wte";
        let table = self.source.table(name)?;
        let tokens = embedding(self.graph, name, &table, "input_ids")?;
        self.graph.enter("/transformer/wpe");
        let name = "transformer.wpe.weight";
        let table = vector(self.graph, name, self.source.parameter(name)?);
        let positions = self.graph.op("Gather", &[&table, "position_ids"], &[]);
        Ok(self.graph.op("Add", &[&tokens, &positions], &[]))
    }

    fn norm(&mut self, name: &str, x: &str) -> Result<Value> {
        let [weight, bias] = ["weight", "bias"].map(|part| format!("{name}.{part}"));
        let weight = vector(self.graph, &weight, self.source.parameter(&weight)?);
        let bias = vector(self.graph, &bias, self.source.parameter(&bias)?);
        let attributes = [
            ("axis", Attribute::Int(-1)),
            (
                "epsilon",
                Attribute::Float(self.config.layer_norm_epsilon as f32),
            ),
        ];
        Ok(self
            .graph
            .op("LayerNormalization", &[x, &weight, &bias], &attributes))
    }

    fn linear(&mut self, name: &str, x: &str) -> Result<Value> {
        linear(self.graph, self.source, self.options, name, x)
    }

    fn enter(&mut self, number: usize, part: &str) -> String {
        self.graph.enter(&format!("/transformer/h.{number}/{part}"));
        format!("transformer.h.{number}.{part}")
    }

    fn block(&mut self, number: usize, x: &str, context: &Context) -> Result<Value> {
        let norm = self.enter(number, "ln_1");
        let normal = self.norm(&norm, x)?;
        let mixed = self.attend(number, &normal, context)?;
        let x = self.graph.op("Add", &[x, &mixed], &[]);
        let norm = self.enter(number, "ln_2");
        let normal = self.norm(&norm, &x)?;
        let module = self.enter(number, "mlp");
        let inner = self.linear(&format!("{module}.c_fc"), &normal)?;
        let activation = &self.config.activation_function;
        let inner = activate(self.graph, "activation_function", activation, &inner)?;
        let fed = self.linear(&format!("{module}.c_proj"), &inner)?;
        Ok(self.graph.op("Add", &[&x, &fed], &[]))
    }

    fn attend(&mut self, number: usize, x: &str, context: &Context) -> Result<Value> {
        let module = self.enter(number, "attn");
        let heads = self.heads;
        let layer = Layer {
            number,
            heads,
            scale: self.scale(number, heads.dim),
            softcap: None,
            window: None,
        };
        let qkv = self.linear(&format!("{module}.c_attn"), x)?;
        // `num_outputs` exists from opset 18 on, the lowest that an export takes.
        let thirds = [
            ("axis", Attribute::Int(-1)),
            ("num_outputs", Attribute::Int(3)),
        ];
        let mut parts: [Value; 3] = self.graph.ops("", "Split", &[&qkv], &thirds);
        // `GroupQueryAttention` takes heads side by side.
        if context.form() != Attention::GroupQuery {
            for part in &mut parts {
                let apart = self.graph.reshape(part, &[0, 0, heads.queries, heads.dim]);
                *part = self.graph.transpose(&apart, &[0, 2, 1, 3]);
            }
        }
        let [query, key, value] = &parts;
        let mixed = context.attend(self.graph, layer, [query, key, value])?;
        self.linear(&format!("{module}.c_proj"), &mixed)
    }

    /// Returns the factor of the scores of layer `number`.
    fn scale(&self, number: usize, dim: i64) -> f64 {
        let base = match self.config.scale_attn_weights {
            true => (dim as f64).powf(-0.5),
            false => 1.0,
        };
        match self.config.scale_attn_by_inverse_layer_idx {
            true => base / (number + 1) as f64,
            false => base,
        }
    }
}
