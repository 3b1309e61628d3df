use overdrive_autograd::NoGradGuard;
use overdrive_core::Error as Common;
use overdrive_sys::transfer::to_device;
use tch::Tensor;

use crate::attention::{dense_sequences, in_blocks, run};
use crate::call::{Call, slopes_of, unresolved_limits};
use crate::kernel::usize_of;
use crate::paged_packed::takes_packs;
use crate::selection::select;
use crate::{
    AttentionOptions, Backend, DeviceLengths, Error, Layout, Result, attention_at_lengths,
};

/// Computes the attention of one or a few new queries over a long cache, without a gradient. Returns the
/// output and the log-sum-exp.
///
/// In layout (B, H, T, D): query (B, H, T, D), keys and values (B, H_kv, S, D) as the cache stores them.
/// `lengths` is the number of filled keys in each row of the batch (`None`: all); keys after them are not
/// read. Queries are at the end of their row's keys, as in a decoder, for `causal` and a window;
/// [`Alignment::TopLeft`](crate::Alignment::TopLeft) is refused.
///
/// With few heads, the keys are split among the threads and the partial results are merged by their
/// log-sum-exps; heads that share a key read it once.
///
/// The results equal those of `flash_attn_with_kvcache` without appending keys.
///
/// # Errors
/// As [`attention`](crate::attention), and [`Error::Common`] if `lengths` are not B lengths of
/// at most S.
///
/// ```
/// use overdrive_attention::{AttentionOptions, attention_decode};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> Result<(), overdrive_attention::Error> {
/// let random = |heads: i64, n: i64| Tensor::randn([2, heads, n, 16], (Kind::Float, Device::Cpu));
/// let (keys, values) = (random(2, 1024), random(2, 1024));
/// let options = AttentionOptions::causal();
/// let (output, _) = attention_decode(&random(8, 1), &keys, &values, Some(&[700, 13]), &options)?;
/// assert_eq!(output.size(), [2, 8, 1, 16]);
/// # Ok(())
/// # }
/// ```
pub fn attention_decode(
    query: &Tensor,
    keys: &Tensor,
    values: &Tensor,
    lengths: Option<&[usize]>,
    options: &AttentionOptions<'_>,
) -> Result<(Tensor, Tensor)> {
    let _no_grad = NoGradGuard::new();
    let mut call = Call::new(query, keys, values, options, true)?;
    if options.alignment == crate::Alignment::TopLeft {
        return Err(Error::Common(Common::option(
            "alignment",
            "TopLeft",
            "BottomRight, since decoded queries are at the end of their keys",
        )));
    }
    let Some(lengths) = lengths else {
        let (output, lse) = run(&call)?;
        return Ok((call.in_layout(output)?, lse));
    };
    let most = usize_of(call.sizes.keys);
    if lengths.len() != usize_of(call.sizes.batch) || lengths.iter().any(|length| *length > most) {
        return Err(Error::Common(Common::option(
            "lengths",
            format!("{lengths:?} for keys of shape {:?}", keys.size()),
            "one number for each row of the batch, at most the number of keys",
        )));
    }
    let (output, lse) = match select(&call)? {
        Backend::Blockwise if !takes_packs(call.device) => {
            // The limits for all keys differ from those for some keys.
            call.limits = unresolved_limits(options);
            let sequences = dense_sequences(&call, Some(lengths));
            in_blocks(&call, sequences)?
        }
        _ => match at_host_lengths(&call, lengths)? {
            Some(results) => results,
            None => row_by_row(&call, lengths)?,
        },
    };
    Ok((call.in_layout(output)?, lse))
}

/// Runs all rows in one call on a GPU; `None` if its kernel lacks an option, or a row has fewer keys than queries.
fn at_host_lengths(call: &Call<'_>, lengths: &[usize]) -> Result<Option<(Tensor, Tensor)>> {
    let enough = |length: &usize| i64::try_from(*length).is_ok_and(|n| n >= call.sizes.queries);
    if !takes_packs(call.device) || !lengths.iter().all(enough) {
        return Ok(None);
    }
    let counts: Vec<i64> = lengths.iter().map(|length| *length as i64).collect();
    let counts = to_device(Tensor::f_from_slice(&counts)?, call.device)?;
    let Ok(lengths) = DeviceLengths::new(&counts, &call.key) else {
        // Keys that do not lie row after row.
        return Ok(None);
    };
    let options = AttentionOptions {
        layout: Layout::Bhtd,
        ..*call.options
    };
    attention_at_lengths(&call.query, &call.key, &call.value, &lengths, &options)
}

/// Runs each row of the batch separately, for kernels that take no lengths.
fn row_by_row(call: &Call<'_>, lengths: &[usize]) -> Result<(Tensor, Tensor)> {
    let (mut outputs, mut lses) = (Vec::new(), Vec::new());
    for (index, length) in lengths.iter().enumerate() {
        let row = index as i64;
        let length = i64::try_from(*length).unwrap_or(i64::MAX);
        let one = |tensor: &Tensor| tensor.f_narrow(0, row, 1);
        let filled = |tensor: &Tensor| one(tensor)?.f_narrow(2, 0, length);
        let mask = match &call.mask {
            Some(mask) => {
                let mask = if mask.size()[0] > 1 {
                    one(mask)?
                } else {
                    mask.shallow_clone()
                };
                let narrow = mask.size()[3] > 1;
                Some(if narrow {
                    mask.f_narrow(3, 0, length)?
                } else {
                    mask
                })
            }
            None => None,
        };
        let slopes = slopes_of(call.options, index)?;
        let options = AttentionOptions {
            mask: mask.as_ref(),
            alibi_slopes: slopes.as_ref(),
            // `Call` has transposed the tensors already.
            layout: Layout::Bhtd,
            ..*call.options
        };
        let (key, value) = (filled(&call.key)?, filled(&call.value)?);
        let (output, lse) = run(&Call::new(
            &one(&call.query)?,
            &key,
            &value,
            &options,
            true,
        )?)?;
        outputs.push(output);
        lses.push(lse);
    }
    if outputs.is_empty() {
        return run(call);
    }
    Ok((Tensor::f_cat(&outputs, 0)?, Tensor::f_cat(&lses, 0)?))
}
