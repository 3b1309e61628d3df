//! Decoding with key counts that only the device knows.
#![allow(
    unsafe_code,
    reason = "libtorch's kernels check neither cumulative lengths nor all shapes"
)]

use overdrive_autograd::NoGradGuard;
use overdrive_core::Error as Common;
use overdrive_sys::op::Value;
use tch::{Kind, Tensor};

use crate::call::{shape_error, unresolved_limits};
use crate::gpu;
use crate::paged_packed::{flash_limits, run, takes_packs};
use crate::{Alignment, AttentionOptions, Backend, Error, Result};

/// The number of keys in each row of a cache, on its device, for captured steps, which depend on no host values.
///
/// Create it once for all layers of a step, whose keys have the same strides.
#[derive(Debug)]
pub struct DeviceLengths {
    /// i32 `(B,)`.
    counts: Tensor,
    /// The numbers `0..=B`, the offsets of single queries.
    rows: Tensor,
    key_starts: Tensor,
    /// The rows of one sequence's keys, in steps of the stride of a key.
    step: i64,
}

impl DeviceLengths {
    /// Creates it from the number of filled keys in each row of `keys (B, H_kv, S, D)`, integers `(B,)`. The host does
    /// not read them; the result for a number above S is undefined.
    ///
    /// # Errors
    /// [`Error::Common`] for another shape; [`Error::Tch`] from libtorch.
    pub fn new(counts: &Tensor, keys: &Tensor) -> Result<DeviceLengths> {
        let Some([batch, step]) = row_step(keys) else {
            let expected = "(B, heads, length, dim) whose rows are whole numbers of keys apart";
            return Err(shape_error("keys", keys, expected.to_owned()));
        };
        if counts.size() != [batch] {
            let expected = format!("[{batch}], one count for each row");
            return Err(shape_error("counts", counts, expected));
        }
        let options = (Kind::Int, keys.device());
        let rows = Tensor::f_arange(batch + 1, options)?;
        Ok(DeviceLengths {
            counts: counts.f_to_kind(Kind::Int)?.f_contiguous()?,
            key_starts: rows.f_mul_scalar(step)?,
            rows,
            step,
        })
    }
}

/// Returns the number of rows, and the distance of their keys in keys; `None` if the kernel cannot address them.
fn row_step(keys: &Tensor) -> Option<[i64; 2]> {
    let (size, stride) = (keys.size(), keys.stride());
    let (&[batch, _, length, _], &[row, _, key, one]) = (size.as_slice(), stride.as_slice()) else {
        return None;
    };
    // The stride of a single row is meaningless.
    let row = if batch > 1 { row } else { length * key };
    let fits = one == 1 && key > 0 && row > 0 && row % key == 0;
    let step = fits.then(|| row / key)?;
    (step.checked_mul(batch)? < i64::from(i32::MAX)).then_some([batch, step])
}

/// Returns the attention of the new queries of each row over its first keys, whose number is in `lengths`: query
/// (B, H, T, D), keys and values (B, H_kv, S, D), output (B, H, T, D) and log-sum-exp (B, H, T). The queries belong to
/// the last T keys. No gradient is recorded, and the host does not wait for the device; only filled keys are read, in
/// place.
///
/// On CUDA it runs libtorch's flash attention or, if the kernels of overdrive-gpu are on (by default on Hopper), one of
/// these, for up to 16 queries, which also supports f32, a softcap and sink logits. Returns `None` if neither supports
/// all options, or on another device; use a mask then.
///
/// # Errors
/// [`Error::Common`] for tensors that do not fit.
pub fn attention_at_lengths(
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    lengths: &DeviceLengths,
    options: &AttentionOptions<'_>,
) -> Result<Option<(Tensor, Tensor)>> {
    let _no_grad = NoGradGuard::new();
    if let Some(results) = gpu::at_lengths([query, keys, values], &lengths.counts, options)? {
        return Ok(Some(results));
    }
    let kind = query.f_kind()?;
    let dim = query.size().last().copied().unwrap_or(0);
    let limits = unresolved_limits(options);
    let able = takes_packs(query.device())
        && matches!(options.backend, Backend::Auto | Backend::Flash)
        && matches!(kind, Kind::Half | Kind::BFloat16)
        && dim % 8 == 0
        && dim <= 256
        && options.mask.is_none()
        && options.softcap.is_none()
        && options.sinks.is_none()
        && options.alibi_slopes.is_none()
        && options.dropout_p == 0.0
        && options.alignment == Alignment::BottomRight
        && limits.sink_tokens == 0;
    if !able {
        return Ok(None);
    }
    let (q, k) = (query.size(), keys.size());
    let sizes = match (q.as_slice(), k.as_slice()) {
        (&[batch, heads, queries, _], &[k_batch, k_heads, longest, k_dim]) => {
            let fits = queries > 0
                && (k_batch, k_dim) == (batch, dim)
                && k_heads > 0
                && heads % k_heads == 0
                && lengths.counts.size() == [batch];
            fits.then_some((batch, heads, queries, longest))
        }
        _ => None,
    };
    let Some((batch, heads, queries, longest)) = sizes else {
        let expected = "(B, heads, queries, dim) with the rows and channels of the keys".to_owned();
        return Err(shape_error("query", query, expected));
    };
    if values.size() != k || (values.f_kind()?, keys.f_kind()?) != (kind, kind) {
        let expected = format!("{k:?} in {kind:?}, as the keys and the query are");
        return Err(Error::Common(Common::option(
            "values",
            format!("{:?} in {:?}", values.size(), values.f_kind()?),
            expected,
        )));
    }
    let step = |tensor: &Tensor| row_step(tensor).map(|[_, step]| step);
    if step(keys) != Some(lengths.step) || step(values) != Some(lengths.step) {
        return Ok(None);
    }
    // Keys in the order of their addresses, regardless of their row; the kernel gets the beginning of each row.
    let flat = |tensor: &Tensor| {
        let (size, stride) = (tensor.size(), tensor.stride());
        let all = (size[0] - 1) * lengths.step + size[2];
        tensor.f_as_strided([all, size[1], size[3]], [stride[2], stride[1], 1], None)
    };
    let (one, query_starts) = match queries {
        1 => (
            query.f_detach()?.f_select(2, 0)?,
            lengths.rows.shallow_clone(),
        ),
        _ => (
            query.f_detach()?.f_transpose(1, 2)?.f_flatten(0, 1)?,
            lengths.rows.f_mul_scalar(queries)?,
        ),
    };
    let one = match one.stride().last() {
        Some(1) => one,
        _ => one.f_contiguous()?,
    };
    let (flat_keys, flat_values) = (flat(keys)?, flat(values)?);
    let scale = crate::call::scale(options, dim)?;
    let [left, right] = flash_limits(limits, queries == 1);
    let arguments = [
        Value::Tensor(&one),
        Value::Tensor(&flat_keys),
        Value::Tensor(&flat_values),
        Value::Tensor(&query_starts),
        Value::Tensor(&lengths.key_starts),
        Value::Int(queries),
        Value::Int(longest),
        Value::Float(0.0),
        Value::Bool(right == 0),
        // return_debug_mask
        Value::Bool(false),
        Value::Float(scale),
        Value::Int(left),
        Value::Int(right),
        // seqused_k
        Value::Tensor(&lengths.counts),
    ];
    // SAFETY: shapes, dtypes and strides are checked above, and every row begins inside of the keys; the counts are
    // the caller's promise, as for `index_copy_` on a device.
    let (output, lse) = unsafe { run("aten::_flash_attention_forward", &arguments)? };
    let output = output.f_view([batch, queries, heads, dim])?;
    let lse = lse.f_view([heads, batch, queries])?;
    Ok(Some((output.f_transpose(1, 2)?, lse.f_transpose(0, 1)?)))
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use tch::{Device, Kind, Tensor};

    use super::{DeviceLengths, attention_at_lengths};
    use crate::paged_packed::tests::{StandIn, assert_close, with};
    use crate::{AttentionOptions, Window, attention_decode};

    #[test]
    fn lengths_on_the_device_equal_lengths_on_the_host() {
        let random = |shape: [i64; 4]| {
            let count: i64 = shape.iter().product();
            let at = Tensor::arange(count, (Kind::Double, Device::Cpu)) * 12.9898;
            ((at.sin() * 43_758.545_3).frac() * 2.0).reshape(shape)
        };
        let causal = AttentionOptions::causal();
        let windowed = AttentionOptions {
            window: Window::sliding(5),
            scale: Some(0.3),
            ..causal
        };
        for (batch, queries, options) in [
            (1, 1, causal),
            (3, 1, causal),
            (3, 1, windowed),
            (3, 4, causal),
            (2, 4, windowed),
        ] {
            let filled = &[7_usize, 20, 4][..batch];
            let counts: Vec<i64> = filled.iter().map(|count| *count as i64).collect();
            let batch = batch as i64;
            for kind in [Kind::Half, Kind::BFloat16] {
                // The first rows of a larger cache.
                let whole = || random([4, 2, 20, 16]).to_kind(kind);
                let keys = whole().narrow(0, 0, batch);
                let values = whole().flip([2_i64]).contiguous().narrow(0, 0, batch);
                let query = random([batch, 6, queries, 16]).to_kind(kind);
                let lengths = DeviceLengths::new(&Tensor::from_slice(&counts), &keys).unwrap();
                let expected =
                    attention_decode(&query, &keys, &values, Some(filled), &options).unwrap();
                let of = || attention_at_lengths(&query, &keys, &values, &lengths, &options);
                // A CPU has no such kernel.
                assert!(of().unwrap().is_none());
                let found = with(StandIn::Computes, || of().unwrap().unwrap());
                // The lengths of the host go the same way, in one call for all rows.
                let from_host = with(StandIn::Computes, || {
                    attention_decode(&query, &keys, &values, Some(filled), &options).unwrap()
                });
                for (output, lse) in [found, from_host] {
                    let name = format!("{batch} {queries} {kind:?}");
                    assert_close(&output, &expected.0, 4e-2, &name);
                    assert_close(&lse, &expected.1, 4e-2, &name);
                }
            }
        }
        let keys = random([2, 1, 4, 8]);
        assert!(DeviceLengths::new(&Tensor::from_slice(&[1_i64]), &keys).is_err());
        // The second row does not begin at a key.
        let odd = random([2, 1, 4, 9]).as_strided([2, 1, 3, 8], [13, 8, 8, 1], None);
        assert!(DeviceLengths::new(&Tensor::from_slice(&[1_i64, 1]), &odd).is_err());
    }
}
