use tch::{Kind, Tensor};

use crate::Result;

/// Rounds `number` to the precision of `kind`.
pub(crate) fn rounded(number: f64, kind: Kind) -> Result<f64> {
    // Rounded by libtorch, since Rust has no bf16 or f16 of its own.
    let one = Tensor::f_from_slice(&[number])?.f_to_kind(kind)?;
    Ok(f64::try_from(one.f_get(0)?)?)
}
