//! The backbone of all encoders. The differences between the families (norms before or after, gates, windows,
//! positions) are fields of one implementation.

use overdrive_checkpointing::Shared;
use overdrive_fused::{Activation, Layout, RotaryOptions, glu, rotary};
use overdrive_nn::{Embedding, Linear};
use tch::Tensor;

use super::config::EncoderConfig;
use super::input::Rows;
use super::parameters::qkv_names;
use crate::activation_names::activation_named;
use crate::attend::{AttendOptions, attend};
use crate::block_groups::run_blocks;
use crate::config::LayerType;
use crate::gpt2::dropped;
use crate::input::ForwardInput;
use crate::layer_norm::LayerNorm;
use crate::mask::Mask;
use crate::parameters::ParameterMap;
use crate::projections::{
    JointLinear, LinearVisitor, ParameterVisitor, visit_linear, visit_shared,
};
use crate::rope::{Rotary, Rotation};
use crate::{Execution, Result, RopeScaling};

/// An encoder without a head.
#[derive(Debug)]
pub(super) struct Backbone {
    pub(super) embedding: Embedding,
    /// The learned tables beside the embedding, by their names, in the order in which they are added.
    token_types: Option<Tensor>,
    positions: Option<Tensor>,
    embedding_norm: LayerNorm,
    blocks: Vec<Shared<Block>>,
    final_norm: Option<LayerNorm>,
    /// The rotary positions of full and of sliding layers.
    rotary: Option<[Rotary; 2]>,
    config: EncoderConfig,
    prefix: &'static str,
}

#[derive(Debug)]
struct Block {
    /// The norms before attention and the feed-forward block.
    before: [Option<LayerNorm>; 2],
    /// The norms after the sums with the residual stream.
    after: [Option<LayerNorm>; 2],
    qkv: JointLinear,
    attention_output: Linear,
    mlp_input: Linear,
    mlp_output: Linear,
    activation: Activation,
    /// If `true`, the first half of the inner values is activated and multiplies the other one.
    gated: bool,
    layer_type: LayerType,
    /// The names of `before` and `after`.
    norm_names: [&'static str; 2],
}

/// The dropouts of a forward pass; zeros outside of training.
#[derive(Debug, Clone, Copy, Default)]
struct Dropouts {
    embedding: f64,
    attention: f64,
    attention_output: f64,
    inner: f64,
    output: f64,
}

impl Dropouts {
    fn of(config: &EncoderConfig, training: bool) -> Dropouts {
        match (training, config.is_modern()) {
            (false, _) => Dropouts::default(),
            (true, true) => Dropouts {
                embedding: config.embedding_dropout,
                attention: config.attention_dropout,
                attention_output: config.attention_dropout,
                inner: config.mlp_dropout,
                output: 0.0,
            },
            (true, false) => Dropouts {
                embedding: config.hidden_dropout,
                attention: config.attention_dropout,
                attention_output: config.hidden_dropout,
                inner: 0.0,
                output: config.hidden_dropout,
            },
        }
    }
}

/// The values that all blocks of a forward pass share.
struct Context {
    heads: i64,
    /// The masks of full and of sliding layers.
    masks: [Mask; 2],
    /// The rotations of full and of sliding layers.
    rotations: Option<[Rotation; 2]>,
    dropouts: Dropouts,
    execution: Execution,
}

impl Backbone {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        config: &EncoderConfig,
        prefix: &'static str,
    ) -> Result<Backbone> {
        let (eps, modern) = (config.layer_norm_eps, config.is_modern());
        let at = |name: &str| format!("{prefix}{name}");
        let (words, norm) = match modern {
            true => ("embeddings.tok_embeddings", "embeddings.norm"),
            false => ("embeddings.word_embeddings", "embeddings.LayerNorm"),
        };
        let embedding = parameters.take_embedding(&at(words))?;
        let mut table = |name: &str| match modern {
            true => Ok(None),
            false => parameters
                .take(&at(&format!("embeddings.{name}.weight")))
                .map(Some),
        };
        let token_types = table("token_type_embeddings")?;
        let positions = table("position_embeddings")?;
        let rotary = |theta: f64| {
            let context = config.max_position_embeddings;
            Rotary::new(config.head_dim(), theta, &RopeScaling::Default, context)
        };
        let rotary = match modern {
            true => Some([
                rotary(config.global_rope_theta)?,
                rotary(config.local_rope_theta)?,
            ]),
            false => None,
        };
        Ok(Backbone {
            embedding,
            token_types,
            positions,
            embedding_norm: LayerNorm::take(parameters, &at(norm), config.norm_bias, eps)?,
            blocks: (0..config.num_hidden_layers)
                .map(|layer| Block::take(parameters, layer, config, prefix).map(Shared::new))
                .collect::<Result<_>>()?,
            final_norm: match modern {
                true => {
                    let name = at("final_norm");
                    Some(LayerNorm::take(parameters, &name, config.norm_bias, eps)?)
                }
                false => None,
            },
            rotary,
            config: config.clone(),
            prefix,
        })
    }

    /// Computes the hidden states of `rows`, `(B, T, C)` or `(1, N, C)`.
    pub(super) fn forward(
        &self,
        rows: &Rows,
        execution: &Execution,
        training: bool,
    ) -> Result<Tensor> {
        let context = Context {
            heads: self.config.num_attention_heads,
            masks: self.masks(rows),
            rotations: self.rotations(rows)?,
            dropouts: Dropouts::of(&self.config, training),
            execution: execution.clone(),
        };
        let embedded = self.embedding_norm.forward(&self.embed(rows)?)?;
        let x = dropped(embedded, context.dropouts.embedding)?;
        let cache = None;
        let x = run_blocks(
            &self.blocks,
            x,
            context,
            execution,
            cache,
            |block, x, context, _| block.forward(x, context),
        )?;
        match &self.final_norm {
            Some(norm) => norm.forward(&x),
            None => Ok(x),
        }
    }

    /// Returns the sum of the embeddings of tokens, types and positions.
    fn embed(&self, rows: &Rows) -> Result<Tensor> {
        let pad = self.config.pad_token_id.unwrap_or(-1);
        let mut x = match self.embedding.dense_table() {
            // The vector of padding gets no gradient from here, as in transformers.
            Some(table) => Tensor::f_embedding(table, &rows.input_ids, pad, false, false)?,
            None => self.embedding.forward(&rows.input_ids)?,
        };
        if let Some(table) = &self.token_types {
            x = x.f_add(&match &rows.token_type_ids {
                Some(types) => Tensor::f_embedding(table, types, -1, false, false)?,
                None => table.f_select(0, 0)?,
            })?;
        }
        if let Some(table) = &self.positions {
            // RoBERTa's positions have a padding, too: the position before the first.
            let pad = self.config.first_position() - 1;
            x = x.f_add(&Tensor::f_embedding(
                table,
                &rows.positions,
                pad,
                false,
                false,
            )?)?;
        }
        Ok(x)
    }

    fn masks(&self, rows: &Rows) -> [Mask; 2] {
        // `local_attention` counts both sides.
        let windows = [None, Some(self.config.local_attention / 2)];
        let tokens = rows.input_ids.size()[1];
        windows.map(|window| Mask::bidirectional(rows.sequences(), tokens, window))
    }

    fn rotations(&self, rows: &Rows) -> Result<Option<[Rotation; 2]>> {
        let Some([full, sliding]) = &self.rotary else {
            return Ok(None);
        };
        let kind = self.embedding.kind();
        let input = ForwardInput::new(&rows.input_ids)
            .with_position_ids(&rows.positions)
            .with_position_bound(rows.position_end);
        let shape = input.shape()?;
        Ok(Some([
            full.rotation(&input, shape, kind)?,
            sliding.rotation(&input, shape, kind)?,
        ]))
    }

    /// Lends each linear layer of the blocks.
    pub(super) fn for_each_linear(&self, see: &mut dyn FnMut(&Linear)) {
        for block in &self.blocks {
            block.with(|block| {
                block.qkv.layers().for_each(&mut *see);
                [&block.attention_output, &block.mlp_input, &block.mlp_output]
                    .into_iter()
                    .for_each(&mut *see);
            });
        }
    }

    /// Lends each linear layer of the blocks with its name, to change it.
    pub(super) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        visit_shared(&mut self.blocks, |block| {
            block.qkv.visit(visit)?;
            visit_linear(&mut block.attention_output, visit)?;
            visit_linear(&mut block.mlp_input, visit)?;
            visit_linear(&mut block.mlp_output, visit)
        })
    }

    /// Lends the parameters that are not of a linear layer.
    pub(super) fn visit_parameters(
        &mut self,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        let (prefix, modern) = (self.prefix, self.config.is_modern());
        let at = |name: &str| format!("{prefix}{name}");
        let (words, norm, blocks) = match modern {
            true => ("embeddings.tok_embeddings", "embeddings.norm", "layers"),
            false => (
                "embeddings.word_embeddings",
                "embeddings.LayerNorm",
                "encoder.layer",
            ),
        };
        if let Some(table) = self.embedding.dense_table_mut() {
            visit(&at(&format!("{words}.weight")), table)?;
        }
        for (name, table) in [
            ("token_type_embeddings", &mut self.token_types),
            ("position_embeddings", &mut self.positions),
        ] {
            if let Some(table) = table {
                visit(&at(&format!("embeddings.{name}.weight")), table)?;
            }
        }
        self.embedding_norm.visit_parameters(&at(norm), visit)?;
        let mut layer = 0;
        visit_shared(&mut self.blocks, |block| {
            let names = block.norm_names;
            for norms in [&mut block.before, &mut block.after] {
                for (norm, name) in norms.iter_mut().zip(names) {
                    if let Some(norm) = norm {
                        norm.visit_parameters(&at(&format!("{blocks}.{layer}.{name}")), visit)?;
                    }
                }
            }
            layer += 1;
            Ok(())
        })?;
        match &mut self.final_norm {
            Some(norm) => norm.visit_parameters(&at("final_norm"), visit),
            None => Ok(()),
        }
    }
}

impl Block {
    fn take(
        parameters: &mut ParameterMap,
        layer: i64,
        config: &EncoderConfig,
        prefix: &str,
    ) -> Result<Block> {
        let modern = config.is_modern();
        let (norm_names, linears, path) = match modern {
            true => (
                ["attn_norm", "mlp_norm"],
                ["attn.Wo", "mlp.Wi", "mlp.Wo"],
                format!("{prefix}layers.{layer}"),
            ),
            false => (
                ["attention.output.LayerNorm", "output.LayerNorm"],
                [
                    "attention.output.dense",
                    "intermediate.dense",
                    "output.dense",
                ],
                format!("{prefix}encoder.layer.{layer}"),
            ),
        };
        let qkv = qkv_names(config, prefix, layer);
        let qkv = JointLinear::take(parameters, &qkv, config.attention_bias)?;
        let mut linear = |index: usize, bias| {
            parameters.take_linear(&format!("{path}.{}", linears[index]), bias)
        };
        let attention_output = linear(0, config.attention_bias)?;
        let (mlp_input, mlp_output) = (linear(1, config.mlp_bias)?, linear(2, config.mlp_bias)?);
        let mut norm = |index: usize| {
            let name = format!("{path}.{}", norm_names[index]);
            let eps = config.layer_norm_eps;
            LayerNorm::take(parameters, &name, config.norm_bias, eps).map(Some)
        };
        let (before, after) = match modern {
            // The embeddings are normalised right before the first block.
            true if layer == 0 => ([None, norm(1)?], [None, None]),
            true => ([norm(0)?, norm(1)?], [None, None]),
            false => ([None, None], [norm(0)?, norm(1)?]),
        };
        Ok(Block {
            before,
            after,
            qkv,
            attention_output,
            mlp_input,
            mlp_output,
            activation: activation_named("hidden_act", &config.hidden_act)?,
            gated: modern,
            layer_type: config.layer_type(layer),
            norm_names,
        })
    }

    fn forward(&self, x: &Tensor, context: &Context) -> Result<Tensor> {
        let dropouts = context.dropouts;
        let mixed = self.attend(&normalised(&self.before[0], x)?, context)?;
        let x = x.f_add(&dropped(mixed, dropouts.attention_output)?)?;
        let x = normalised(&self.after[0], &x)?;
        let fed = self.feed(&normalised(&self.before[1], &x)?, context)?;
        let x = x.f_add(&dropped(fed, dropouts.output)?)?;
        normalised(&self.after[1], &x)
    }

    fn attend(&self, x: &Tensor, context: &Context) -> Result<Tensor> {
        let fused = context.execution.fused_kernels;
        // The configuration's check refuses linear layers.
        let kind = usize::from(self.layer_type == LayerType::Sliding);
        let width = self.qkv.outputs() as i64 / 3;
        let [query, key, value] = self.qkv.split(x, [width; 3], fused)?;
        // (B, T, H, D)
        let heads = |part: &Tensor| part.f_unflatten(-1, [context.heads, -1]);
        let (mut query, mut key, value) = (heads(&query)?, heads(&key)?, heads(&value)?);
        if let Some(rotations) = &context.rotations {
            let rotation = &rotations[kind];
            (query, key) = match fused {
                true => {
                    let options = RotaryOptions {
                        layout: Layout::Bthd,
                        ..RotaryOptions::default()
                    };
                    rotary(&query, &key, &rotation.cos, &rotation.sin, &options)?
                }
                false => (rotation.apply(&query)?, rotation.apply(&key)?),
            };
        }
        let by_head = |part: &Tensor| part.f_transpose(1, 2);
        let (query, key, value) = (by_head(&query)?, by_head(&key)?, by_head(&value)?);
        let options = AttendOptions::plain(context.execution.attention, context.dropouts.attention);
        let mixed = attend(&query, &key, &value, &context.masks[kind], &options)?;
        Ok(self.attention_output.forward_with(&mixed, fused)?)
    }

    fn feed(&self, x: &Tensor, context: &Context) -> Result<Tensor> {
        let fused = context.execution.fused_kernels;
        let inner = self.mlp_input.forward_with(x, fused)?;
        let inner = match (self.gated, fused) {
            (false, _) => self.activation.apply(&inner)?,
            (true, true) => glu(&inner, self.activation)?,
            (true, false) => {
                let halves = inner.f_chunk(2, -1)?;
                self.activation.apply(&halves[0])?.f_mul(&halves[1])?
            }
        };
        let inner = dropped(inner, context.dropouts.inner)?;
        Ok(self.mlp_output.forward_with(&inner, fused)?)
    }
}

/// Applies the norm if there is one.
fn normalised(norm: &Option<LayerNorm>, x: &Tensor) -> Result<Tensor> {
    match norm {
        Some(norm) => norm.forward(x),
        None => Ok(x.shallow_clone()),
    }
}
