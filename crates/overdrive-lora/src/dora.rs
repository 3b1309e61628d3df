//! The row norms and output factors of DoRA (Liu et al. 2024, "DoRA: Weight-Decomposed Low-Rank Adaptation",
//! arXiv:2402.09353).

use std::sync::PoisonError;

use overdrive_autograd::NoGradGuard;
use overdrive_nn::LinearWeight;
use overdrive_precision::Autocast;
use overdrive_sys::cuda::is_capturing;
use overdrive_sys::engine::is_grad_enabled;
use tch::{Device, Kind, Tensor};

use crate::{LoraAdapter, Result};

/// Returns `‖W + scale · B · A‖` for each row, `(O,)`, in the dtype of A. It is a constant to autograd, as in
/// section 4.3 of the paper.
///
/// It is computed as `‖W‖² + 2·scale·⟨W Aᵀ, B⟩ + scale²·⟨B A Aᵀ, B⟩`. This takes one matmul of the weight with r
/// rows, never materializes `B · A`, and needs no memory of the weight's size.
pub(crate) fn row_norms(weight: &LinearWeight, adapter: &LoraAdapter) -> Result<Tensor> {
    let _no_grad = NoGradGuard::new();
    // The dtypes of autocast are not precise enough for a norm.
    let _exact = match weight.device() {
        Device::Cpu | Device::Cuda(_) => {
            Some(Autocast::new(weight.device()).enabled(false).enter()?)
        }
        _ => None,
    };
    let (a, b, scale) = (&adapter.a, &adapter.b, adapter.scale);
    // In fp16, the squares and their sum could overflow.
    let wide = match a.kind() {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    };
    let (a, b) = (a.f_to_kind(wide)?, b.f_to_kind(wide)?);
    let (squares, product) = squares_and_product(weight, &a)?;
    let gram = b.f_mm(&a.f_mm(&a.f_tr()?)?)?;
    let mixed = product
        .f_mul_scalar(2.0 * scale)?
        .f_add(&gram.f_mul_scalar(scale * scale)?)?
        .f_mul(&b)?
        .f_sum_dim_intlist([1i64].as_slice(), true, wide)?;
    // Rounding may leave a negative number where the sum is zero.
    let norms = squares.f_add(&mixed)?.f_clamp_min(0.0)?.f_sqrt()?;
    Ok(norms.f_flatten(0, -1)?.f_to_kind(adapter.a.kind())?)
}

/// Returns the squared norm of each row of the weight, `(O, 1)`, and the weight times `aᵀ`, `(O, r)`, in the
/// dtype of `a (r, I)`.
fn squares_and_product(weight: &LinearWeight, a: &Tensor) -> Result<(Tensor, Tensor)> {
    let rows = match weight {
        LinearWeight::Quantized(weight) => weight.dequantize(a.kind())?,
        LinearWeight::Dense { .. } => {
            let rows = weight.to_dense(weight.kind().unwrap_or(a.kind()))?;
            if rows.kind() != a.kind() {
                return by_blocks(&rows, a);
            }
            rows
        }
    };
    of_rows(&rows, a)
}

fn of_rows(rows: &Tensor, a: &Tensor) -> Result<(Tensor, Tensor)> {
    // Unlike a sum of squares, the norm needs no temporary of the weight's size.
    let norms = rows.f_norm_scalaropt_dim(2, [1i64].as_slice(), true)?;
    Ok((norms.f_square()?, rows.f_mm(&a.f_tr()?)?))
}

/// Casts the rows block by block, so that a 16-bit weight is never held in 32 bits as a whole.
fn by_blocks(weight: &Tensor, a: &Tensor) -> Result<(Tensor, Tensor)> {
    let [outputs, inputs] = weight.size()[..] else {
        return of_rows(weight, a);
    };
    // 4 MiB of fp32: it stays in a CPU's cache between the cast and the matmul.
    let step = ((1 << 20) / inputs.max(1)).max(1);
    let (mut squares, mut products) = (Vec::new(), Vec::new());
    let mut start = 0;
    while start < outputs {
        let len = step.min(outputs - start);
        let rows = weight.f_narrow(0, start, len)?.f_to_kind(a.kind())?;
        let (square, product) = of_rows(&rows, a)?;
        squares.push(square);
        products.push(product);
        start += len;
    }
    Ok((Tensor::f_cat(&squares, 0)?, Tensor::f_cat(&products, 0)?))
}

/// Row norms, with a cache key of the tensors that they were computed from.
#[derive(Debug)]
pub(crate) struct RowNorms {
    key: Key,
    value: Tensor,
}

/// The bits of the scale, and the addresses and versions of A, B and a dense weight. Quantized weights never change;
/// when one is replaced, [`Adapter::weight_replaced`](overdrive_nn::Adapter::weight_replaced) drops its norms.
type Key = (u64, Vec<(usize, i64)>);

/// Returns [`row_norms`] from the cache, or computes them if a tensor has changed since: the micro-batches of a
/// step and the tokens of a generation share them.
fn cached_row_norms(weight: &LinearWeight, adapter: &LoraAdapter) -> Result<Tensor> {
    let Some(key) = key(weight, adapter) else {
        return row_norms(weight, adapter);
    };
    // Norms from the cache would be constants of a captured training step, which changes A and B.
    if is_capturing() && is_grad_enabled() {
        return row_norms(weight, adapter);
    }
    // The cache is written in one assignment, so a thread that panicked has left it valid.
    let mut cache = adapter
        .row_norms
        .lock()
        .unwrap_or_else(PoisonError::into_inner);
    if let Some(cached) = cache.as_ref().filter(|cached| cached.key == key) {
        return Ok(cached.value.shallow_clone());
    }
    let value = row_norms(weight, adapter)?;
    let copy = value.shallow_clone();
    *cache = Some(RowNorms { key, value });
    Ok(copy)
}

/// Returns `None` for tensors of inference mode, which have no versions.
fn key(weight: &LinearWeight, adapter: &LoraAdapter) -> Option<Key> {
    let dense = match weight {
        LinearWeight::Dense { weight, .. } => Some(weight),
        LinearWeight::Quantized(_) => None,
    };
    let tensors = [&adapter.a, &adapter.b].into_iter().chain(dense);
    // Optimizers change tensors in place, which changes the version but not the address.
    let stamp = |tensor: &Tensor| {
        let version = tensor.f_internal_version().ok()?;
        Some((tensor.data_ptr() as usize, version))
    };
    Some((
        adapter.scale.to_bits(),
        tensors.map(stamp).collect::<Option<_>>()?,
    ))
}

/// Returns the factor of each output, `(O,)`: the learned magnitude divided by the current norm of the row.
pub(crate) fn factor(
    weight: &LinearWeight,
    adapter: &LoraAdapter,
    magnitude: &Tensor,
) -> Result<Tensor> {
    Ok(magnitude.f_div(&cached_row_norms(weight, adapter)?)?)
}
