use tch::Tensor;

use crate::{Error, QuantizedWeight, Result};

/// `x · weightᵀ + bias` with a quantized weight.
///
/// `x (…, I)`, `bias (O,)`; the result is `(…, O)` of the kind of `x` (under autocast of its kind). It
/// can be differentiated in `x` and `bias`; the weight is frozen.
///
/// # Errors
/// [`Error::BadInput`] if shapes or kinds do not fit.
pub fn linear(x: &Tensor, weight: &QuantizedWeight, bias: Option<&Tensor>) -> Result<Tensor> {
    joint_linear(x, &[weight], &[bias])
}

/// Several maps of the same `x`, their results side by side `(…, ΣO)`: the activations are read and
/// quantized once.
///
/// # Errors
/// As [`linear`]; [`Error::BadInput`] for no weight, or another number of biases.
pub fn joint_linear(
    x: &Tensor,
    weights: &[&QuantizedWeight],
    biases: &[Option<&Tensor>],
) -> Result<Tensor> {
    if weights.is_empty() || weights.len() != biases.len() {
        return Err(Error::BadInput {
            name: "weights",
            found: format!("{} with {} biases", weights.len(), biases.len()),
            expected: "at least one, and a bias or `None` for each".to_owned(),
        });
    }
    let each = weights.iter().zip(biases).map(|(weight, bias)| {
        let dense = weight.dequantize(x.kind())?;
        Ok(x.f_linear(&dense, *bias)?)
    });
    let each: Vec<Tensor> = each.collect::<Result<_>>()?;
    Ok(Tensor::f_cat(&each, -1)?)
}
