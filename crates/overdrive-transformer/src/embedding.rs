use overdrive_lora::BaseWeight;
use overdrive_quantization::QuantizedWeight;
use tch::{Device, Kind, Tensor};

use crate::Result;
use crate::linear::ParameterVisitor;
use crate::parameters::ParameterMap;

/// The table of token embeddings `(V, C)`.
#[derive(Debug)]
pub(crate) enum Embedding {
    Dense(Tensor),
    /// Rows are dequantized when they are looked up, to the kind of the other parameters.
    Quantized(QuantizedWeight, Kind),
}

impl Embedding {
    /// `{name}.weight`.
    pub(crate) fn take(parameters: &mut ParameterMap, name: &str) -> Result<Embedding> {
        match parameters.take_quantized(name) {
            Some(weight) => Ok(Embedding::Quantized(weight, parameters.kind())),
            None => Ok(Embedding::Dense(
                parameters.take(&format!("{name}.weight"))?,
            )),
        }
    }

    /// `ids (B, T)` to `(B, T, C)`.
    pub(crate) fn forward(&self, ids: &Tensor) -> Result<Tensor> {
        match self {
            Embedding::Dense(table) => Ok(Tensor::f_embedding(table, ids, -1, false, false)?),
            Embedding::Quantized(table, kind) => Ok(table.rows(ids, *kind)?),
        }
    }

    /// Exchanges the table for a quantized one, whose rows come out in `kind`.
    pub(crate) fn replace(&mut self, table: QuantizedWeight, kind: Kind) {
        *self = Embedding::Quantized(table, kind);
    }

    /// The table as the weight of a tied head.
    pub(crate) fn as_head(&self) -> BaseWeight {
        match self {
            Embedding::Dense(table) => BaseWeight::Dense {
                weight: table.shallow_clone(),
                transposed: false,
            },
            Embedding::Quantized(table, _) => BaseWeight::Quantized(table.shallow_clone()),
        }
    }

    /// Lends the table `{name}.weight` where it is dense.
    pub(crate) fn visit_parameters(
        &mut self,
        name: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_lora::Result<()> {
        match self {
            Embedding::Dense(table) => visit(&format!("{name}.weight"), table),
            Embedding::Quantized(..) => Ok(()),
        }
    }

    pub(crate) fn is_packed(&self) -> bool {
        matches!(self, Embedding::Quantized(..))
    }

    /// Exchanges the table for a dense one.
    pub(crate) fn unpack(&mut self, table: Tensor) {
        *self = Embedding::Dense(table);
    }

    /// Of what comes out of it.
    pub(crate) fn kind(&self) -> Kind {
        match self {
            Embedding::Dense(table) => table.kind(),
            Embedding::Quantized(_, kind) => *kind,
        }
    }

    pub(crate) fn device(&self) -> Device {
        match self {
            Embedding::Dense(table) => table.device(),
            Embedding::Quantized(table, _) => table.device(),
        }
    }
}
