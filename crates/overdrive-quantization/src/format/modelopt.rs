//! Checkpoints of NVIDIA's ModelOpt in FP8 and NVFP4.

use overdrive_core::check_option;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::Kind;

use super::fp8::read_rows;
use super::source::Module;
use crate::{QuantizedWeight, Result, Scheme};

/// The `quantization_config` of a checkpoint of ModelOpt.
///
/// A weight `(O, I)` in FP8 is `{module}.weight`, f8 (e4m3), and `{module}.weight_scale`, one number or one for each row.
/// In NVFP4 it is `{module}.weight`, u8 `(O, I/2)`, two 4-bit floats in a byte; `{module}.weight_scale`, f8 `(O, I/16)`;
/// and `{module}.weight_scale_2`, a number. Each element is the product of all three.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct ModelOptConfig {
    /// The format of the weights: `FP8`, `FP8_PER_CHANNEL_PER_TOKEN`, `NVFP4`, or `MIXED_PRECISION` of these.
    pub quant_algo: String,
    /// The modules that are not quantized; `*` stands for any characters.
    #[serde(default)]
    pub ignore: Vec<String>,
    /// The other keys of the object.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

const ALGORITHMS: [&str; 4] = [
    "FP8",
    "FP8_PER_CHANNEL_PER_TOKEN",
    "NVFP4",
    "MIXED_PRECISION",
];

impl ModelOptConfig {
    pub(super) const PARTS: &'static [&'static str] = &["weight", "weight_scale", "weight_scale_2"];

    /// The static scales of activations and of a cache, which are not used.
    pub(super) const STATIC: &'static [&'static str] = &["input_scale", "k_scale", "v_scale"];

    pub(super) fn validate(&self) -> Result<()> {
        let known = ALGORITHMS.contains(&self.quant_algo.as_str());
        let expected = format!(
            "one of {}; use a copy of the model in bf16",
            ALGORITHMS.join(", ")
        );
        let option = "quantization_config.quant_algo";
        Ok(check_option(known, option, &self.quant_algo, expected)?)
    }

    /// Returns the scheme of the weights, unless they have several.
    pub(super) fn scheme(&self) -> Option<Scheme> {
        match self.quant_algo.as_str() {
            "NVFP4" => Some(Scheme::Nvfp4),
            "MIXED_PRECISION" => None,
            _ => Some(Scheme::Fp8),
        }
    }

    pub(super) fn is_stored(module: Module<'_>) -> Result<bool> {
        let kind = module.optional("weight")?.and_then(|weight| weight.kind());
        Ok(matches!(kind, Some(Kind::Float8e4m3fn | Kind::Uint8)))
    }

    pub(super) fn read(module: Module<'_>) -> Result<QuantizedWeight> {
        if module.required("weight")?.kind() == Some(Kind::Float8e4m3fn) {
            return read_rows(module, "weight_scale");
        }
        let codes = module.tensor("weight", &[Kind::Uint8], &[None, None])?;
        let scales = module.tensor("weight_scale", &[Kind::Float8e4m3fn], &[None, None])?;
        let stored = module.required("weight_scale_2")?;
        let shape: Vec<Option<i64>> = stored.shape().iter().map(|_| Some(1)).collect();
        let factor = module.scales_f32("weight_scale_2", &shape)?;
        let factor = factor.f_sum(Kind::Double)?.f_double_value(&[])?;
        module.built(QuantizedWeight::from_nvfp4(
            codes,
            scales,
            (1.0 / factor) as f32,
        ))
    }
}
