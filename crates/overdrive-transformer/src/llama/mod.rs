use std::cell::RefCell;
use std::ops::Range;

use overdrive_checkpointing::{Shared, checkpoint_with};
use overdrive_fused::Convention;
use overdrive_fused::QkvShape;
use overdrive_fused::rows::RowAngles;
use overdrive_kv_cache::KvCache;
use overdrive_nn::{Embedding, Linear};
use overdrive_sys::threads::with_team;
use tch::Tensor;

use crate::attention::{AttentionStep, RotaryAttention};
use crate::decode_step::{self, DecodeBuffers};
use crate::feed_forward::FeedForward;
use crate::gated_delta_net::GatedDeltaNet;
use crate::gpt2::dropped;
use crate::input::{ForwardInput, Shape};
use crate::mask::Mask;
use crate::moe::{ExpertLoad, LoadBalance};
use crate::norm::Norm;
use crate::parallel_block::ParallelBlock;
use crate::parameters::ParameterMap;
use crate::per_layer::{PerLayerBlock, PerLayerModel};
use crate::projections::{LinearVisitor, ParameterVisitor, visit_shared};
use crate::rope::{Rotary, Rotation};
use crate::rounding::rounded;
use crate::shared_kv::SharedKv;
use crate::{Error, Execution, ImageTokens, LlamaConfig, LlamaFamily, Result};

mod block_norms;
mod layer;
mod parameters;
mod stream;

use block_norms::BlockNorms;
use layer::{Attention, Block, Layer};
pub(crate) use parameters::parameters;
use stream::Stream;

/// A decoder of the Llama family without its head.
#[derive(Debug)]
pub(crate) struct Llama {
    /// The name of the decoder in a checkpoint.
    name: &'static str,
    pub(crate) embedding: Embedding,
    /// The factor of the embeddings (Gemma, Granite).
    embedding_scale: Option<f64>,
    blocks: Vec<Shared<Layer>>,
    /// The modules beside the layers (Gemma 3n and 4).
    pub(crate) per_layer: Option<PerLayerModel>,
    plans: Vec<Plan>,
    norm: Norm,
    rotary: Rotary,
    /// If `true`, a token attends to those after it, too (EmbeddingGemma).
    bidirectional: bool,
    /// The rotary positions of sliding blocks (Gemma 3, OLMo 3), or of blocks without rotary embedding (SmolLM3).
    second_rotary: Option<Rotary>,
    dropout: f64,
    residual_dropout: f64,
    embedding_dropout: f64,
    shape: QkvShape,
    /// If `true`, decoding steps may be computed on slices.
    has_rows: bool,
    /// The buffers of decoding steps. The model's tensors are not `Sync`, so only one thread at a time uses them.
    buffers: RefCell<DecodeBuffers>,
}

/// The window and the rotary frequencies of a block.
#[derive(Debug, Clone, Copy)]
struct Plan {
    window: Option<i64>,
    second_rotary: bool,
}

impl Llama {
    /// Returns the groups of parameters that should lie next to one another: those of layers that one matmul
    /// computes.
    pub(crate) fn adjacent(config: &LlamaConfig) -> Vec<Vec<String>> {
        let mut groups = Vec::new();
        for layer in 0..config.num_hidden_layers {
            let prefix = config.layer_name(layer);
            let qkv = match (config.delta_net_of(layer), &config.mla, &config.per_layer) {
                (Some(sizes), ..) => GatedDeltaNet::joint_names(&prefix, config, sizes),
                (None, None, None) => RotaryAttention::joint_names(&prefix, config),
                _ => Vec::new(),
            };
            let mlp = FeedForward::adjacent(config, layer);
            let mlp = mlp.into_iter().map(|names| (names, config.has_mlp_bias()));
            for (names, bias) in [(qkv, config.qkv_bias())].into_iter().chain(mlp) {
                groups.push(names.iter().map(|name| format!("{name}.weight")).collect());
                if bias {
                    groups.push(names.iter().map(|name| format!("{name}.bias")).collect());
                }
            }
        }
        if let Some(sizes) = &config.per_layer {
            for names in PerLayerModel::adjacent(config, sizes) {
                for end in ["weight", "bias"] {
                    groups.push(names.iter().map(|name| format!("{name}.{end}")).collect());
                }
            }
        }
        groups
    }

    pub(crate) fn take(parameters: &mut ParameterMap, config: &LlamaConfig) -> Result<Llama> {
        let embedding =
            parameters.take_embedding(&format!("{}.embed_tokens", config.backbone_name()))?;
        let embedding_scale = config.embedding_scale();
        // transformers stores Gemma's scale in the model's dtype, and its rounding is part of the model.
        let embedding_scale = match embedding_scale {
            Some(scale) if config.family.is_gemma() => Some(rounded(scale, embedding.kind())?),
            other => other,
        };
        let per_layer = config.per_layer.as_ref();
        let per_layer = per_layer
            .map(|sizes| PerLayerModel::take(parameters, config, sizes, embedding.kind()))
            .transpose()?;
        let block = |layer| {
            let prefix = config.layer_name(layer);
            if config.family == LlamaFamily::Phi {
                let block = ParallelBlock::take(parameters, &prefix, config)?;
                return Ok(Shared::new(Layer::Parallel(block)));
            }
            if let Some(sizes) = &config.per_layer {
                let block = PerLayerBlock::take(parameters, config, sizes, layer)?;
                return Ok(Shared::new(Layer::WithInput(block)));
            }
            Ok(Shared::new(Layer::Serial(Block {
                norms: BlockNorms::take(parameters, &prefix, config)?,
                attention: Attention::take(parameters, layer, config)?,
                mlp: FeedForward::take(parameters, layer, config)?,
                residual_scale: config.residual_scale(),
            })))
        };
        let layers = 0..config.num_hidden_layers;
        let plans: Vec<Plan> = layers
            .clone()
            .map(|layer| Plan {
                window: config.window(layer),
                second_rotary: config.has_second_rotary(layer),
            })
            .collect();
        let rotary = |dim, theta, scaling| {
            let context = config.max_position_embeddings;
            let rotary = Rotary::new(dim, theta, scaling, context)?;
            Ok::<_, Error>(match config.rotates_neighbours() {
                true => rotary.with_convention(Convention::Interleaved),
                false => rotary,
            })
        };
        let second = plans.iter().any(|plan| plan.second_rotary);
        let second = second.then(|| match config.family {
            LlamaFamily::SmolLm3 | LlamaFamily::GraniteMoeHybrid => {
                Ok(Rotary::identity(config.rotary_dim()))
            }
            _ => rotary(
                config.rotary_dim(),
                config.rope_local_base_freq,
                &config.rope_local_scaling,
            ),
        });
        let final_norm = match config.family {
            LlamaFamily::Phi => "model.final_layernorm".to_owned(),
            _ => format!("{}.norm", config.backbone_name()),
        };
        Ok(Llama {
            name: config.backbone_name(),
            embedding,
            embedding_scale,
            bidirectional: config.use_bidirectional_attention,
            plans,
            blocks: layers.map(block).collect::<Result<_>>()?,
            norm: Norm::take(parameters, &final_norm, config)?,
            rotary: rotary(
                config.global_rotary_dim(),
                config.rope_theta,
                &config.rope_scaling,
            )?
            .with_query_scaling(config.query_scaling())
            .with_sections(config.vision.as_ref().map(|vision| vision.mrope_section)),
            second_rotary: second.transpose()?,
            dropout: config.attention_dropout,
            residual_dropout: config.resid_pdrop,
            // Phi-3 has the key, and transformers does not use it.
            embedding_dropout: match config.family {
                LlamaFamily::Phi => config.embd_pdrop,
                _ => 0.0,
            },
            shape: RotaryAttention::shape_of(config),
            has_rows: config.mla.is_none()
                && config.per_layer.is_none()
                && !config.family.is_hybrid(),
            per_layer,
            buffers: RefCell::default(),
        })
    }

    /// Computes the normalised hidden states `(B, T, C)`, and the load of the experts if `balance` wants it.
    pub(crate) fn forward(
        &self,
        input: &mut ForwardInput<'_>,
        shape: Shape,
        execution: &Execution,
        training: bool,
        balance: LoadBalance,
    ) -> Result<(Tensor, Option<ExpertLoad>)> {
        let rotation = |rotary: &Rotary| rotary.rotation(input, shape, self.embedding.kind());
        let mut x = self.embedding.forward(input.input_ids)?;
        if let Some(scale) = self.embedding_scale {
            x = x.f_mul_scalar(scale)?;
        }
        if let Some(images) = input.images {
            x = images.embed(&x)?;
        }
        let fused = execution.fused_kernels;
        let mut layer_inputs = None;
        if let Some(model) = &self.per_layer {
            layer_inputs = model.inputs(input.input_ids, &x, fused)?;
            x = model.streams_of(x, fused)?;
        }
        // Rotations and masks are computed once for all layers.
        let context = Context {
            rotation: rotation(&self.rotary)?,
            second_rotation: self.second_rotary.as_ref().map(rotation).transpose()?,
            masks: self.masks(input, shape)?,
            dropout: if training { self.dropout } else { 0.0 },
            residual_dropout: if training { self.residual_dropout } else { 0.0 },
            execution: execution.clone(),
            balance,
            layer_inputs,
            images: input.images.map(ImageTokens::share),
        };
        if training {
            x = dropped(x, self.embedding_dropout)?;
        }
        if !execution.fp32_residual_connection {
            x = stream::in_dtype_of_autocast(x)?;
        }
        // Neither a LayerNorm, nor the rotation of neighbouring channels, nor latent or linear attention has a kernel on
        // slices.
        let halves = context.rotation.convention == Convention::HalfSplit;
        // A graph with checkpoints shares the context, and has keys and values of its own, as it runs the blocks again.
        let (context, shared_kv) = (Shared::new(context), RefCell::default());
        let on_rows = self.has_rows
            && matches!(self.norm, Norm::Rms(_))
            && halves
            && decode_step::applies(input, &x, execution, training);
        let mut stream = Stream::new(x);
        if let Some(cache) = input.cache.as_deref_mut().filter(|_| on_rows) {
            stream = context
                .with(|context| self.run_on_rows(&stream.x, context, cache))?
                .select(input.logits)?;
            let hidden = stream.finished(&self.norm, execution.fused_kernels)?;
            return Ok((hidden, None));
        }
        for group in execution.checkpointing.groups(self.blocks.len())? {
            // With a cache a second run would append the tokens twice.
            // A tower that learns gets its gradients through the values that are added after the first layers.
            let learns = input
                .images
                .is_some_and(|images| images.learns_at(group.blocks.start));
            stream = if group.checkpointed && input.cache.is_none() && !learns {
                self.recomputed(group.blocks, stream, &context, &shared_kv, execution)?
            } else {
                let cache = input.cache.as_deref_mut();
                context
                    .with(|context| self.run(group.blocks, stream, context, &shared_kv, cache))?
            };
        }
        // Before the last norm, so that it is computed for the wanted positions only.
        stream = stream.select(input.logits)?;
        let load = stream.load.take();
        if let Some(model) = &self.per_layer {
            stream = Stream::new(model.joined(stream.sum()?, fused)?);
        }
        let hidden = stream.finished(&self.norm, fused)?;
        Ok((hidden, load))
    }

    /// Runs all blocks on slices.
    fn run_on_rows(
        &self,
        x: &Tensor,
        context: &Context,
        cache: &mut (dyn KvCache + '_),
    ) -> Result<Stream> {
        let size = x.size();
        let tokens = [size[0], size[1]];
        let angles =
            |rotation: &Rotation| RowAngles::new(&rotation.cos, &rotation.sin, tokens, self.shape);
        let full = angles(&context.rotation)?;
        let second = context.second_rotation.as_ref().map(angles).transpose()?;
        let mut buffers = self.buffers.borrow_mut();
        buffers.begin(x)?;
        // Operators would run on one thread each, so threads are not limited if the last pass needed operators.
        let team = std::mem::replace(&mut buffers.on_slices, true);
        let shared_kv = RefCell::default();
        let mut layers = || {
            for (layer, plan) in self.plans.iter().enumerate() {
                let step = context.step(layer, *plan, &shared_kv, Some(&mut *cache));
                let angles = second
                    .as_ref()
                    .filter(|_| plan.second_rotary)
                    .unwrap_or(&full);
                self.blocks[layer]
                    .with(|block| block.forward_rows(&mut buffers, layer == 0, step, angles))?;
            }
            Ok::<_, Error>(())
        };
        if team {
            with_team(layers)?;
        } else {
            layers()?;
        }
        let (x, delta) = buffers.finish(&size)?;
        Ok(Stream {
            x,
            delta: Some(delta),
            load: None,
        })
    }

    fn run(
        &self,
        blocks: Range<usize>,
        mut stream: Stream,
        context: &Context,
        shared_kv: &RefCell<SharedKv>,
        mut cache: Option<&mut (dyn KvCache + '_)>,
    ) -> Result<Stream> {
        for layer in blocks {
            let step = context.step(layer, self.plans[layer], shared_kv, cache.as_deref_mut());
            let balance = &context.balance;
            stream = self.blocks[layer].with(|block| block.forward(stream, step, balance))?;
            stream = context.deepened(layer, stream)?;
        }
        Ok(stream)
    }

    /// Computes `blocks` as one checkpoint, which saves its input alone.
    fn recomputed(
        &self,
        blocks: Range<usize>,
        mut stream: Stream,
        context: &Shared<Context>,
        shared_kv: &RefCell<SharedKv>,
        execution: &Execution,
    ) -> Result<Stream> {
        let before = stream.load.take();
        // Handles, as backward runs the closure again after this call.
        let members: Vec<_> = blocks
            .map(|layer| (layer, self.plans[layer], self.blocks[layer].clone()))
            .collect();
        let options = &execution.checkpoint_options;
        let (context, own) = (context.clone(), RefCell::new(shared_kv.borrow().share()));
        // The sum is passed, not its two addends: the checkpoint then saves one tensor.
        let (x, load, put) = checkpoint_with(&[&stream.sum()?], options, move |inputs| {
            context.with(|context| {
                let mut stream = Stream::new(inputs[0].shallow_clone());
                for (layer, plan, block) in &members {
                    let step = context.step(*layer, *plan, &own, None);
                    stream = block.with(|block| block.forward(stream, step, &context.balance))?;
                    stream = context.deepened(*layer, stream)?;
                }
                let put = own.borrow().share();
                Ok((stream.sum()?, stream.load, put))
            })
        })?;
        shared_kv.replace(put);
        Ok(Stream {
            x,
            delta: None,
            load: ExpertLoad::sum(before, load)?,
        })
    }

    /// Lends each linear layer of the blocks.
    pub(crate) fn for_each_linear(&self, see: &mut dyn FnMut(&Linear)) {
        for block in &self.blocks {
            block.with(|layer| match layer {
                Layer::Serial(block) => {
                    let layers = block.attention.layers().chain(block.mlp.layers());
                    layers.for_each(&mut *see)
                }
                Layer::Parallel(block) => block.layers().for_each(&mut *see),
                Layer::WithInput(block) => block.layers().for_each(&mut *see),
            });
        }
        if let Some(model) = &self.per_layer {
            model.layers().for_each(see);
        }
    }

    /// Lends each linear layer of the blocks with its name, to change it.
    pub(crate) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        visit_shared(&mut self.blocks, |layer| match layer {
            Layer::Serial(block) => {
                block.attention.visit(visit)?;
                block.mlp.visit(visit)
            }
            Layer::Parallel(block) => block.visit(visit),
            Layer::WithInput(block) => block.visit(visit),
        })?;
        match &mut self.per_layer {
            Some(model) => model.visit(visit),
            None => Ok(()),
        }
    }

    /// Lends the parameters that are not of a linear layer.
    pub(crate) fn visit_parameters(
        &mut self,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        if let Some(table) = self.embedding.dense_table_mut() {
            visit(&format!("{}.embed_tokens.weight", self.name), table)?;
        }
        let mut layer = 0;
        visit_shared(&mut self.blocks, |block| {
            let prefix = format!("{}.layers.{layer}", self.name);
            layer += 1;
            let block = match block {
                Layer::Serial(block) => block,
                Layer::Parallel(block) => return block.visit_parameters(&prefix, visit),
                Layer::WithInput(block) => return block.visit_parameters(&prefix, visit),
            };
            block.attention.visit_parameters(&prefix, visit)?;
            block.norms.visit_parameters(&prefix, visit)
        })?;
        if let Some(model) = &mut self.per_layer {
            model.visit_parameters(visit)?;
        }
        let name = match self.norm {
            Norm::Rms(_) => "norm",
            Norm::Layer(_) => "final_layernorm",
        };
        let name = format!("{}.{name}", self.name);
        self.norm.visit_parameters(&name, visit)
    }

    pub(crate) fn num_layers(&self) -> usize {
        self.blocks.len()
    }

    /// Returns the sliding window of each block.
    pub(crate) fn windows(&self) -> Vec<Option<i64>> {
        self.plans.iter().map(|plan| plan.window).collect()
    }

    /// Returns `true` for each block with a state of fixed size in place of keys and values.
    pub(crate) fn recurrent(&self) -> Vec<bool> {
        let is_recurrent = |block: &Layer| matches!(block, Layer::Serial(block) if matches!(block.attention, Attention::DeltaNet(_)));
        self.blocks
            .iter()
            .map(|block| block.with(is_recurrent))
            .collect()
    }

    /// Returns the inverse frequencies of the rotary positions of a block.
    pub(crate) fn inverse_frequencies(&self, layer: usize) -> Option<&[f32]> {
        let rotary = match &self.second_rotary {
            Some(second) if self.plans.get(layer)?.second_rotary => second,
            _ => &self.rotary,
        };
        (layer < self.plans.len()).then(|| rotary.inverse_frequencies())
    }

    fn masks(&self, input: &ForwardInput<'_>, shape: Shape) -> Result<Masks> {
        // All sliding layers of a model have one width, so two masks serve all layers.
        let window = self.plans.iter().find_map(|plan| plan.window);
        let mask = |window: Option<i64>| match self.bidirectional {
            true => Ok(Mask::bidirectional(
                input.sequences,
                shape.tokens,
                window.map(|w| w / 2),
            )),
            false => Mask::causal(input, shape, window),
        };
        Ok(Masks {
            full: mask(None)?,
            sliding: window.map(|window| mask(Some(window))).transpose()?,
        })
    }
}

/// The values that all blocks of a forward pass share.
struct Context {
    rotation: Rotation,
    second_rotation: Option<Rotation>,
    masks: Masks,
    dropout: f64,
    residual_dropout: f64,
    execution: Execution,
    balance: LoadBalance,
    layer_inputs: Option<Tensor>,
    images: Option<ImageTokens>,
}

impl Context {
    fn step<'a, 'c>(
        &'a self,
        layer: usize,
        plan: Plan,
        shared_kv: &'a RefCell<SharedKv>,
        cache: Option<&'a mut (dyn KvCache + 'c)>,
    ) -> AttentionStep<'a, 'c> {
        let second = self.second_rotation.as_ref().filter(|_| plan.second_rotary);
        AttentionStep {
            layer,
            rotation: second.unwrap_or(&self.rotation),
            mask: self.masks.of(plan.window),
            cache,
            dropout: self.dropout,
            residual_dropout: self.residual_dropout,
            execution: &self.execution,
            layer_inputs: self.layer_inputs.as_ref(),
            shared_kv,
        }
    }

    /// Adds the values of images to the stream after layer `layer`, if it gets any.
    fn deepened(&self, layer: usize, stream: Stream) -> Result<Stream> {
        let Some(images) = &self.images else {
            return Ok(stream);
        };
        Ok(match images.deepen(layer, &stream.sum()?)? {
            Some(x) => Stream {
                load: stream.load,
                ..Stream::new(x)
            },
            None => stream,
        })
    }
}

/// The masks of a forward pass; all sliding layers of a model share one width.
struct Masks {
    full: Mask,
    sliding: Option<Mask>,
}

impl Masks {
    fn of(&self, window: Option<i64>) -> &Mask {
        match (&self.sliding, window) {
            (Some(sliding), Some(_)) => sliding,
            _ => &self.full,
        }
    }
}
