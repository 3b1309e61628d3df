use overdrive_fused::Activation;
use overdrive_nn::{Embedding, Linear};
use tch::{Kind, Tensor};

use crate::activation_names::activation_named;
use crate::config::PerLayerConfig;
use crate::parameters::ParameterMap;
use crate::projections::{LinearVisitor, ParameterVisitor, visit_linear};
use crate::rms_norm::RmsNorm;
use crate::rounding::rounded;
use crate::{LlamaConfig, Result};

/// The name of the table.
pub(super) const TABLE: &str = "model.embed_tokens_per_layer";

/// The inputs that the layers get beside the residual stream: of each token, a row of a table, and a projection of its
/// embedding.
#[derive(Debug)]
pub(super) struct LayerInputs {
    pub(super) table: Embedding,
    projection: Linear,
    norm: RmsNorm,
    layers: i64,
    rows: i64,
    /// The token whose row of the table backward gives no gradient, as in transformers.
    padding: Option<i64>,
    /// If `true`, tokens beyond the table have its first row (Gemma 3n).
    takes_first_row: bool,
    /// The factors of the table, of the projection and of the sum.
    scales: [f64; 3],
}

impl LayerInputs {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        config: &LlamaConfig,
        sizes: &PerLayerConfig,
        kind: Kind,
    ) -> Result<LayerInputs> {
        let width = sizes.hidden_size_per_layer_input as f64;
        let of_projection = (config.hidden_size as f64).sqrt().recip();
        let of_sum = 0.5f64.sqrt();
        let third = sizes.altup.is_some();
        // The factors that transformers keeps in the dtype of the model.
        let maybe = |number| match third {
            true => rounded(number, kind),
            false => Ok(number),
        };
        Ok(LayerInputs {
            table: parameters.take_embedding(TABLE)?,
            projection: parameters.take_linear("model.per_layer_model_projection", false)?,
            norm: RmsNorm::take(parameters, "model.per_layer_projection_norm", config)?,
            layers: config.num_hidden_layers,
            rows: sizes.vocab_size_per_layer_input,
            padding: config.pad_token_id.filter(|&id| id >= 0),
            takes_first_row: third,
            scales: [
                rounded(width.sqrt(), kind)?,
                maybe(of_projection)?,
                maybe(of_sum)?,
            ],
        })
    }

    pub(super) fn forward(&self, ids: &Tensor, embedded: &Tensor, fused: bool) -> Result<Tensor> {
        let [of_row, of_projection, of_sum] = self.scales;
        let by_layer = |x: Tensor| x.f_unflatten(-1, [self.layers, -1]);
        let projected = self.projection.forward_with(embedded, fused)?;
        let projected = by_layer(projected.f_mul_scalar(of_projection)?)?;
        let projected = self.norm.forward(&projected, fused)?;
        let ids = match self.takes_first_row {
            true => ids.f_mul(&ids.f_lt(self.rows)?)?,
            false => ids.shallow_clone(),
        };
        let rows = match (self.table.dense_table(), self.padding) {
            (Some(table), Some(padding)) => {
                Tensor::f_embedding(table, &ids, padding, false, false)?
            }
            _ => self.table.forward(&ids)?,
        };
        let rows = by_layer(rows.f_mul_scalar(of_row)?)?;
        Ok(projected.f_add(&rows)?.f_mul_scalar(of_sum)?)
    }

    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        [&self.projection].into_iter()
    }

    pub(super) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        visit_linear(&mut self.projection, visit)
    }

    pub(super) fn visit_parameters(
        &mut self,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        if let Some(table) = self.table.dense_table_mut() {
            visit(&format!("{TABLE}.weight"), table)?;
        }
        let name = "model.per_layer_projection_norm";
        self.norm.visit_parameters(name, visit)
    }
}

/// The part of a layer that reads its input: `norm(projection(act(gate(x)) · input))`.
#[derive(Debug)]
pub(super) struct InputGate {
    gate: Linear,
    projection: Linear,
    norm: RmsNorm,
    activation: Activation,
}

const NORM: &str = "post_per_layer_input_norm";

impl InputGate {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
    ) -> Result<InputGate> {
        Ok(InputGate {
            gate: parameters.take_linear(&format!("{prefix}.per_layer_input_gate"), false)?,
            projection: parameters.take_linear(&format!("{prefix}.per_layer_projection"), false)?,
            norm: RmsNorm::take(parameters, &format!("{prefix}.{NORM}"), config)?,
            activation: activation_named("hidden_activation", &config.hidden_act)?,
        })
    }

    /// Computes the addition to the residual stream `x (B, T, C)` from the layer's `input (B, T, P)`.
    pub(super) fn forward(&self, x: &Tensor, input: &Tensor, fused: bool) -> Result<Tensor> {
        let gate = self.gate.forward_with(x, fused)?;
        let gated = self.activation.apply(&gate)?.f_mul(input)?;
        let projected = self.projection.forward_with(&gated, fused)?;
        self.norm.forward(&projected, fused)
    }

    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        [&self.gate, &self.projection].into_iter()
    }

    pub(super) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        visit_linear(&mut self.gate, visit)?;
        visit_linear(&mut self.projection, visit)
    }

    pub(super) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        self.norm
            .visit_parameters(&format!("{prefix}.{NORM}"), visit)
    }
}
