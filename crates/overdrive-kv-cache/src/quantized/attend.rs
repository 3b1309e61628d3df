//! Attention over a quantized cache on the CPU.
#![allow(
    unsafe_code,
    reason = "the kernel reads the elements of tensors as slices"
)]

use overdrive_attention::Backend;
use overdrive_kernels::InstructionSet;
use overdrive_sys::raw;
use tch::{Device, Kind, Tensor};

use super::kernel;
use super::layer::{Layer, Recent};
use crate::{AttendOptions, Result};

/// The largest number of query rows that share a key for which the kernel on codes is used; for more, a dense copy of
/// the layer is faster.
const FEW_ROWS: i64 = 64;

/// Computes the attention with the kernel on codes.
pub(super) fn attend_to_codes(
    query: &Tensor,
    held: &Layer,
    recent: &Recent,
    options: &AttendOptions<'_>,
) -> Result<Tensor> {
    let size = |n: i64| usize::try_from(n).unwrap_or(0);
    let (spec, sizes) = (&held.spec, query.size());
    let tokens = recent.quantized + recent.keys.size()[2];
    let float = |tensor: &Tensor| tensor.f_to_kind(Kind::Float)?.f_contiguous();
    let flat_query = float(query)?;
    let whole = [float(&recent.whole[0])?, float(&recent.whole[1])?];
    let mask = match options.mask {
        Some(mask) => Some(
            mask.f_expand([spec.batch, 1, sizes[2], tokens], false)?
                .f_contiguous()?,
        ),
        None => None,
    };
    let output = Tensor::f_empty(
        [spec.batch, sizes[1], sizes[2], spec.value_dim],
        (Kind::Float, Device::Cpu),
    )?;
    let scale = options.scale.unwrap_or(1.0 / (spec.key_dim as f64).sqrt());
    // SAFETY: `output` was made here; the others are read while an operator would read them.
    unsafe {
        let inputs = kernel::AttendInputs {
            batch: size(spec.batch),
            heads: size(sizes[1]),
            kv_heads: size(spec.heads),
            queries: size(sizes[2]),
            query: raw::slice(&flat_query)?,
            keys: held.keys.codes()?,
            values: held.values.codes()?,
            quantized: size(recent.quantized),
            recent_keys: kernel::Rows {
                data: raw::slice(&whole[0])?,
                head: size(whole[0].size()[2] * spec.key_dim),
            },
            recent_values: kernel::Rows {
                data: raw::slice(&whole[1])?,
                head: size(whole[1].size()[2] * spec.value_dim),
            },
            recent: size(recent.keys.size()[2]),
            scale: scale as f32,
            softcap: options.softcap.map(|cap| cap as f32),
            window: options.window.map(|window| size(window).max(1)),
            mask: mask.as_ref().map(|mask| raw::slice(mask)).transpose()?,
        };
        kernel::attend(InstructionSet::best(), &inputs, raw::slice_mut(&output)?);
    }
    Ok(output.f_to_kind(query.kind())?)
}

/// Returns `true` if the kernel on codes can compute this attention.
pub(super) fn fits_kernel(
    query: &Tensor,
    held: &Layer,
    options: &AttendOptions<'_>,
    tokens: i64,
) -> bool {
    let (spec, size) = (&held.spec, query.size());
    let &[batch, heads, queries, dim] = size.as_slice() else {
        return false;
    };
    let mask_fits = options.mask.is_none_or(|mask| {
        let full = [batch, 1, queries, tokens];
        let size = mask.size();
        mask.kind() == Kind::Bool
            && mask.device() == Device::Cpu
            && size.len() <= 4
            && size
                .iter()
                .rev()
                .zip(full.iter().rev())
                .all(|(n, full)| *n == 1 || n == full)
            && size.last() == Some(&tokens)
    });
    spec.device == Device::Cpu
        && query.device() == Device::Cpu
        && query.kind() == spec.kind
        && spec.kind != Kind::Double
        && matches!(options.backend, Backend::Auto | Backend::Blockwise)
        && batch == spec.batch
        && dim == spec.key_dim
        && spec.heads > 0
        && heads % spec.heads == 0
        && heads / spec.heads * queries <= FEW_ROWS
        && mask_fits
        && options.sinks.is_none()
        && options.scale.is_none_or(f64::is_finite)
        && options
            .softcap
            .is_none_or(|cap| cap.is_finite() && cap > 0.0)
        && !query.requires_grad()
}
