//! The fused attentions of libtorch, called by their schema names.
#![allow(
    unsafe_code,
    reason = "libtorch's kernels do not check that the shapes of their operands agree"
)]

use overdrive_sys::op::{Output, Value, call_unchecked};
use tch::{Kind, Tensor};

use crate::call::Call;
use crate::{Error, Result};

/// Calls `_scaled_dot_product_flash_attention_for_cpu`: output (B, H, T, D) and log-sum-exp (B, H, T).
pub(crate) fn cpu_flash(call: &Call<'_>) -> Result<(Tensor, Tensor)> {
    let mask = additive(call)?;
    // SAFETY: `Call` has checked dtypes, devices and that the shapes of query, key, value and mask agree; `selection`
    // admits the other options.
    let outputs = unsafe {
        call_unchecked(
            "aten::_scaled_dot_product_flash_attention_for_cpu",
            "",
            &[
                Value::Tensor(&call.query),
                Value::Tensor(&call.key),
                Value::Tensor(&call.value),
                // dropout_p: the kernel has none on a CPU, and `selection` refuses it.
                Value::Float(0.0),
                Value::Bool(call.is_causal()),
                mask.as_ref().map_or(Value::None, Value::Tensor),
                Value::Float(call.scale),
            ],
        )?
    };
    first_two(outputs, "_scaled_dot_product_flash_attention_for_cpu")
}

/// Calls `_scaled_dot_product_efficient_attention` on CUDA.
pub(crate) fn efficient(call: &Call<'_>) -> Result<(Tensor, Tensor)> {
    let mask = match additive(call)? {
        Some(mask) => Some(aligned(call, &mask)?),
        None => None,
    };
    // SAFETY: `Call` has checked dtypes, devices and that the shapes of query, key, value and mask agree; `selection`
    // admits the other options.
    let outputs = unsafe {
        call_unchecked(
            "aten::_scaled_dot_product_efficient_attention",
            "",
            &[
                Value::Tensor(&call.query),
                Value::Tensor(&call.key),
                Value::Tensor(&call.value),
                mask.as_ref().map_or(Value::None, Value::Tensor),
                // compute_log_sumexp: the backward kernel needs it too.
                Value::Bool(call.needs_grad || call.with_lse),
                Value::Float(call.options.dropout_p),
                Value::Bool(call.is_causal()),
                Value::Float(call.scale),
            ],
        )?
    };
    let (output, lse) = first_two(outputs, "_scaled_dot_product_efficient_attention")?;
    // The kernel fills the log-sum-exp up to a multiple of 32 queries.
    let lse = match call.with_lse {
        true => lse.f_narrow(2, 0, call.sizes.queries)?,
        false => lse,
    };
    Ok((output, lse))
}

/// Calls `_scaled_dot_product_cudnn_attention` on CUDA.
pub(crate) fn cudnn(call: &Call<'_>) -> Result<(Tensor, Tensor)> {
    // SAFETY: `Call` has checked dtypes, devices and that the shapes of query, key, value and mask agree; `selection`
    // admits the other options.
    let outputs = unsafe {
        call_unchecked(
            "aten::_scaled_dot_product_cudnn_attention",
            "",
            &[
                Value::Tensor(&call.query),
                Value::Tensor(&call.key),
                Value::Tensor(&call.value),
                Value::None,
                Value::Bool(call.needs_grad || call.with_lse),
                Value::Float(call.options.dropout_p),
                Value::Bool(call.is_causal()),
                // return_debug_mask
                Value::Bool(false),
                Value::Float(call.scale),
            ],
        )?
    };
    let (output, lse) = first_two(outputs, "_scaled_dot_product_cudnn_attention")?;
    let lse = match lse.dim() {
        // (B, H, T, 1)
        4 => lse.f_squeeze_dim(-1)?,
        _ => lse,
    };
    Ok((output, lse))
}

/// Returns the mask as numbers in the query's dtype, which is what the kernels take.
fn additive(call: &Call<'_>) -> Result<Option<Tensor>> {
    let Some(mask) = &call.mask else {
        return Ok(None);
    };
    if mask.kind() != Kind::Bool {
        return Ok(Some(mask.f_to_kind(call.kind)?));
    }
    let zeros = Tensor::f_zeros(mask.size(), (call.kind, call.device))?;
    Ok(Some(zeros.f_masked_fill(
        &mask.f_logical_not()?,
        f64::NEG_INFINITY,
    )?))
}

/// Returns the mask expanded to the scores, in rows that begin at multiples of 16 elements, as the efficient
/// kernel wants them.
fn aligned(call: &Call<'_>, mask: &Tensor) -> Result<Tensor> {
    let sizes = &call.sizes;
    let full = [sizes.batch, sizes.heads, sizes.queries, sizes.keys];
    let filled = (sizes.keys + 15) / 16 * 16;
    let keys = mask.f_expand(
        [mask.size()[0], mask.size()[1], mask.size()[2], sizes.keys],
        false,
    )?;
    // Padded and narrowed again: the stride of the rows keeps the multiple.
    let padded = keys.f_constant_pad_nd([0, filled - sizes.keys])?;
    Ok(padded.f_narrow(3, 0, sizes.keys)?.f_expand(full, false)?)
}

/// Returns the output and log-sum-exp, which every attention of libtorch returns first.
pub(crate) fn first_two(outputs: Vec<Output>, operator: &str) -> Result<(Tensor, Tensor)> {
    let mut outputs = outputs.into_iter();
    match (outputs.next(), outputs.next()) {
        (Some(output), Some(lse)) => Ok((output.into_tensor()?, lse.into_tensor()?)),
        _ => Err(Error::Sys(overdrive_sys::Error::Torch {
            operation: operator.to_owned(),
            message: "it returned fewer than two results".to_owned(),
        })),
    }
}
