use overdrive_checkpointing::Shared;
use overdrive_fused::Activation;
use overdrive_nn::{Embedding, Linear};
use tch::Tensor;

use crate::activation_names::activation_named;
use crate::attend::{AttendOptions, CachedLayer, attend_with_cache};
use crate::block_groups::run_blocks;
use crate::input::{ForwardInput, Shape};
use crate::layer_norm::LayerNorm;
use crate::mask::Mask;
use crate::parameters::{ParameterMap, ParameterRole, ParameterSpec};
use crate::projections::{LinearVisitor, ParameterVisitor, visit_linear, visit_shared};
use crate::{AttentionImplementation, Execution, Gpt2Config, Init, Result};

/// GPT-2 without its head.
#[derive(Debug)]
pub(crate) struct Gpt2 {
    pub(crate) embedding: Embedding,
    positions: Tensor,
    blocks: Vec<Shared<Block>>,
    norm: LayerNorm,
    config: Gpt2Config,
}

#[derive(Debug)]
struct Block {
    attention_norm: LayerNorm,
    qkv: Linear,
    attention_output: Linear,
    mlp_norm: LayerNorm,
    mlp_input: Linear,
    mlp_output: Linear,
    activation: Activation,
    /// The factor of the scores; `None` is 1/sqrt(D).
    scale: Option<f64>,
}

/// Returns the parameters of a GPT-2 in the order of transformers' `named_parameters`.
pub(crate) fn parameters(config: &Gpt2Config) -> Vec<ParameterSpec> {
    let (hidden, inner) = (config.n_embd, config.inner());
    let normal = Init::Normal {
        std: config.initializer_range,
    };
    // Two projections of a block add to the residual stream; the paper scales their initial values by the
    // depth, so that the stream's variance does not grow with it.
    let residual = Init::Normal {
        std: config.initializer_range / (2.0 * config.n_layer as f64).sqrt(),
    };
    let mut all = Vec::new();
    let mut add = |name: String, shape: &[i64], init, role| {
        all.push(ParameterSpec::new(name, shape, init, role));
    };
    use ParameterRole::{Conv1d, Embedding, Head, Other};
    add(
        "transformer.wte.weight".to_owned(),
        &[config.vocab_size, hidden],
        normal,
        Embedding,
    );
    add(
        "transformer.wpe.weight".to_owned(),
        &[config.n_positions, hidden],
        normal,
        Other,
    );
    let mut pair = |name: &str, weight: &[i64], init| {
        let role = if weight.len() == 2 { Conv1d } else { Other };
        add(format!("transformer.{name}.weight"), weight, init, role);
        add(
            format!("transformer.{name}.bias"),
            &weight[weight.len() - 1..],
            Init::Zeros,
            Other,
        );
    };
    for layer in 0..config.n_layer {
        pair(&format!("h.{layer}.ln_1"), &[hidden], Init::Ones);
        pair(
            &format!("h.{layer}.attn.c_attn"),
            &[hidden, 3 * hidden],
            normal,
        );
        pair(
            &format!("h.{layer}.attn.c_proj"),
            &[hidden, hidden],
            residual,
        );
        pair(&format!("h.{layer}.ln_2"), &[hidden], Init::Ones);
        pair(&format!("h.{layer}.mlp.c_fc"), &[hidden, inner], normal);
        pair(&format!("h.{layer}.mlp.c_proj"), &[inner, hidden], residual);
    }
    pair("ln_f", &[hidden], Init::Ones);
    if !config.tie_word_embeddings {
        add(
            "lm_head.weight".to_owned(),
            &[config.vocab_size, hidden],
            normal,
            Head,
        );
    }
    all
}

impl Gpt2 {
    pub(crate) fn take(parameters: &mut ParameterMap, config: &Gpt2Config) -> Result<Gpt2> {
        let embedding = parameters.take_embedding("transformer.wte")?;
        let positions = parameters.take("transformer.wpe.weight")?;
        let blocks = (0..config.n_layer)
            .map(|layer| Block::take(parameters, layer, config).map(Shared::new))
            .collect::<Result<_>>()?;
        let norm = LayerNorm::take(
            parameters,
            "transformer.ln_f",
            true,
            config.layer_norm_epsilon,
        )?;
        Ok(Gpt2 {
            embedding,
            positions,
            blocks,
            norm,
            config: config.clone(),
        })
    }

    /// Computes the normalised hidden states `(B, T, C)`.
    pub(crate) fn forward(
        &self,
        input: &mut ForwardInput<'_>,
        shape: Shape,
        execution: &Execution,
        training: bool,
    ) -> Result<Tensor> {
        let dropout = |p: f64| if training { p } else { 0.0 };
        // Consecutive positions are a view of the table; given ones are looked up.
        let positions = match input.position_ids {
            None => self
                .positions
                .f_narrow(0, shape.past, shape.tokens)?
                .f_unsqueeze(0)?,
            Some(ids) => Tensor::f_embedding(&self.positions, ids, -1, false, false)?,
        };
        let context = Context {
            heads: self.config.n_head,
            mask: Mask::causal(input, shape, None)?,
            implementation: execution.attention,
            attention_dropout: dropout(self.config.attn_pdrop),
            residual_dropout: dropout(self.config.resid_pdrop),
        };
        let tokens = self.embedding.forward(input.input_ids)?;
        let x = dropped(tokens.f_add(&positions)?, dropout(self.config.embd_pdrop))?;
        let cache = input.cache.as_deref_mut();
        let x = run_blocks(&self.blocks, x, context, execution, cache, Block::forward)?;
        // Selected before the norm, which is then computed for the wanted positions only.
        self.norm.forward(&input.logits.select(&x)?)
    }

    /// Lends each linear layer of the blocks.
    pub(crate) fn for_each_linear(&self, see: &mut dyn FnMut(&Linear)) {
        for block in &self.blocks {
            block.with(|block| {
                let layers = [
                    &block.qkv,
                    &block.attention_output,
                    &block.mlp_input,
                    &block.mlp_output,
                ];
                layers.into_iter().for_each(&mut *see);
            });
        }
    }

    /// Lends each linear layer of the blocks with its name, to change it.
    pub(crate) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        visit_shared(&mut self.blocks, |block| {
            visit_linear(&mut block.qkv, visit)?;
            visit_linear(&mut block.attention_output, visit)?;
            visit_linear(&mut block.mlp_input, visit)?;
            visit_linear(&mut block.mlp_output, visit)
        })
    }

    /// Lends the parameters that are not of a linear layer.
    pub(crate) fn visit_parameters(
        &mut self,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        if let Some(table) = self.embedding.dense_table_mut() {
            visit("transformer.wte.weight", table)?;
        }
        visit("transformer.wpe.weight", &mut self.positions)?;
        let mut layer = 0;
        visit_shared(&mut self.blocks, |block| {
            let prefix = format!("transformer.h.{layer}");
            layer += 1;
            let norms = [&mut block.attention_norm, &mut block.mlp_norm];
            for (norm, name) in norms.into_iter().zip(["ln_1", "ln_2"]) {
                norm.visit_parameters(&format!("{prefix}.{name}"), visit)?;
            }
            Ok(())
        })?;
        self.norm.visit_parameters("transformer.ln_f", visit)
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.blocks.len()
    }
}

/// The values that all blocks of a forward pass share.
struct Context {
    heads: i64,
    mask: Mask,
    implementation: AttentionImplementation,
    attention_dropout: f64,
    residual_dropout: f64,
}

pub(crate) fn dropped(x: Tensor, p: f64) -> Result<Tensor> {
    Ok(if p > 0.0 { x.f_dropout(p, true)? } else { x })
}

impl Block {
    fn take(parameters: &mut ParameterMap, layer: i64, config: &Gpt2Config) -> Result<Block> {
        let prefix = format!("transformer.h.{layer}");
        let eps = config.layer_norm_epsilon;
        let head_dim = (config.n_embd / config.n_head) as f64;
        let base = if config.scale_attn_weights {
            head_dim.powf(-0.5)
        } else {
            1.0
        };
        let depth = if config.scale_attn_by_inverse_layer_idx {
            (layer + 1) as f64
        } else {
            1.0
        };
        let default_scale = config.scale_attn_weights && !config.scale_attn_by_inverse_layer_idx;
        Ok(Block {
            attention_norm: LayerNorm::take(parameters, &format!("{prefix}.ln_1"), true, eps)?,
            qkv: parameters.take_conv1d(&format!("{prefix}.attn.c_attn"), true)?,
            attention_output: parameters.take_conv1d(&format!("{prefix}.attn.c_proj"), true)?,
            mlp_norm: LayerNorm::take(parameters, &format!("{prefix}.ln_2"), true, eps)?,
            mlp_input: parameters.take_conv1d(&format!("{prefix}.mlp.c_fc"), true)?,
            mlp_output: parameters.take_conv1d(&format!("{prefix}.mlp.c_proj"), true)?,
            activation: activation_named("activation_function", &config.activation_function)?,
            scale: (!default_scale).then_some(base / depth),
        })
    }

    fn forward(
        &self,
        x: &Tensor,
        context: &Context,
        cache: Option<CachedLayer<'_, '_>>,
    ) -> Result<Tensor> {
        let mixed = self.attend(x, context, cache)?;
        let x = x.f_add(&dropped(mixed, context.residual_dropout)?)?;
        Ok(x.f_add(&dropped(self.feed(&x)?, context.residual_dropout)?)?)
    }

    fn attend(
        &self,
        x: &Tensor,
        context: &Context,
        cache: Option<CachedLayer<'_, '_>>,
    ) -> Result<Tensor> {
        let options = AttendOptions {
            scale: self.scale,
            ..AttendOptions::plain(context.implementation, context.attention_dropout)
        };
        let qkv = self
            .qkv
            .forward_with(&self.attention_norm.forward(x)?, false)?;
        let head_dim = x.size()[2] / context.heads;
        let parts = qkv
            .f_split(x.size()[2], 2)?
            .iter()
            .map(|part| {
                part.f_unflatten(2, [context.heads, head_dim])?
                    .f_transpose(1, 2)
            })
            .collect::<std::result::Result<Vec<_>, _>>()?;
        let [query, key, value] = parts.as_slice() else {
            unreachable!("a width of 3C splits into three parts of C")
        };
        let mixed = attend_with_cache(query, key, value, &context.mask, &options, cache)?;
        Ok(self.attention_output.forward_with(&mixed, false)?)
    }

    fn feed(&self, x: &Tensor) -> Result<Tensor> {
        let normalised = self.mlp_norm.forward(x)?;
        let inner = self.mlp_input.forward_with(&normalised, false)?;
        let activated = self.activation.apply(&inner)?;
        Ok(self.mlp_output.forward_with(&activated, false)?)
    }
}
