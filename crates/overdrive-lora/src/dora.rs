//! Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", arXiv:2402.09353.

use std::sync::PoisonError;

use overdrive_autograd::NoGradGuard;
use overdrive_precision::Autocast;
use tch::{Device, Kind, Tensor};

use crate::{Adapter, BaseWeight, Result};

/// `‖W + scale · B · A‖` of each row, `(O,)`, in the kind of A: a constant, as in section 4.3 of the paper.
///
/// From `‖W‖² + 2·scale·⟨W Aᵀ, B⟩ + scale²·⟨B A Aᵀ, B⟩`, without ever making `B · A`: that costs the base a
/// product with r rows, and no memory of its size.
pub(crate) fn row_lengths(base: &BaseWeight, adapter: &Adapter) -> Result<Tensor> {
    let _no_grad = NoGradGuard::new();
    // Its kinds have too few digits for a length.
    let _exact = match base.device() {
        Device::Cpu | Device::Cuda(_) => Some(Autocast::new(base.device()).enabled(false).enter()?),
        _ => None,
    };
    let (a, b, scale) = (&adapter.a, &adapter.b, adapter.scale);
    // fp16 holds neither the squares nor their sum.
    let wide = match a.kind() {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    };
    let (a, b) = (a.f_to_kind(wide)?, b.f_to_kind(wide)?);
    let (squares, product) = base.rows_by(&a)?;
    let gram = b.f_mm(&a.f_mm(&a.f_tr()?)?)?;
    let mixed = product
        .f_mul_scalar(2.0 * scale)?
        .f_add(&gram.f_mul_scalar(scale * scale)?)?
        .f_mul(&b)?
        .f_sum_dim_intlist([1i64].as_slice(), true, wide)?;
    let lengths = squares.f_add(&mixed)?.f_clamp_min(0.0)?.f_sqrt()?;
    Ok(lengths.f_flatten(0, -1)?.f_to_kind(adapter.a.kind())?)
}

/// Lengths, and what they were computed from.
#[derive(Debug)]
pub(crate) struct Lengths {
    /// The scale's bits, and address and version of A, B and a dense weight. Packed weights never change;
    /// whoever exchanges one drops the lengths.
    key: (u64, Vec<(usize, i64)>),
    value: Tensor,
}

/// [`row_lengths`], computed anew only after an optimizer or anybody else has changed a tensor: passes of
/// one accumulated step and of decoding share them.
fn kept_row_lengths(base: &BaseWeight, adapter: &Adapter) -> Result<Tensor> {
    let Some(key) = key(base, adapter) else {
        return row_lengths(base, adapter);
    };
    // A thread that panicked in between has left nothing half done.
    let mut kept = adapter
        .lengths
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if let Some(kept) = kept.as_ref().filter(|kept| kept.key == key) {
        return Ok(kept.value.shallow_clone());
    }
    let value = row_lengths(base, adapter)?;
    let copy = value.shallow_clone();
    *kept = Some(Lengths { key, value });
    Ok(copy)
}

/// `None` for tensors of inference mode, which have no versions.
fn key(base: &BaseWeight, adapter: &Adapter) -> Option<(u64, Vec<(usize, i64)>)> {
    let dense = match base {
        BaseWeight::Dense { weight, .. } => Some(weight),
        BaseWeight::Quantized(_) => None,
    };
    let tensors = [&adapter.a, &adapter.b].into_iter().chain(dense);
    let stamp = |tensor: &Tensor| {
        let version = tensor.f_internal_version().ok()?;
        Some((tensor.data_ptr() as usize, version))
    };
    Some((
        adapter.scale.to_bits(),
        tensors.map(stamp).collect::<Option<_>>()?,
    ))
}

/// What each output is multiplied by, `(O,)`: the learned magnitude over the length there is.
pub(crate) fn factor(base: &BaseWeight, adapter: &Adapter, magnitude: &Tensor) -> Result<Tensor> {
    Ok(magnitude.f_div(&kept_row_lengths(base, adapter)?)?)
}
