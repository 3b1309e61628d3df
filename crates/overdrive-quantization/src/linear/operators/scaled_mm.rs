//! `_scaled_mm`: activations and weights in 8-bit floats.

use tch::{Device, Kind, Tensor};

use super::Capability;
use crate::codec::fp8;
use crate::{QuantizedWeight, Result};

/// The divisor of the numbers of outputs and inputs that the operator requires.
const ALIGNMENT: i64 = 16;

/// The scales that the operator itself applies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Scaling {
    /// One for each row of the activations and one for each row of the weight.
    Rows,
    /// None; the sums are multiplied with the scales afterwards.
    After,
}

impl Scaling {
    /// Returns [`Scaling::Rows`] for Hopper and later, on which cuBLAS and CUTLASS scale rows.
    pub(super) fn of(capability: Capability) -> Scaling {
        if capability >= Some((9, 0)) {
            Scaling::Rows
        } else {
            Scaling::After
        }
    }
}

/// Returns `true` if the operator takes these: GPUs have it from Ada on.
pub(super) fn applies(x: &Tensor, weight: &QuantizedWeight, capability: Capability) -> bool {
    capability >= Some((8, 9)) && fits(x, weight)
}

/// Returns `true` if shapes and dtypes suit the operator, for `x (rows, I)`.
pub(super) fn fits(x: &Tensor, weight: &QuantizedWeight) -> bool {
    x.numel() > 0
        && x.kind() != Kind::Double
        && weight.outputs % ALIGNMENT == 0
        && weight.inputs % ALIGNMENT == 0
}

/// Quantizes `x (rows, I)` to e4m3 with one scale a row and returns it times codes `(O, I)` and scales `(O,)`:
/// `(rows, O)`.
pub(super) fn product(
    x: &Tensor,
    codes: &Tensor,
    scales: &Tensor,
    scaling: Scaling,
) -> Result<Tensor> {
    let (x, x_scales) = quantized(x)?;
    let weight = codes.f_view_dtype(Kind::Float8e4m3fn)?.f_tr()?;
    let scales = scales.f_view([1, -1])?;
    let none = None::<&Tensor>;
    if scaling == Scaling::Rows {
        let kind = Kind::BFloat16;
        return Ok(x.f_internal_scaled_mm(&weight, &x_scales, &scales, none, none, kind, false)?);
    }
    let one = Tensor::f_ones([] as [i64; 0], (Kind::Float, x.device()))?;
    let sums = x.f_internal_scaled_mm(&weight, &one, &one, none, none, Kind::Float, false)?;
    Ok(sums.f_mul(&x_scales)?.f_mul(&scales)?)
}

/// Returns `x (rows, I)` in e4m3, and its scales, f32 `(rows, 1)`.
fn quantized(x: &Tensor) -> Result<(Tensor, Tensor)> {
    let x = x.f_to_kind(Kind::Float)?;
    let most = f64::from(fp8::MAX);
    // A row of zeros has zero codes, regardless of the divisor.
    let scales = x
        .f_abs()?
        .f_amax([1], true)?
        .f_clamp_min(1e-30)?
        .f_div_scalar(most)?;
    let codes = x.f_div(&scales)?.f_clamp(-most, most)?;
    let codes = codes.f_to_kind(Kind::Float8e4m3fn)?.f_contiguous()?;
    debug_assert!(
        matches!(x.device(), Device::Cpu | Device::Cuda(_)),
        "where there are such floats"
    );
    Ok((codes, scales))
}
