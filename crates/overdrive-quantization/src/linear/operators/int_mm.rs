//! `_int_mm`: codes of 8 bits times activations in 8 bits.

use tch::{Device, Kind, Tensor};

use crate::{QuantizedWeight, Result};

/// Returns `true` if `_int_mm` takes these: on a GPU sizes are multiples of 8.
pub(super) fn applies(x: &Tensor, weight: &QuantizedWeight) -> bool {
    let aligned = weight.inputs % 8 == 0 && weight.outputs % 8 == 0;
    x.numel() > 0 && x.kind() != Kind::Double && (x.device() == Device::Cpu || aligned)
}

/// The minimum number of rows that `_int_mm` takes on a GPU: more than 16, and a multiple of 8.
const LEAST_ROWS: i64 = 24;

/// Quantizes `x (rows, I)` by row and returns it times the codes, in f32 `(rows, O)`.
pub(super) fn product(x: &Tensor, codes: &Tensor, scales: &Tensor) -> Result<Tensor> {
    let x = x.f_to_kind(Kind::Float)?;
    let most = x.f_abs()?.f_amax([1], true)?;
    // A row of zeros has zero codes, regardless of the divisor.
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

/// Like [`product`], but with the columns that reach the threshold in full precision. With an infinite threshold there
/// are none.
pub(super) fn split(x: &Tensor, codes: &Tensor, scales: &Tensor, threshold: f64) -> Result<Tensor> {
    let most = x.f_abs()?.f_amax([0], true)?;
    // An infinite activation does not reach an infinite threshold, which stands for "no outliers".
    let large = match threshold.is_finite() {
        true => most.f_ge(threshold)?,
        false => most.f_gt(threshold)?,
    };
    let rest = x.f_masked_fill(&large, 0.0)?;
    let y = product(&rest, codes, scales)?;
    let columns = large.f_view([-1])?.f_nonzero()?.f_view([-1])?;
    let dense = codes
        .f_index_select(1, &columns)?
        .f_to_kind(Kind::Float)?
        .f_mul(&scales.f_unsqueeze(1)?)?;
    let x = x.f_index_select(1, &columns)?.f_to_kind(Kind::Float)?;
    Ok(y.f_add(&x.f_matmul(&dense.f_tr()?)?)?)
}
