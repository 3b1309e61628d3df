//! Checkpoints in FP8: with one scale for each weight or row, as Ministral 3 and Devstral 2 are published and AutoFP8 and
//! FBGEMM write them, and with one for each block of a weight, as DeepSeek-V3 and the FP8 models of Qwen3 are.

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use tch::{Kind, Tensor};

use super::source::{Module, row_scales};
use crate::codec::fp8;
use crate::weight::Storage;
use crate::{Activations, Error, QuantizedWeight, Result, Scheme};

/// The `quantization_config` of a checkpoint in FP8; keys as in transformers' `FineGrainedFP8Config`.
///
/// A weight `(O, I)` is `{module}.weight`, f8 (e4m3), and `{module}.weight_scale_inv`: the number by which all of its
/// elements are multiplied, or `(⌈O/128⌉, ⌈I/128⌉)`, one for each block. Files of AutoFP8 and FBGEMM (`fbgemm_fp8`) have
/// `{module}.weight_scale` in its place, one number or one for each row, whatever `weight_block_size` is.
/// `activation_scheme` asks for activations in FP8, too: they are with one scale for each weight or row, on GPUs that
/// multiply 8-bit floats, and stay floating-point with scales for blocks.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[non_exhaustive]
pub struct Fp8Config {
    /// The rows and columns of a block with a scale of its own: 128 and 128 (the default), or `None`, one scale for each
    /// weight.
    #[serde(default = "blocks")]
    pub weight_block_size: Option<Vec<i64>>,
    /// The modules that are not quantized.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub modules_to_not_convert: Option<Vec<String>>,
    /// The same, which is used without `modules_to_not_convert`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ignored_layers: Option<Vec<String>>,
    /// The other keys of the object.
    #[serde(flatten)]
    pub other: Map<String, Value>,
}

fn blocks() -> Option<Vec<i64>> {
    Some(vec![fp8::BLOCK as i64; 2])
}

/// The other keys with the values that change nothing here; `null` never does.
const NEUTRAL: [(&str, &[&str]); 7] = [
    ("activation_scheme", &["dynamic", "static"]),
    ("kv_cache_scheme", &["dynamic", "static"]),
    ("fmt", &["e4m3", "float8_e4m3fn"]),
    // The scales are powers of two, and stored as floats nevertheless.
    ("scale_fmt", &["float", "ue8m0"]),
    ("expert_dtype", &["fp8"]),
    ("dequantize", &["true", "false"]),
    ("modules_to_convert", &[]),
];

impl Fp8Config {
    pub(super) const PARTS: &'static [&'static str] =
        &["weight", "weight_scale_inv", "weight_scale"];

    /// The static scales and bounds of activations, which are not used.
    pub(super) const STATIC_ACTIVATIONS: &'static [&'static str] =
        &["activation_scale", "input_scale", "input_scale_ub"];

    /// The static scales of a cache, which are not used.
    pub(super) const STATIC_ATTENTION: &'static [&'static str] =
        &["k_scale", "v_scale", "kv_scale"];

    /// Returns the configuration of files with weights of this scheme, if it is that of blocks.
    pub(super) fn of(scheme: Scheme, not_quantized: Vec<String>) -> Option<Self> {
        (scheme == Scheme::Fp8Blocks).then(|| Fp8Config {
            weight_block_size: blocks(),
            modules_to_not_convert: Some(not_quantized),
            ignored_layers: None,
            other: [("activation_scheme".to_owned(), "dynamic".into())]
                .into_iter()
                .collect(),
        })
    }

    pub(super) fn validate(&self) -> Result<()> {
        if let Some(size) = &self.weight_block_size
            && self.weight_block_size != blocks()
        {
            return Err(Error::option(
                "quantization_config.weight_block_size",
                format!("{size:?}"),
                "[128, 128], or null for one scale for each weight; use a copy of the model in bf16",
            ));
        }
        for (key, value) in self.other.iter().filter(|(_, value)| !value.is_null()) {
            let name = value
                .as_str()
                .map_or_else(|| value.to_string(), str::to_owned);
            let known = NEUTRAL.iter().find(|(known, _)| known == key);
            let allowed = known.map_or(&[][..], |(_, allowed)| *allowed);
            if !allowed.contains(&name.as_str()) {
                let expected = match allowed {
                    [] => "null: no other value is implemented; use a copy of the model in bf16"
                        .to_owned(),
                    allowed => format!("{}; use a copy of the model in bf16", allowed.join(" or ")),
                };
                let option = format!("quantization_config.{key}");
                return Err(overdrive_core::Error::option(option, name, expected).into());
            }
        }
        Ok(())
    }

    /// Returns the configuration of the weights without static scales of activations.
    pub(super) fn without_static_scales(mut self) -> Self {
        if let Some(scheme) = self.other.get_mut("activation_scheme") {
            *scheme = "dynamic".into();
        }
        self
    }

    /// Returns the names of the modules that are not quantized.
    pub(super) fn not_quantized(&self) -> &[String] {
        let names = self.modules_to_not_convert.as_ref();
        names
            .or(self.ignored_layers.as_ref())
            .map_or(&[], Vec::as_slice)
    }

    /// Returns the scheme of the weights.
    pub(super) fn scheme(&self) -> Scheme {
        match self.weight_block_size {
            Some(_) => Scheme::Fp8Blocks,
            None => Scheme::Fp8,
        }
    }

    pub(super) fn is_stored(module: Module<'_>) -> Result<bool> {
        let weight = module.optional("weight")?;
        Ok(weight.is_some_and(|weight| weight.kind() == Some(Kind::Float8e4m3fn)))
    }

    pub(super) fn read(&self, module: Module<'_>) -> Result<QuantizedWeight> {
        let inverse = "weight_scale_inv";
        if module.optional(inverse)?.is_none() && module.optional("weight_scale")?.is_some() {
            return read_rows(module, "weight_scale");
        }
        if self.scheme() == Scheme::Fp8 {
            return read_rows(module, inverse);
        }
        let codes = module.tensor("weight", &[Kind::Float8e4m3fn], &[None, None])?;
        read_blocks(module, codes, inverse)
    }

    /// Returns the tensors that a file has for a weight with scales for blocks.
    pub(super) fn write(
        &self,
        weight: &QuantizedWeight,
        module: &str,
    ) -> Result<Vec<(String, Tensor)>> {
        let (Storage::Fp8 { codes, scales }, Scheme::Fp8Blocks, Scheme::Fp8Blocks) =
            (&weight.storage, weight.scheme, self.scheme())
        else {
            let expected = "fp8-blocks, the scheme of this layout; dequantize the model first";
            return Err(Error::option("scheme", weight.scheme, expected));
        };
        Ok(vec![
            (
                format!("{module}.weight"),
                codes.f_view_dtype(Kind::Float8e4m3fn)?,
            ),
            (
                format!("{module}.weight_scale_inv"),
                scales_of_blocks(scales, module)?,
            ),
        ])
    }
}

/// Reads a weight with one scale, or one for each row, whose activations are in FP8, too.
pub(super) fn read_rows(module: Module<'_>, scales: &str) -> Result<QuantizedWeight> {
    let codes = module.tensor("weight", &[Kind::Float8e4m3fn], &[None, None])?;
    let outputs = codes.size()[0];
    let count: i64 = module.required(scales)?.shape().iter().product();
    let count = if count == 1 { 1 } else { outputs };
    let scales = row_scales(module, scales, count, outputs)?;
    let weight = module.built(QuantizedWeight::from_fp8(codes, scales))?;
    weight.with_activations(Activations::Float8)
}

/// Reads a weight of these codes with a scale for each block.
pub(super) fn read_blocks(
    module: Module<'_>,
    codes: Tensor,
    scales: &str,
) -> Result<QuantizedWeight> {
    let block = fp8::BLOCK as i64;
    let blocks = codes.size().into_iter();
    let blocks: Vec<_> = blocks
        .map(|size| Some((size + block - 1) / block))
        .collect();
    let scales = module.scales_f32(scales, &blocks)?;
    module.built(QuantizedWeight::from_fp8_blocks(codes, scales))
}

/// Returns the scales of blocks, `(⌈O/128⌉, ⌈I/128⌉)`, from those of each row.
pub(super) fn scales_of_blocks(by_row: &Tensor, module: &str) -> Result<Tensor> {
    let block = fp8::BLOCK as i64;
    let of_blocks = by_row.f_slice(0, None, None, block)?;
    let again = of_blocks
        .f_repeat_interleave_self_int(block, 0, None)?
        .f_narrow(0, 0, by_row.size()[0])?;
    if !again.f_equal(by_row)? {
        return Err(Error::BadWeight {
            name: format!("{module}.weight"),
            reason: "its rows were rearranged, so that the 128 rows of a block have several scales; dequantize the \
                     model first"
                .to_owned(),
        });
    }
    Ok(of_blocks.f_contiguous()?)
}
