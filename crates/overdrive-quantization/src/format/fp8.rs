//! Checkpoints in FP8 with one scale for each weight, as Ministral 3 and Devstral 2 are published.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::Kind;

use super::source::{Module, row_scales};
use crate::{Activations, Error, QuantizedWeight, Result};

/// The `quantization_config` of a checkpoint in FP8; keys as in transformers' `FineGrainedFP8Config`.
///
/// A weight `(O, I)` is `{module}.weight`, f8 (e4m3), and `{module}.weight_scale_inv`, the number by which all of its
/// elements are multiplied. Activations are quantized to FP8, too.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Fp8Config {
    /// The rows and columns of a block with a scale of its own; only `None` is read, one scale for each weight. Default:
    /// 128 and 128.
    #[serde(default = "blocks")]
    pub weight_block_size: Option<Vec<i64>>,
    /// The modules that are not quantized.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modules_to_not_convert: Option<Vec<String>>,
    /// The other keys of the object.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

fn blocks() -> Option<Vec<i64>> {
    Some(vec![128, 128])
}

impl Fp8Config {
    pub(super) const PARTS: &'static [&'static str] = &["weight", "weight_scale_inv"];

    /// The static scale of activations, which is not used.
    pub(super) const STATIC_ACTIVATIONS: &'static [&'static str] = &["activation_scale"];

    pub(super) fn validate(&self) -> Result<()> {
        match &self.weight_block_size {
            None => Ok(()),
            Some(blocks) => Err(Error::option(
                "quantization_config.weight_block_size",
                format!("{blocks:?}"),
                "null, one scale for each weight; use a copy of the model in bf16",
            )),
        }
    }

    pub(super) fn is_stored(module: Module<'_>) -> Result<bool> {
        let weight = module.optional("weight")?;
        Ok(weight.is_some_and(|weight| weight.kind() == Some(Kind::Float8e4m3fn)))
    }

    pub(super) fn read(module: Module<'_>) -> Result<QuantizedWeight> {
        let codes = module.tensor("weight", &[Kind::Float8e4m3fn], &[None, None])?;
        let scales = row_scales(module, "weight_scale_inv", 1, codes.size()[0])?;
        let weight = module.built(QuantizedWeight::from_fp8(codes, scales))?;
        weight.with_activations(Activations::Float8)
    }
}
