//! Weights with and without an adapter's update.

use overdrive_nn::LinearWeight;
use overdrive_quantization::QuantizedWeight;
use tch::{Kind, Tensor};

use super::report::Requantized;
use crate::{LoraAdapter, Result};

/// Returns the dtype in which a weight is merged.
pub(super) fn wide(base: &LinearWeight) -> Kind {
    match base.kind() {
        Some(Kind::Double) => Kind::Double,
        // In 16 bits, the sum would be rounded before it is scaled or quantized.
        _ => Kind::Float,
    }
}

/// Adds `scale · B · A` to the weight in place.
pub(super) fn add_change(
    weight: &mut Tensor,
    adapter: &LoraAdapter,
    transposed: bool,
    scale: f64,
) -> Result<()> {
    let b = adapter.b.f_detach()?.f_mul_scalar(scale)?;
    let a = adapter.a.f_detach()?;
    let _same = if transposed {
        // (B·A)ᵀ = Aᵀ·Bᵀ: the transposed weight is updated without a copy.
        weight.f_addmm_(&a.f_tr()?, &b.f_tr()?)?
    } else {
        weight.f_addmm_(&b, &a)?
    };
    Ok(())
}

/// Computes `scale · B · A`, `(O, I)`.
pub(crate) fn change(adapter: &LoraAdapter, kind: Kind) -> Result<Tensor> {
    let b = adapter
        .b
        .f_detach()?
        .f_to_kind(kind)?
        .f_mul_scalar(adapter.scale)?;
    Ok(b.f_mm(&adapter.a.f_detach()?.f_to_kind(kind)?)?)
}

/// Computes `factor · (W + scale · B · A)`, `(O, I)`, in fp32 or fp64.
pub(super) fn merged_weight(
    base: &LinearWeight,
    adapter: &LoraAdapter,
    factor: Option<&Tensor>,
) -> Result<Tensor> {
    let kind = wide(base);
    let merged = base.to_dense(kind)?.f_add(&change(adapter, kind)?)?;
    Ok(match factor {
        None => merged,
        Some(factor) => merged.f_mul(&factor.f_unsqueeze(1)?)?.f_to_kind(kind)?,
    })
}

/// Computes `W / factor − scale · B · A`, which undoes [`merged_weight`].
pub(super) fn without(
    weight: &Tensor,
    adapter: &LoraAdapter,
    factor: Option<&Tensor>,
) -> Result<Tensor> {
    let change = change(adapter, weight.kind())?;
    Ok(match factor {
        None => weight.f_sub(&change)?,
        Some(factor) => weight.f_div(&factor.f_unsqueeze(1)?)?.f_sub(&change)?,
    })
}

/// Merges into a quantized weight: dequantizes it, updates it, and quantizes it again by its scheme.
pub(super) fn requantize(
    weight: &QuantizedWeight,
    adapter: &LoraAdapter,
    factor: Option<&Tensor>,
) -> Result<(QuantizedWeight, Requantized)> {
    let before = weight.dequantize(Kind::Float)?;
    let base = LinearWeight::Dense {
        weight: before.shallow_clone(),
        transposed: false,
    };
    let merged = merged_weight(&base, adapter, factor)?;
    let packed = QuantizedWeight::quantize(&merged, weight.scheme())?
        .with_activations(weight.activations())?;
    let lost = norm(&packed.dequantize(Kind::Float)?.f_sub(&merged)?)?;
    let change = norm(&merged.f_sub(&before)?)?;
    // An exact result has no error, regardless of the divisor.
    let ratio = |lost: f64, whole: f64| if lost == 0.0 { 0.0 } else { lost / whole };
    let error = Requantized {
        scheme: weight.scheme(),
        error: ratio(lost, norm(&merged)?),
        error_of_change: ratio(lost, change),
    };
    Ok((packed, error))
}

fn norm(tensor: &Tensor) -> Result<f64> {
    Ok(f64::try_from(tensor.f_norm()?)?)
}

pub(super) fn is_finite(tensor: &Tensor) -> bool {
    let all = || bool::try_from(tensor.f_isfinite()?.f_all()?);
    // A tensor that cannot be checked must not be merged.
    all().unwrap_or(false)
}
