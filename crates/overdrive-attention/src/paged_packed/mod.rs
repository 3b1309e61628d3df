//! Attention over a pool of blocks in one call for all sequences, on CUDA.
//!
//! libtorch 2.11 has a flash kernel that supports a block table, but no operator that exposes it. In each layer, the
//! blocks of all sequences are gathered into one pack, and the kernel gets the beginning of each sequence and its
//! number of filled keys. Nothing waits for the device: the host knows all lengths, and the tables are on the device
//! from the beginning of the step.
#![allow(
    unsafe_code,
    reason = "libtorch's kernels check neither cumulative lengths nor all shapes"
)]

use overdrive_sys::op::{Value, call_unchecked};
use tch::{Device, Kind, Tensor};

use crate::call::unresolved_limits;
use crate::kernel::Limits;
use crate::libtorch::first_two;
use crate::paged::PagedCall;
use crate::paged_layout::DeviceTables;
use crate::{Backend, Result};

/// The kernels that take a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum PackedKernel {
    Flash,
    Efficient,
}

/// Returns the kernel for a call on CUDA; `None` if neither supports all of its options.
pub(crate) fn packed_kernel(call: &PagedCall<'_>) -> Option<PackedKernel> {
    let (options, sizes) = (call.options, call.sizes);
    let Limits {
        left,
        right,
        sink_tokens,
    } = unresolved_limits(options);
    let kind = call.query.kind();
    let plain = sizes.key_dim == sizes.value_dim
        && sizes.queries > 0
        && options.softcap.is_none()
        && options.sinks.is_none()
        // libtorch's flash kernel is compiled without ALiBi, and the efficient kernel does not have it.
        && options.alibi_slopes.is_none()
        && sink_tokens == 0;
    let is = |backend| options.backend == Backend::Auto || options.backend == backend;
    let flash = is(Backend::Flash)
        && matches!(kind, Kind::Half | Kind::BFloat16)
        && sizes.key_dim % 8 == 0
        && sizes.key_dim <= 256;
    let efficient = is(Backend::Efficient)
        && matches!(kind, Kind::Float | Kind::Half | Kind::BFloat16)
        // Its window is relative to the last key that a query sees.
        && (right == Some(0) || (right.is_none() && left.is_none()));
    match (plain, flash, efficient) {
        (true, true, _) => Some(PackedKernel::Flash),
        (true, false, true) => Some(PackedKernel::Efficient),
        _ => None,
    }
}

/// Returns the output (N, H, D) and log-sum-exp (H, N).
pub(crate) fn packed(
    call: &PagedCall<'_>,
    tables: &DeviceTables,
    kernel: PackedKernel,
) -> Result<(Tensor, Tensor)> {
    match kernel {
        PackedKernel::Flash => flash(call, tables),
        PackedKernel::Efficient => efficient(call, tables),
    }
}

/// Returns the blocks of all sequences, one after another: (keys, H_kv · `copies`, D), in one launch.
fn gathered(blocks: &Tensor, tables: &DeviceTables, copies: i64) -> Result<Tensor> {
    let by_key = blocks.f_transpose(1, 2)?;
    let by_key = match copies {
        1 => by_key,
        copies => {
            let [all, rows, heads, dim] = sizes(&by_key);
            let spread = [all, rows, heads, copies, dim];
            by_key.f_unsqueeze(3)?.f_expand(spread, false)?
        }
    };
    let gathered = by_key.f_index_select(0, &tables.blocks)?;
    let [_, _, heads, dim] = sizes(&blocks.f_transpose(1, 2)?);
    Ok(gathered.f_view([-1, heads * copies, dim])?)
}

fn sizes(tensor: &Tensor) -> [i64; 4] {
    let size = tensor.size();
    [size[0], size[1], size[2], size[3]]
}

/// Returns flash-attn's limits of a window, where -1 is no limit. If `is_single`, each sequence has one query, which
/// has no key to its right, so the right limit can be -1: the kernel splits the keys among its blocks, and reads the
/// keys of grouped heads once, only if both limits are -1.
pub(crate) fn flash_limits(limits: Limits, is_single: bool) -> [i64; 2] {
    let Limits { left, right, .. } = limits;
    let right = match (is_single, left) {
        (true, None) => None,
        _ => right,
    };
    [left, right].map(|limit| limit.map_or(-1, |limit| i64::try_from(limit).unwrap_or(-1)))
}

fn flash(call: &PagedCall<'_>, tables: &DeviceTables) -> Result<(Tensor, Tensor)> {
    // The tables omit sequences without queries.
    let [left, right] = flash_limits(unresolved_limits(call.options), tables.longest_queries == 1);
    let query = rows(call.query)?;
    let keys = gathered(call.keys, tables, 1)?;
    let values = gathered(call.values, tables, 1)?;
    let arguments = [
        Value::Tensor(&query),
        Value::Tensor(&keys),
        Value::Tensor(&values),
        Value::Tensor(&tables.query_starts),
        Value::Tensor(&tables.key_starts),
        Value::Int(tables.longest_queries),
        Value::Int(tables.longest_keys),
        Value::Float(0.0),
        Value::Bool(right == 0),
        // return_debug_mask
        Value::Bool(false),
        Value::Float(call.scale),
        Value::Int(left),
        Value::Int(right),
        // seqused_k: the last block of a sequence is partly filled.
        Value::Tensor(&tables.key_counts),
    ];
    // SAFETY: `PagedCall` has checked dtypes, devices and that the shapes agree, and `PagedLayout`, whose tables these
    // are, that every block is in the pool and every sequence has as many keys as its blocks hold.
    let (output, lse) = unsafe { run("aten::_flash_attention_forward", &arguments)? };
    if tables.every_query_has_a_key {
        return Ok((output, lse));
    }
    // flash-attn returns +inf for a query that sees no key.
    let lse = lse.f_nan_to_num(f64::NAN, f64::NEG_INFINITY, f64::NEG_INFINITY)?;
    Ok((output, lse))
}

fn efficient(call: &PagedCall<'_>, tables: &DeviceTables) -> Result<(Tensor, Tensor)> {
    let Limits { left, right, .. } = unresolved_limits(call.options);
    let sizes = call.sizes;
    // It does not support grouped heads.
    let copies = sizes.heads / sizes.kv_heads;
    let query = rows(call.query)?.f_unsqueeze(0)?;
    let keys = gathered(call.keys, tables, copies)?.f_unsqueeze(0)?;
    let values = gathered(call.values, tables, copies)?.f_unsqueeze(0)?;
    let arguments = [
        Value::Tensor(&query),
        Value::Tensor(&keys),
        Value::Tensor(&values),
        Value::None,
        Value::Tensor(&tables.query_starts),
        Value::Tensor(&tables.key_starts),
        Value::Int(tables.longest_queries),
        Value::Int(tables.longest_keys),
        Value::Float(0.0),
        // custom_mask_type: causal, aligned to the bottom right, or none.
        Value::Int(if right == Some(0) { 2 } else { 0 }),
        // compute_log_sumexp
        Value::Bool(true),
        Value::Float(call.scale),
        Value::Tensor(&tables.key_counts),
        // The window includes the query's own key.
        left.map_or(Value::None, |left| {
            Value::Int(i64::try_from(left).map_or(i64::MAX, |left| left.saturating_add(1)))
        }),
    ];
    // SAFETY: as in `flash`.
    let (output, lse) = unsafe { run("aten::_efficient_attention_forward", &arguments)? };
    // (sequences, H, queries of the longest, padded to a multiple of 32): selects those of each sequence.
    let [sequences, heads, room] = <[i64; 3]>::try_from(lse.size()).unwrap_or([0, 0, 0]);
    let lse = match room {
        _ if tables.longest_queries == 1 => lse.f_select(2, 0)?.f_transpose(0, 1)?,
        room => {
            let lengths = call
                .layout
                .query_lengths
                .iter()
                .filter(|length| **length > 0);
            let places = lengths.zip(0..sequences).flat_map(|(length, sequence)| {
                (0..*length as i64).map(move |query| sequence * room + query)
            });
            let places: Vec<i64> = places.collect();
            let places = Tensor::f_from_slice(&places)?;
            let places = overdrive_sys::transfer::to_device(places, lse.device())?;
            let flat = lse.f_transpose(0, 1)?.f_reshape([heads, -1])?;
            flat.f_index_select(1, &places)?
        }
    };
    let lse = match tables.every_query_has_a_key {
        true => lse,
        false => lse.f_nan_to_num(f64::NAN, f64::NEG_INFINITY, f64::NEG_INFINITY)?,
    };
    Ok((output.f_squeeze_dim(0)?, lse))
}

/// Returns the query with contiguous channels.
fn rows(query: &Tensor) -> Result<Tensor> {
    let query = query.f_detach()?;
    Ok(match query.stride().last() {
        Some(1) => query,
        _ => query.f_contiguous()?,
    })
}

/// Calls an attention of libtorch: its output and log-sum-exp.
///
/// # Safety
/// The lengths stay within the tensors, whose shapes, dtypes and devices fit.
pub(crate) unsafe fn run(operator: &str, arguments: &[Value<'_>]) -> Result<(Tensor, Tensor)> {
    #[cfg(test)]
    if let Some(results) = tests::stand_in(operator, arguments) {
        return results;
    }
    // SAFETY: the caller's promise.
    let outputs = unsafe { call_unchecked(operator, "", arguments)? };
    first_two(outputs, operator)
}

/// Returns `true` if a pack is computed on `device`.
pub(crate) fn takes_packs(device: Device) -> bool {
    #[cfg(test)]
    if tests::is_forced() {
        return true;
    }
    device.is_cuda()
}

#[cfg(test)]
pub(crate) mod tests;
