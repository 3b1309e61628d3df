//! Products by libtorch's operators: on a GPU, in f64, and of nothing.

use tch::{Device, Kind, Tensor};

use super::plan::{Plan, plan};
use crate::weight::Storage;
use crate::{QuantizedWeight, Result};

/// Rows up to which 4 bits may take activations in 8 bits; operators do not.
pub(super) fn forward(
    x: &Tensor,
    weights: &[&QuantizedWeight],
    biases: &[Option<&Tensor>],
    compute: Kind,
    recording: bool,
) -> Result<Tensor> {
    let x = x.f_to_kind(compute)?;
    let mut results = Vec::with_capacity(weights.len());
    for (weight, bias) in weights.iter().zip(biases) {
        let bias = bias.map(|bias| bias.f_to_kind(compute)).transpose()?;
        results.push(one(&x, weight, bias.as_ref(), recording)?);
    }
    match <[Tensor; 1]>::try_from(results) {
        Ok([only]) => Ok(only),
        Err(results) => Ok(Tensor::f_cat(&results, -1)?),
    }
}

fn one(
    x: &Tensor,
    weight: &QuantizedWeight,
    bias: Option<&Tensor>,
    recording: bool,
) -> Result<Tensor> {
    let mut size = x.size();
    if let Some(last) = size.last_mut() {
        *last = weight.outputs;
    }
    let y = match (&weight.storage, plan(weight, false, recording)) {
        (Storage::Int8 { codes, scales }, Plan::Int8) if multiplies(x, weight) => {
            let rows = x.f_reshape([-1, weight.inputs])?;
            int8(&rows, codes, scales)?
        }
        (Storage::Int8 { codes, scales }, Plan::Split(threshold)) if multiplies(x, weight) => {
            let rows = x.f_reshape([-1, weight.inputs])?;
            split(&rows, codes, scales, threshold)?
        }
        _ => return Ok(x.f_linear(&weight.dequantize(x.kind())?, bias)?),
    };
    let y = y.f_view(size.as_slice())?.f_to_kind(x.kind())?;
    Ok(match bias {
        Some(bias) => y.f_add(bias)?,
        None => y,
    })
}

/// Whether `_int_mm` takes it: on a GPU sizes are multiples of 8.
fn multiplies(x: &Tensor, weight: &QuantizedWeight) -> bool {
    let aligned = weight.inputs % 8 == 0 && weight.outputs % 8 == 0;
    x.numel() > 0 && x.kind() != Kind::Double && (x.device() == Device::Cpu || aligned)
}

/// Rows that `_int_mm` needs on a GPU: more than 16, and a multiple of 8.
const LEAST_ROWS: i64 = 24;

/// `x (rows, I)` quantized by row, times the codes, in f32 `(rows, O)`.
fn int8(x: &Tensor, codes: &Tensor, scales: &Tensor) -> Result<Tensor> {
    let x = x.f_to_kind(Kind::Float)?;
    let most = x.f_abs()?.f_amax([1], true)?;
    // A row of zeros has codes of zero, whatever it is divided by.
    let inverse = most
        .f_clamp_min(1e-30)?
        .f_reciprocal()?
        .f_mul_scalar(127.0)?;
    let quantized = x.f_mul(&inverse)?.f_round()?.f_to_kind(Kind::Int8)?;
    let rows = quantized.size()[0];
    let padded = match x.device() {
        Device::Cpu => rows,
        _ => ((rows + 7) / 8 * 8).max(LEAST_ROWS),
    };
    let quantized = quantized.f_constant_pad_nd([0, 0, 0, padded - rows])?;
    let sums = quantized
        .f_internal_int_mm(&codes.f_tr()?)?
        .f_narrow(0, 0, rows)?;
    let y = sums
        .f_to_kind(Kind::Float)?
        .f_mul(&most.f_div_scalar(127.0)?)?;
    Ok(y.f_mul(scales)?)
}

/// The same, with the columns beyond the threshold in full precision.
fn split(x: &Tensor, codes: &Tensor, scales: &Tensor, threshold: f64) -> Result<Tensor> {
    let large = x.f_abs()?.f_amax([0], true)?.f_gt(threshold)?;
    let rest = x.f_masked_fill(&large, 0.0)?;
    let y = int8(&rest, codes, scales)?;
    let columns = large.f_view([-1])?.f_nonzero()?.f_view([-1])?;
    let dense = codes
        .f_index_select(1, &columns)?
        .f_to_kind(Kind::Float)?
        .f_mul(&scales.f_unsqueeze(1)?)?;
    let x = x.f_index_select(1, &columns)?.f_to_kind(Kind::Float)?;
    Ok(y.f_add(&x.f_matmul(&dense.f_tr()?)?)?)
}
