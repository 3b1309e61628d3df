//! The choice of the decode kernel of overdrive-gpu, which reads keys and values in place; `None` if another back end
//! runs.

use overdrive_gpu::{Decode, DecodeLayout, Kernels, MOST_QUERIES, kernels, report_fallback};
use tch::{Device, Tensor};

use crate::call::unresolved_limits;
use crate::kernel::Limits;
use crate::paged::PagedCall;
use crate::{Alignment, AttentionOptions, Backend, Result};

const OPERATION: &str = "attention over a cache";

/// Returns the output (N, H, D) and log-sum-exp (H, N) of sequences over a pool.
pub(crate) fn paged(call: &PagedCall<'_>) -> Result<Option<(Tensor, Tensor)>> {
    let device = call.query.device();
    let Some(kernels) = kernels_for(device, call.options)? else {
        return Ok(None);
    };
    let lengths = call.layout.query_lengths.iter();
    let longest = lengths.max().copied().unwrap_or(0);
    if call.sizes.queries == 0 {
        return Ok(None);
    }
    if i64::try_from(longest).is_ok_and(|queries| queries > MOST_QUERIES) {
        report_fallback(
            OPERATION,
            "a sequence has more than 16 queries in a step, such as a prompt",
        );
        return Ok(None);
    }
    if call.sizes.key_dim != call.sizes.value_dim {
        report_fallback(
            OPERATION,
            "keys and values differ in the number of channels",
        );
        return Ok(None);
    }
    let made;
    let tables = match &call.layout.on_device {
        Some(tables) => tables,
        // A CPU, for which a test has installed kernels.
        None => {
            made = call.layout.tables(device)?;
            &made
        }
    };
    let layout = DecodeLayout::Paged {
        blocks: &tables.blocks,
        key_starts: &tables.key_starts,
        query_starts: &tables.query_starts,
        counts: &tables.key_counts,
        longest_queries: tables.longest_queries,
        longest_keys: tables.longest_keys,
    };
    let (query, keys, values) = (call.query, call.keys, call.values);
    run(
        kernels,
        [query, keys, values],
        layout,
        call.options,
        call.scale,
    )
}

/// Returns the output (B, H, T, D) and log-sum-exp (B, H, T) over the first `counts` keys of each row.
pub(crate) fn at_lengths(
    [query, keys, values]: [&Tensor; 3],
    counts: &Tensor,
    options: &AttentionOptions<'_>,
) -> Result<Option<(Tensor, Tensor)>> {
    let Some(kernels) = kernels_for(query.device(), options)? else {
        return Ok(None);
    };
    let fits = query.dim() == 4
        && keys.size() == values.size()
        && [keys, values]
            .iter()
            .all(|tensor| tensor.kind() == query.kind())
        && options.mask.is_none()
        && options.dropout_p == 0.0
        && options.alignment == Alignment::BottomRight;
    if !fits {
        report_fallback(
            OPERATION,
            "a mask, dropout, another alignment, or values that differ from the keys in shape or dtype are not supported",
        );
        return Ok(None);
    }
    let scale = crate::call::scale(options, query.size()[3])?;
    let layout = DecodeLayout::Rows { counts };
    run(kernels, [query, keys, values], layout, options, scale)
}

/// Returns the kernels for a device, if they have the options.
fn kernels_for(device: Device, options: &AttentionOptions<'_>) -> Result<Option<&'static Kernels>> {
    if options.backend != Backend::Auto {
        return Ok(None);
    }
    let Some(kernels) = kernels(device)? else {
        return Ok(None);
    };
    if options.alibi_slopes.is_some() {
        report_fallback(OPERATION, "the kernel does not support ALiBi");
        return Ok(None);
    }
    if unresolved_limits(options).sink_tokens > 0 {
        report_fallback(
            OPERATION,
            "the kernel does not support sink tokens under a window",
        );
        return Ok(None);
    }
    Ok(Some(kernels))
}

fn run(
    kernels: &Kernels,
    [query, keys, values]: [&Tensor; 3],
    layout: DecodeLayout<'_>,
    options: &AttentionOptions<'_>,
    scale: f64,
) -> Result<Option<(Tensor, Tensor)>> {
    let Limits { left, right, .. } = unresolved_limits(options);
    Ok(kernels.decode(&Decode {
        query,
        keys,
        values,
        layout,
        left,
        right,
        scale,
        softcap: options.softcap,
        sinks: options.sinks,
    })?)
}
