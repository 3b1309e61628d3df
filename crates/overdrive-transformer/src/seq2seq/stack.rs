use std::ops::Range;

use overdrive_checkpointing::{Shared, checkpoint_with};
use overdrive_kv_cache::KvCache;
use overdrive_nn::{Embedding, Linear};
use tch::{Device, Kind, Tensor};

use super::block::{Block, Context};
use super::cross_attention::CrossLayer;
use super::input::Source;
use super::masks;
use super::norm::Norm;
use super::relative_bias::RelativeBias;
use crate::gpt2::dropped;
use crate::projections::{LinearVisitor, ParameterVisitor, visit_shared};
use crate::{Error, Execution, Result};

/// An encoder, or a decoder without its head.
#[derive(Debug)]
pub(super) struct Stack {
    pub(super) blocks: Vec<Shared<Block>>,
    /// The positions: T5's numbers for the scores, or BART's table.
    pub(super) positions: Positions,
    /// The factor of the token embeddings.
    pub(super) embedding_scale: Option<f64>,
    /// The token whose embedding gets no gradient from the input, as of `torch.nn.Embedding`; -1 for none.
    pub(super) padding_index: i64,
    pub(super) embedding_norm: Option<Norm>,
    pub(super) final_norm: Option<Norm>,
    pub(super) dropouts: Dropouts,
}

/// The positions of a stack.
#[derive(Debug)]
pub(super) enum Positions {
    Relative(RelativeBias),
    Learned(LearnedPositions),
}

/// BART's table of positions `(offset + context, C)`.
#[derive(Debug)]
pub(super) struct LearnedPositions {
    pub(super) name: String,
    pub(super) table: Tensor,
}

impl LearnedPositions {
    /// The first rows of the table, which no position has: BART's first release numbered positions after the
    /// padding token.
    pub(super) const OFFSET: i64 = 2;
}

/// The dropouts in training.
#[derive(Debug, Clone, Copy)]
pub(super) struct Dropouts {
    pub(super) hidden: f64,
    pub(super) attention: f64,
    pub(super) activation: f64,
    /// The dropout after the final norm.
    pub(super) output: f64,
    /// The probability that a layer is skipped (LayerDrop, Fan et al. 2020, arXiv:1909.11556).
    pub(super) layers: f64,
}

/// The input of a stack.
pub(super) struct StackInput<'a, 'c> {
    pub(super) embedding: &'a Embedding,
    pub(super) ids: &'a Tensor,
    /// The marks `(B, past + T)` of tokens.
    pub(super) padding: Option<&'a Tensor>,
    pub(super) past: i64,
    /// The encoder's side, for a decoder.
    pub(super) source: Option<Source<'a>>,
    pub(super) cache: Option<&'a mut (dyn KvCache + 'c)>,
    pub(super) execution: &'a Execution,
    pub(super) training: bool,
}

impl Stack {
    /// Computes the hidden states `(B, T, C)`.
    pub(super) fn forward(&self, mut input: StackInput<'_, '_>) -> Result<Tensor> {
        let (past, tokens) = (input.past, input.ids.size()[1]);
        let dropout = |p: f64| if input.training { p } else { 0.0 };
        let mut x = self.embed(&input)?;
        if let Some(norm) = &self.embedding_norm {
            x = norm.forward(&x, input.execution.fused_kernels)?;
        }
        x = dropped(x, dropout(self.dropouts.hidden))?;
        let bias = match &self.positions {
            Positions::Relative(bias) => Some(bias.forward(past, tokens)?),
            Positions::Learned(_) => None,
        };
        let (mask, cross_mask) = match &input.source {
            None => (
                masks::bidirectional(bias, input.padding)?,
                crate::mask::Mask::ALL,
            ),
            Some(source) => (
                masks::causal(bias, input.padding, tokens, past)?,
                masks::bidirectional(None, source.attention_mask())?,
            ),
        };
        let context = Shared::new(Context {
            mask,
            cross_mask,
            implementation: input.execution.attention,
            fused: input.execution.fused_kernels,
            dropout: dropout(self.dropouts.hidden),
            attention_dropout: dropout(self.dropouts.attention),
            activation_dropout: dropout(self.dropouts.activation),
        });
        let kept = self.kept_layers(input.training)?;
        for group in input.execution.checkpointing.groups(self.blocks.len())? {
            // With a cache a second run would append the tokens twice.
            if group.checkpointed && input.cache.is_none() {
                x = self.checkpointed(x, group.blocks, &kept, &context, &input)?;
                continue;
            }
            for layer in group.blocks {
                if kept[layer] {
                    let cross = input.source.map(|source| cross_layer(source, layer));
                    let cache = input.cache.as_deref_mut().map(|cache| (layer, cache));
                    x = context.with(|context| {
                        self.blocks[layer]
                            .with(|block| block.forward(&x, context, cross.as_ref(), cache))
                    })?;
                }
            }
        }
        if let Some(norm) = &self.final_norm {
            x = norm.forward(&x, input.execution.fused_kernels)?;
        }
        dropped(x, dropout(self.dropouts.output))
    }

    /// Computes a group of blocks whose activations backward computes again.
    fn checkpointed(
        &self,
        x: Tensor,
        blocks: Range<usize>,
        kept: &[bool],
        context: &Shared<Context>,
        input: &StackInput<'_, '_>,
    ) -> Result<Tensor> {
        let members: Vec<_> = blocks
            .filter(|&layer| kept[layer])
            .map(|layer| {
                let cross = input.source.map(|source| cross_layer(source, layer));
                (self.blocks[layer].clone(), cross)
            })
            .collect();
        let context = context.clone();
        let options = &input.execution.checkpoint_options;
        Ok(checkpoint_with(&[&x], options, move |inputs| {
            let mut x = inputs[0].shallow_clone();
            for (block, cross) in &members {
                x = context.with(|context| {
                    block.with(|block| block.forward(&x, context, cross.as_ref(), None))
                })?;
            }
            Ok(x)
        })?)
    }

    fn embed(&self, input: &StackInput<'_, '_>) -> Result<Tensor> {
        let x = match input.embedding.dense_table() {
            Some(table) if self.padding_index >= 0 => {
                Tensor::f_embedding(table, input.ids, self.padding_index, false, false)?
            }
            _ => input.embedding.forward(input.ids)?,
        };
        let x = match self.embedding_scale {
            Some(scale) => x.f_mul_scalar(scale)?,
            None => x,
        };
        let Positions::Learned(LearnedPositions { table, .. }) = &self.positions else {
            return Ok(x);
        };
        let (past, tokens) = (input.past, input.ids.size()[1]);
        let limit = table.size()[0] - LearnedPositions::OFFSET;
        if past + tokens > limit {
            return Err(Error::ContextExceeded {
                positions: past + tokens,
                limit,
                key: "max_position_embeddings",
            });
        }
        let positions = table.f_narrow(0, past + LearnedPositions::OFFSET, tokens)?;
        Ok(x.f_add(&positions)?)
    }

    /// Draws the layers that a forward pass of training does not skip.
    fn kept_layers(&self, training: bool) -> Result<Vec<bool>> {
        let layers = self.blocks.len();
        if !training || self.dropouts.layers == 0.0 {
            return Ok(vec![true; layers]);
        }
        let drawn = Tensor::f_rand([layers as i64], (Kind::Double, Device::Cpu))?;
        let drawn = Vec::<f64>::try_from(&drawn)?;
        Ok(drawn
            .into_iter()
            .map(|drawn| drawn >= self.dropouts.layers)
            .collect())
    }

    /// Returns the keys and values of an encoder's states in each layer.
    pub(super) fn cross_keys_values(
        &self,
        states: &Tensor,
        fused: bool,
    ) -> Result<Vec<(Tensor, Tensor)>> {
        let blocks = self.blocks.iter();
        let of_block = |block: &Block| match &block.cross {
            Some((attention, _)) => attention.keys_values(states, fused).map(Some),
            None => Ok(None),
        };
        let layers = blocks.map(|block| block.with(of_block).transpose());
        layers.flatten().collect()
    }

    /// Lends each linear layer.
    pub(super) fn for_each_linear(&self, see: &mut dyn FnMut(&Linear)) {
        for block in &self.blocks {
            block.with(|block| block.layers().for_each(&mut *see));
        }
    }

    pub(super) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        visit_shared(&mut self.blocks, |block| block.visit(visit))
    }

    /// Lends the parameters that are not of a linear layer.
    pub(super) fn visit_parameters(
        &mut self,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        match &mut self.positions {
            Positions::Relative(bias) => bias.visit_parameters(visit)?,
            Positions::Learned(positions) => visit(&positions.name, &mut positions.table)?,
        }
        if let Some(norm) = &mut self.embedding_norm {
            norm.visit_parameters(visit)?;
        }
        visit_shared(&mut self.blocks, |block| block.visit_parameters(visit))?;
        match &mut self.final_norm {
            Some(norm) => norm.visit_parameters(visit),
            None => Ok(()),
        }
    }
}

/// Returns the source of a decoder layer's keys and values.
fn cross_layer(source: Source<'_>, layer: usize) -> CrossLayer {
    match source {
        Source::Encoded(encoded) => CrossLayer::States(encoded.states.shallow_clone()),
        Source::Cache(cache) => {
            let (keys, values) = &cache.layers[layer];
            CrossLayer::KeysValues(keys.shallow_clone(), values.shallow_clone())
        }
    }
}
