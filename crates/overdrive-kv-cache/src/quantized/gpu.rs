//! Attention over a quantized cache on a GPU, with the kernel of overdrive-gpu that reads the codes in place.

use overdrive_attention::Backend;
use overdrive_gpu::{CodedHeads, Decode, DecodeLayout, kernels, report_fallback};
use tch::Tensor;

use super::codec::{Format, QuantizationAxis, QuantizationBits};
use super::layer::{Layer, Recent};
use super::store::Store;
use crate::{AttendOptions, Result};

/// The number of values that share a scale in the kernel's formats.
const GROUP: usize = 64;

/// Returns the attention of the last tokens; `None` if no kernel supports this cache and these options.
pub(super) fn attend_on_gpu(
    query: &Tensor,
    held: &Layer,
    recent: &Recent,
    options: &AttendOptions<'_>,
) -> Result<Option<Tensor>> {
    let Some(kernels) = kernels(query.device())? else {
        return Ok(None);
    };
    if let Some(reason) = unfit(query, held, options) {
        report_fallback("attention over a quantized cache", reason);
        return Ok(None);
    }
    let causal = options.causal();
    let results = kernels.decode(&Decode {
        query,
        keys: &recent.keys,
        values: &recent.values,
        layout: DecodeLayout::Coded {
            keys: heads(&held.keys),
            values: heads(&held.values),
            coded: recent.quantized,
        },
        left: causal.window.left,
        right: Some(0),
        scale: options
            .scale
            .unwrap_or(1.0 / (held.spec.key_dim as f64).sqrt()),
        softcap: options.softcap,
        sinks: None,
    })?;
    Ok(results.map(|(output, _)| output))
}

fn heads(store: &Store) -> CodedHeads<'_> {
    CodedHeads {
        codes: &store.codes,
        lines: &store.lines,
    }
}

/// Returns the reason why the kernel cannot compute an attention, if there is one.
fn unfit(query: &Tensor, held: &Layer, options: &AttendOptions<'_>) -> Option<&'static str> {
    let spec = &held.spec;
    let of = |format: &Format, axis| {
        (format.bits, format.axis, format.group, format.block)
            == (QuantizationBits::Eight, axis, GROUP, GROUP)
    };
    let &[batch, heads, _, dim] = query.size().as_slice() else {
        return Some("the query is not of shape (B, H, T, D)");
    };
    if options.mask.is_some() {
        return Some("the kernel does not support a mask");
    }
    if options.sinks.is_some() {
        return Some("the kernel does not support logits of attention sinks");
    }
    if options.backend != Backend::Auto {
        return Some("another back end was requested");
    }
    if !of(&held.keys.format, QuantizationAxis::Channel)
        || !of(&held.values.format, QuantizationAxis::Token)
    {
        return Some(
            "the kernel supports only 8-bit codes in groups of 64, with keys by channel, values by token, and heads of 64, 128 or 256",
        );
    }
    let fits = (batch, dim, spec.value_dim) == (spec.batch, spec.key_dim, spec.key_dim)
        && spec.heads > 0
        && heads % spec.heads == 0
        && query.kind() == spec.kind
        && options.scale.is_none_or(f64::is_finite)
        && options
            .softcap
            .is_none_or(|cap| cap.is_finite() && cap > 0.0);
    (!fits).then_some(
        "the shape or dtype of the query does not match the cache, or an option is out of range",
    )
}
