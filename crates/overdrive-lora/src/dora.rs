//! Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation", arXiv:2402.09353.

use overdrive_autograd::NoGradGuard;
use tch::{Kind, Tensor};

use crate::{Adapter, BaseWeight, Result};

/// `‖W + scale · B · A‖` of each row, `(O,)`, in the kind of A: a constant, as in section 4.3 of the paper.
///
/// From `‖W‖² + 2·scale·⟨W Aᵀ, B⟩ + scale²·⟨B A Aᵀ, B⟩`, without ever making `B · A`: that costs the base a
/// product with r rows, and no memory of its size.
pub(crate) fn row_lengths(base: &BaseWeight, adapter: &Adapter) -> Result<Tensor> {
    let _no_grad = NoGradGuard::new();
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

/// What each output is multiplied by, `(O,)`: the learned magnitude over the length there is.
pub(crate) fn factor(base: &BaseWeight, adapter: &Adapter, magnitude: &Tensor) -> Result<Tensor> {
    Ok(magnitude.f_div(&row_lengths(base, adapter)?)?)
}
