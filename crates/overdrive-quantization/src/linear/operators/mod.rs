//! Matmuls with libtorch's operators: on a GPU, in f64, and of empty tensors.
//!
//! | module | operator | weights | activations |
//! |---|---|---|---|
//! | `int_mm` | `_int_mm` | 8 bits by row | in 8 bits by row |
//! | `int8_pack` | `_weight_int8pack_mm` | 8 bits by row | a few rows of f32 |
//! | `int4_pack` | `_weight_int4pack_mm` | 4 bits in groups, in tiles | a few rows of bf16 or f16 |
//! | `scaled_mm` | `_scaled_mm` | 8-bit floats | in 8-bit floats by row |
//!
//! Other weights are dequantized and multiplied. If the kernels of overdrive-gpu are on, they take precedence for a few
//! rows.

mod int4_pack;
mod int8_pack;
mod int_mm;
mod scaled_mm;

use tch::{Device, Tensor};

use super::plan::{Plan, plan};
use crate::adjacent::{Joined, joined};
use crate::tiles::Capability;
use crate::weight::Storage;
use crate::{QuantizedWeight, Result, gpu};

/// Returns the results of all weights side by side: of [adjacent](crate::adjacent) weights in one matmul, of others one weight
/// after another.
pub(super) fn forward(
    x: &Tensor,
    weights: &[&QuantizedWeight],
    biases: &[Option<&Tensor>],
    compute: tch::Kind,
    recording: bool,
) -> Result<Tensor> {
    let x = x.f_to_kind(compute)?;
    let given: Vec<&Tensor> = biases.iter().copied().flatten().collect();
    // A bias for only some outputs would need zeros for the others.
    if (given.is_empty() || given.len() == weights.len())
        && let Some(Joined { weight, offsets }) = joined(weights)?
    {
        let bias = match given.is_empty() {
            true => None,
            false => Some(Tensor::f_cat(&given, 0)?.f_to_kind(compute)?),
        };
        if let Some(y) = one(&x, &weight, &offsets, bias.as_ref(), recording)? {
            return Ok(y);
        }
    }
    let mut results = Vec::with_capacity(weights.len());
    for (weight, bias) in weights.iter().zip(biases) {
        let bias = bias.map(|bias| bias.f_to_kind(compute)).transpose()?;
        results.extend(one(&x, weight, &[], bias.as_ref(), recording)?);
    }
    match <[Tensor; 1]>::try_from(results) {
        Ok([only]) => Ok(only),
        Err(results) => Ok(Tensor::f_cat(&results, -1)?),
    }
}

/// Returns the result of one weight; `None` for [several](Joined) with an offset each that no kernel takes.
fn one(
    x: &Tensor,
    weight: &QuantizedWeight,
    offsets: &[(i64, f64)],
    bias: Option<&Tensor>,
    recording: bool,
) -> Result<Option<Tensor>> {
    let mut size = x.size();
    if let Some(last) = size.last_mut() {
        *last = weight.outputs;
    }
    let rows = x.f_reshape([-1, weight.inputs])?;
    let Some(y) = packed(&rows, weight, offsets, recording)? else {
        return match offsets.len() {
            0 => Ok(Some(x.f_linear(&weight.dequantize(x.kind())?, bias)?)),
            _ => Ok(None),
        };
    };
    let y = y.f_view(size.as_slice())?.f_to_kind(x.kind())?;
    Ok(Some(match bias {
        Some(bias) => y.f_add(bias)?,
        None => y,
    }))
}

/// Returns `x (rows, I)` times the packed weight, `(rows, O)`; `None` if no operator takes it.
fn packed(
    x: &Tensor,
    weight: &QuantizedWeight,
    offsets: &[(i64, f64)],
    recording: bool,
) -> Result<Option<Tensor>> {
    let capability = capability(x.device());
    let plan = plan(weight, false, recording);
    if plan == Plan::Float
        && let Some(y) = gpu::few_rows(x, weight, offsets)?
    {
        return Ok(Some(y));
    }
    Ok(Some(match (&weight.storage, plan) {
        (Storage::Int8 { codes, scales }, Plan::Int8) if int_mm::applies(x, weight) => {
            int_mm::product(x, codes, scales)?
        }
        (Storage::Int8 { codes, scales }, Plan::Split(threshold)) if int_mm::applies(x, weight) => {
            int_mm::split(x, codes, scales, threshold)?
        }
        (Storage::Int8 { codes, scales }, Plan::Float) if int8_pack::applies(x, capability) => {
            int8_pack::product(x, codes, scales)?
        }
        // Its scales are rounded to bf16, but backward would multiply with the exact ones.
        (Storage::Tiled(tiled), Plan::Float) if !recording && int4_pack::fits(x) => {
            int4_pack::product(x, tiled)?
        }
        (Storage::Fp8 { codes, scales }, Plan::Float8)
            if scaled_mm::applies(x, weight, capability) =>
        {
            scaled_mm::product(x, codes, scales, scaled_mm::Scaling::of(capability))?
        }
        _ => return Ok(None),
    }))
}

/// Returns the compute capability; `None` on a CPU, and if the driver does not report it (weights are then
/// dequantized).
fn capability(device: Device) -> Capability {
    match device {
        Device::Cuda(index) => overdrive_sys::cuda::compute_capability(index).ok(),
        _ => None,
    }
}

#[cfg(test)]
mod tests;
