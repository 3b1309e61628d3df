//! The fused attentions of libtorch, called by their schema names.
#![allow(
    unsafe_code,
    reason = "libtorch's kernels do not check that the shapes of their operands agree"
)]

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

/// Calls `_scaled_dot_product_efficient_attention` on CUDA, which has no grouped heads: a single query of the heads that
/// share a key goes as several queries of one head, and for more queries the keys are copied for each head.
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
        // compute_log_sumexp: the backward kernel needs it too.
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
    // The kernel fills the log-sum-exp up to a multiple of 32 queries.
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

/// Returns `mask` expanded to the scores, of size `full`, in rows that begin at multiples of 16 elements, as the
/// efficient kernel wants them.
fn aligned(mask: &Tensor, full: [i64; 4]) -> Result<Tensor> {
    let keys = full[3];
    let filled = (keys + 15) / 16 * 16;
    // Padded and narrowed again: the stride of the rows keeps the multiple.
    let padded = mask.f_constant_pad_nd([0, filled - keys])?;
    Ok(padded.f_narrow(3, 0, keys)?.f_expand(full, false)?)
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

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use tch::{Device, Kind, Tensor};

    use super::efficient;
    use crate::call::Call;
    use crate::paged_packed::tests::{StandIn, assert_close, with};
    use crate::{AttentionOptions, Backend, attention_with_lse};

    #[test]
    fn grouped_heads_with_a_mask_equal_the_math_back_end() {
        let numbers = |shape: &[i64], seed: f64| {
            let count: i64 = shape.iter().product();
            let at = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 12.9898 + seed;
            ((at.sin() * 43_758.545_3).frac() * 2.0).reshape(shape)
        };
        let (batch, heads, kv_heads, keys) = (3, 6, 2, 21);
        for queries in [1, 4] {
            let query = numbers(&[batch, heads, queries, 8], 0.1);
            let (key, value) = (
                numbers(&[batch, kv_heads, keys, 8], 0.2),
                numbers(&[batch, kv_heads, keys, 8], 0.3),
            );
            let seen = |shape: &[i64]| {
                let seen = numbers(shape, 0.4).gt(-0.5);
                // Every query sees a key.
                let _first = seen.narrow(3, 0, 1).fill_(1);
                seen
            };
            let masks = [
                None,
                Some(seen(&[1, 1, 1, keys])),
                Some(seen(&[batch, 1, 1, keys])),
                Some(seen(&[batch, 1, queries, keys])),
                Some(seen(&[1, heads, queries, keys])),
                Some(seen(&[batch, heads, queries, keys])),
                Some(numbers(&[batch, heads, queries, keys], 0.5)),
            ];
            for mask in &masks {
                let options = AttentionOptions {
                    mask: mask.as_ref(),
                    backend: Backend::Math,
                    ..AttentionOptions::default()
                };
                let expected = attention_with_lse(&query, &key, &value, &options).unwrap();
                let call = Call::new(&query, &key, &value, &options, true).unwrap();
                let (output, lse) = with(StandIn::Computes, || efficient(&call).unwrap());
                let name = format!("{queries} {:?}", mask.as_ref().map(Tensor::size));
                assert_close(&output, &expected.0, 1e-12, &name);
                assert_close(&lse, &expected.1, 1e-12, &name);
            }
        }
    }
}
