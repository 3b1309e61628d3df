use overdrive_kernels::InstructionSet;
use tch::Tensor;

use crate::blockwise::{Blockwise, blockwise};
use crate::call::Call;
use crate::cuda_flash::{CudaFlash, cuda_flash};
use crate::kernel::{Dropout, Limits, Sequence, usize_of};
use crate::math::math;
use crate::selection::select;
use crate::{Alignment, AttentionOptions, Backend, Result, gpu_preference, libtorch};

/// Returns `softmax(query · keyᵀ · scale) · value` with the options of [`AttentionOptions`].
///
/// In layout (B, H, T, D): query (B, H, T, D), key (B, H_kv, S, D), value (B, H_kv, S, D_v), output
/// (B, H, T, D_v). H is a multiple of H_kv, and head `h` uses key head `h / (H / H_kv)` without a copy.
/// All tensors have the same device and dtype (f32, f64, bf16 or f16), which is also the output's; under
/// autocast they are cast as PyTorch casts them for `scaled_dot_product_attention`. Any strides are
/// supported if the last dimension is contiguous; otherwise the tensor is copied.
///
/// The output of a query that sees no key is zero. The CPU kernel stores the output as (B, T, H, D) in
/// memory, so that joining the heads copies nothing.
///
/// It is differentiable in query, key, value, a floating-point mask and the sink logits; twice only on
/// [`Backend::Math`].
///
/// The results equal those of `torch.nn.functional.scaled_dot_product_attention` and `flash_attn_func` for
/// the options that these support.
///
/// # Errors
/// [`crate::Error::Common`] for invalid arguments; [`crate::Error::Backend`] if the requested back end
/// cannot run this attention.
pub fn attention(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    options: &AttentionOptions<'_>,
) -> Result<Tensor> {
    let call = Call::new(query, key, value, options, false)?;
    let (output, _) = run(&call)?;
    call.in_layout(output)
}

/// Returns the output of [`attention`] and the natural log-sum-exp of the scores (B, H, T) in either layout, in f32
/// (f64 for f64). It includes the sink logits, and is `-inf` for a query that sees no key.
///
/// The log-sum-exp is differentiable, except on libtorch's kernels, which are not used if its gradient may
/// be needed.
///
/// # Errors
/// As [`attention`].
pub fn attention_with_lse(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    options: &AttentionOptions<'_>,
) -> Result<(Tensor, Tensor)> {
    let call = Call::new(query, key, value, options, true)?;
    let (output, lse) = run(&call)?;
    Ok((call.in_layout(output)?, lse))
}

/// Returns the output (B, H, T, D_v) and log-sum-exp.
pub(crate) fn run(call: &Call<'_>) -> Result<(Tensor, Tensor)> {
    match select(call)? {
        Backend::Flash if call.device.is_cuda() => on_cuda(call),
        Backend::Flash => libtorch::cpu_flash(call),
        Backend::Efficient => libtorch::efficient(call),
        Backend::CuDnn => {
            gpu_preference::note(call);
            libtorch::cudnn(call)
        }
        Backend::Blockwise => {
            let whole = dense_sequences(call, None);
            in_blocks(call, whole)
        }
        Backend::Math | Backend::Auto => math(call),
    }
}

/// Returns one sequence for each row of the batch, with all its keys or the first `lengths` keys.
pub(crate) fn dense_sequences(call: &Call<'_>, lengths: Option<&[usize]>) -> Vec<Sequence> {
    let (queries, keys) = (usize_of(call.sizes.queries), usize_of(call.sizes.keys));
    (0..usize_of(call.sizes.batch))
        .map(|batch| Sequence {
            batch,
            query_start: 0,
            queries,
            key_start: 0,
            keys: lengths.map_or(keys, |lengths| lengths[batch]),
        })
        .collect()
}

/// Returns the CPU kernel.
pub(crate) fn in_blocks(call: &Call<'_>, sequences: Vec<Sequence>) -> Result<(Tensor, Tensor)> {
    let function = function(call.options, call.scale, call.limits, sequences)?;
    let (output, lse) = blockwise(
        function,
        &call.query,
        &call.key,
        &call.value,
        call.mask.as_ref(),
        call.options.sinks,
    )?;
    Ok((output.f_transpose(1, 2)?, lse))
}

/// Returns the CPU kernel's autograd function for the options.
pub(crate) fn function(
    options: &AttentionOptions<'_>,
    scale: f64,
    limits: Limits,
    sequences: Vec<Sequence>,
) -> Result<Blockwise> {
    let dropout = match options.dropout_p {
        0.0 => None,
        probability => Some(Dropout {
            probability,
            seed: match options.dropout_seed {
                Some(seed) => seed,
                None => drawn_seed()?,
            },
        }),
    };
    Ok(Blockwise {
        set: InstructionSet::best(),
        sequences,
        scale,
        softcap: options.softcap,
        limits,
        bottom_right: options.alignment == Alignment::BottomRight,
        slopes: match options.alibi_slopes {
            Some(slopes) => Some(slopes.f_contiguous()?),
            None => None,
        },
        dropout,
        has_bias: false,
        has_sinks: false,
    })
}

/// Draws a seed from libtorch's generator, so that `manual_seed` and a restored state reproduce it.
fn drawn_seed() -> Result<u64> {
    let options = (tch::Kind::Int64, tch::Device::Cpu);
    let drawn = Tensor::f_randint(i64::MAX, [1], options)?.f_int64_value(&[0])?;
    Ok(drawn.unsigned_abs())
}

/// Runs libtorch's flash attention on CUDA, which takes (B, T, H, D).
fn on_cuda(call: &Call<'_>) -> Result<(Tensor, Tensor)> {
    let flash = CudaFlash {
        cumulative: None,
        longest: (call.sizes.queries, call.sizes.keys),
        dropout_p: call.options.dropout_p,
        scale: call.scale,
        left: call.limits.left,
        right: call.limits.right,
        has_sinks: false,
    };
    let by_length = |tensor: &Tensor| tensor.f_transpose(1, 2);
    let (output, lse) = cuda_flash(
        flash,
        &by_length(&call.query)?,
        &by_length(&call.key)?,
        &by_length(&call.value)?,
        call.options.sinks,
    )?;
    Ok((output.f_transpose(1, 2)?, lse))
}
