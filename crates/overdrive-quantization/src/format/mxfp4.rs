//! Checkpoints with experts in MXFP4, as gpt-oss is published.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::{Kind, Tensor};

use super::compressed_tensors::low_half_first;
use super::source::Module;
use crate::weight::{Magnitudes, Storage};
use crate::{Error, QuantizedWeight, Result, Scheme};

/// The `quantization_config` of a checkpoint in MXFP4; keys as in transformers' `Mxfp4Config`.
///
/// A weight `(O, I)` is `{module}.blocks`, u8 `(O, I/32, 16)`, and `{module}.scales`, u8 `(O, I/32)`. A file of gpt-oss
/// has both for all experts of a layer, with a first dimension for the experts.
#[derive(Debug, Clone, PartialEq, Default, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Mxfp4Config {
    /// The modules that are not quantized.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modules_to_not_convert: Option<Vec<String>>,
    /// The other keys of the object.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

impl Mxfp4Config {
    pub(super) const PARTS: &'static [&'static str] = &["blocks", "scales"];

    pub(super) fn is_stored(module: Module<'_>) -> Result<bool> {
        Ok(module.optional("blocks")?.is_some())
    }

    pub(super) fn read(module: Module<'_>) -> Result<QuantizedWeight> {
        let codes = module.tensor("blocks", &[Kind::Uint8], &[None, None, Some(16)])?;
        let (outputs, groups, _) = codes.size3()?;
        let shape = [Some(outputs), Some(groups)];
        let scales = module.tensor("scales", &[Kind::Uint8], &shape)?;
        module.built(QuantizedWeight::from_mxfp4(codes, scales))
    }

    pub(super) fn write(weight: &QuantizedWeight, module: &str) -> Result<Vec<(String, Tensor)>> {
        let weight = weight.in_rows()?;
        match &weight.storage {
            Storage::Blocks {
                codes,
                magnitudes: Magnitudes::Quantized { codes: scales, .. },
            } if weight.scheme == Scheme::Mxfp4 => {
                let blocks = low_half_first(codes)?.f_view([weight.outputs, -1, 16])?;
                let scales = scales.f_view([weight.outputs, -1])?;
                Ok(vec![
                    (format!("{module}.blocks"), blocks),
                    (format!("{module}.scales"), scales),
                ])
            }
            _ => {
                let expected = "mxfp4, the scheme of this layout; dequantize the model first";
                Err(Error::option("scheme", weight.scheme, expected))
            }
        }
    }
}
