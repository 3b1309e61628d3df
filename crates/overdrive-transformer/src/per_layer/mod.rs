//! The blocks of Gemma 3n and Gemma 4, whose layers have an input beside the residual stream
//! ([`PerLayerConfig`](crate::PerLayerConfig)).

mod altup;
mod attention;
mod block;
mod experts;
mod gaussian_top_k;
mod inputs;
mod parameters;

use overdrive_nn::{Embedding, Linear};
use tch::{Kind, Tensor};

use crate::config::PerLayerConfig;
use crate::moe;
use crate::parameters::ParameterMap;
use crate::projections::{LinearVisitor, ParameterVisitor};
use crate::{LlamaConfig, Result};

use altup::Streams;
pub(crate) use attention::PerLayerAttention;
pub(crate) use block::PerLayerBlock;
pub(crate) use gaussian_top_k::GaussianTopK;
use inputs::{LayerInputs, TABLE};
pub(crate) use parameters::{block_parameters, model_parameters};

/// The modules of the model that are not of a layer.
#[derive(Debug)]
pub(crate) struct PerLayerModel {
    inputs: Option<LayerInputs>,
    streams: Option<Streams>,
}

impl PerLayerModel {
    /// Returns the groups of layers whose weights lie together, without `.weight`.
    pub(crate) fn adjacent(config: &LlamaConfig, sizes: &PerLayerConfig) -> Vec<Vec<String>> {
        let layers = (0..config.num_hidden_layers).map(|layer| {
            PerLayerAttention::joint_names(&format!("model.layers.{layer}"), config, layer)
        });
        let altup = sizes.altup.iter().map(Streams::joint_names);
        let experts = config.experts.iter().flat_map(|experts| {
            let layers = 0..config.num_hidden_layers;
            layers
                .flat_map(|layer| moe::adjacent(config, &format!("model.layers.{layer}"), experts))
        });
        layers.chain(altup).chain(experts).collect()
    }

    /// Takes the modules of a model of dtype `kind`.
    pub(crate) fn take(
        parameters: &mut ParameterMap,
        config: &LlamaConfig,
        sizes: &PerLayerConfig,
        kind: Kind,
    ) -> Result<PerLayerModel> {
        let inputs = (sizes.hidden_size_per_layer_input > 0)
            .then(|| LayerInputs::take(parameters, config, sizes, kind));
        let streams = sizes.altup.as_ref();
        let streams = streams.map(|altup| Streams::take(parameters, altup));
        Ok(PerLayerModel {
            inputs: inputs.transpose()?,
            streams: streams.transpose()?,
        })
    }

    /// Computes the inputs `(B, T, L, P)` of the layers from the tokens and their embeddings `(B, T, C)`.
    pub(crate) fn inputs(
        &self,
        ids: &Tensor,
        embedded: &Tensor,
        fused: bool,
    ) -> Result<Option<Tensor>> {
        let inputs = self.inputs.as_ref();
        inputs
            .map(|inputs| inputs.forward(ids, embedded, fused))
            .transpose()
    }

    /// Returns the residual streams `(B, T, N, C)`, or the one `(B, T, C)`.
    pub(crate) fn streams_of(&self, embedded: Tensor, fused: bool) -> Result<Tensor> {
        match &self.streams {
            Some(streams) => streams.expand(&embedded, fused),
            None => Ok(embedded),
        }
    }

    /// Joins the residual streams after the last layer to `(B, T, C)`.
    pub(crate) fn joined(&self, x: Tensor, fused: bool) -> Result<Tensor> {
        match &self.streams {
            Some(streams) => streams.join(&x, fused),
            None => Ok(x),
        }
    }

    /// Returns the table of the inputs of layers with its name.
    pub(crate) fn table(&self) -> Option<(&'static str, &Embedding)> {
        let inputs = self.inputs.as_ref();
        inputs.map(|inputs| (TABLE, &inputs.table))
    }

    /// Returns the table, to change it.
    pub(crate) fn table_mut(&mut self) -> Option<(&'static str, &mut Embedding)> {
        let inputs = self.inputs.as_mut();
        inputs.map(|inputs| (TABLE, &mut inputs.table))
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = &Linear> {
        let inputs = self.inputs.iter().flat_map(LayerInputs::layers);
        inputs.chain(self.streams.iter().flat_map(Streams::layers))
    }

    pub(crate) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        if let Some(inputs) = &mut self.inputs {
            inputs.visit(visit)?;
        }
        match &mut self.streams {
            Some(streams) => streams.visit(visit),
            None => Ok(()),
        }
    }

    pub(crate) fn visit_parameters(
        &mut self,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        match &mut self.inputs {
            Some(inputs) => inputs.visit_parameters(visit),
            None => Ok(()),
        }
    }
}
