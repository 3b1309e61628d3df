//! The fused attentions of libtorch, called by their schema names.
#![allow(
    unsafe_code,
    reason = "libtorch's kernels do not check that the shapes of their operands agree"
)]

use overdrive_autograd::register_hook;
use overdrive_sys::op::{Output, Value, call_unchecked};
use tch::{Kind, Tensor};

use crate::call::{Call, Sizes};
use crate::paged_packed::run;
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
                // dropout_p: the CPU kernel does not support dropout, and `selection` refuses it.
                Value::Float(0.0),
                Value::Bool(call.is_causal()),
                mask.as_ref().map_or(Value::None, Value::Tensor),
                Value::Float(call.scale),
            ],
        )?
    };
    first_two(outputs, "_scaled_dot_product_flash_attention_for_cpu")
}

/// Calls `_scaled_dot_product_efficient_attention` on CUDA. It does not support grouped heads: a single query of the
/// heads that share a key is passed as several queries of one head, and for more queries the keys are copied for each
/// head.
pub(crate) fn efficient(call: &Call<'_>) -> Result<(Tensor, Tensor)> {
    let Sizes {
        batch,
        heads,
        kv_heads,
        queries,
        keys,
        key_dim,
        value_dim,
    } = call.sizes;
    let group = heads / kv_heads;
    let by_key = group > 1 && queries == 1 && !call.is_causal();
    let (rows, count) = match by_key {
        true => (kv_heads, group),
        false => (heads, queries),
    };
    let mask = match additive(call)? {
        Some(mask) => {
            // A mask for all heads, or one for each.
            let masks = if mask.size()[1] == 1 { 1 } else { heads };
            let size = mask.size();
            let mask = mask.f_expand([size[0], masks, size[2], keys], false)?;
            let mask = match by_key && masks > 1 {
                true => mask.f_reshape([mask.size()[0], rows, count, keys])?,
                false => mask,
            };
            Some(aligned(&mask, [batch, rows, count, keys])?)
        }
        None => None,
    };
    let repeated = |tensor: &Tensor| match group {
        1 => Ok(tensor.shallow_clone()),
        _ if by_key => Ok(tensor.shallow_clone()),
        group => {
            let size = tensor.size();
            let spread = [batch, kv_heads, group, keys, size[3]];
            let spread = tensor.f_unsqueeze(2)?.f_expand(spread, false)?;
            spread.f_reshape([batch, heads, keys, size[3]])
        }
    };
    let query = call.query.f_reshape([batch, rows, count, key_dim])?;
    let (key, value) = (repeated(&call.key)?, repeated(&call.value)?);
    let arguments = [
        Value::Tensor(&query),
        Value::Tensor(&key),
        Value::Tensor(&value),
        mask.as_ref().map_or(Value::None, Value::Tensor),
        // compute_log_sumexp: the backward kernel also needs it.
        Value::Bool(call.needs_grad || call.with_lse),
        Value::Float(call.options.dropout_p),
        Value::Bool(call.is_causal()),
        Value::Float(call.scale),
    ];
    // SAFETY: `Call` has checked dtypes, devices and that the shapes of query, key, value and mask agree; `selection`
    // admits the other options.
    let (output, lse) =
        unsafe { run("aten::_scaled_dot_product_efficient_attention", &arguments)? };
    let output = output.f_reshape([batch, heads, queries, value_dim])?;
    // The kernel pads the log-sum-exp to a multiple of 32 queries.
    let lse = match call.with_lse {
        true => lse
            .f_narrow(2, 0, count)?
            .f_reshape([batch, heads, queries])?,
        false => lse,
    };
    Ok((output, lse))
}

/// Calls `_scaled_dot_product_cudnn_attention` on CUDA.
pub(crate) fn cudnn(call: &Call<'_>) -> Result<(Tensor, Tensor)> {
    let arguments = [
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
    ];
    // SAFETY: `Call` has checked dtypes, devices and that the shapes of query, key, value and mask agree; `selection`
    // admits the other options.
    let (output, lse) = unsafe { run("aten::_scaled_dot_product_cudnn_attention", &arguments)? };
    if output.requires_grad() {
        bring_gradient_to_order(&output)?;
    }
    let lse = match lse.dim() {
        // (B, H, T, 1)
        4 => lse.f_squeeze_dim(-1)?,
        _ => lse,
    };
    Ok((output, lse))
}

/// Gives the gradient of `output` the memory layout of `output` before the node of `output` receives it.
///
/// libtorch (2.11 and 2.13) caches the plan of cuDNN's backward by the sizes and the strides of query, key and value.
/// The plan also depends on the strides of the gradient, which the cache key lacks: if the gradients of two calls of
/// the same shape have different layouts, the second call returns wrong gradients without an error. The layout of the
/// output follows the query's, so with this every cache key has one layout of gradients.
fn bring_gradient_to_order(output: &Tensor) -> Result<()> {
    let (size, strides) = (output.size(), output.stride());
    let _stays = register_hook(output, move |gradient| {
        let found = gradient.stride();
        // The stride of a dimension of one element is never used.
        let mut dimensions = size.iter().zip(&strides).zip(&found);
        if dimensions.all(|((&size, wanted), found)| size == 1 || wanted == found) {
            return Ok(None);
        }
        let options = (gradient.f_kind()?, gradient.device());
        let mut ordered = Tensor::f_empty_strided(&size, &strides, options)?;
        ordered.f_copy_(gradient)?;
        Ok(Some(ordered))
    })?;
    Ok(())
}

/// Returns the mask as addends in the query's dtype, as the kernels expect.
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

/// Returns `mask` expanded to the scores, of size `full`, in rows that begin at multiples of 16 elements, as the
/// efficient kernel expects.
fn aligned(mask: &Tensor, full: [i64; 4]) -> Result<Tensor> {
    let keys = full[3];
    let filled = (keys + 15) / 16 * 16;
    // Padded, then narrowed: the stride of the rows stays a multiple.
    let padded = mask.f_constant_pad_nd([0, filled - keys])?;
    Ok(padded.f_narrow(3, 0, keys)?.f_expand(full, false)?)
}

/// Returns the output and log-sum-exp, the first two results of every attention of libtorch.
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

#[cfg(test)]
pub(crate) mod tests;
