//! Copies and dtypes of tensors.

use tch::{Kind, Tensor};

use crate::Result;

/// Returns a copy of a tensor.
pub(crate) fn copy_of(tensor: &Tensor) -> Result<Tensor> {
    let mut copy = tensor.f_empty_like()?;
    copy.f_copy_(tensor)?;
    Ok(copy)
}

/// Returns the dtype to which libtorch promotes two dtypes.
pub(crate) fn promoted(a: Kind, b: Kind) -> Kind {
    // bf16 and f16 have no common half precision, so libtorch promotes them to f32.
    match (a, b) {
        _ if a == b => a,
        (Kind::Double, _) | (_, Kind::Double) => Kind::Double,
        _ => Kind::Float,
    }
}

/// Returns `true` if the functions of this crate take tensors of this floating-point dtype.
pub(crate) fn is_floating(kind: Kind) -> bool {
    matches!(
        kind,
        Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16
    )
}
