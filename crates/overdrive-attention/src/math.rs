//! Attention from elementary operators: every option, any device, T · S elements for each head.

use overdrive_core::Error as Common;
use overdrive_sys::autocast;
use tch::{Kind, Tensor};

use crate::blockwise::accumulator;
use crate::call::Call;
use crate::kernel::{Limits, as_limit};
use crate::{Error, Result};

/// Returns the output (B, H, T, Dv) and log-sum-exp (B, H, T). Half precisions are computed in f32.
pub(crate) fn math(call: &Call<'_>) -> Result<(Tensor, Tensor)> {
    if call.options.dropout_seed.is_some() && call.options.dropout_p > 0.0 {
        return Err(Error::Common(Common::option(
            "dropout_seed",
            "set",
            "None, except on the blockwise back end",
        )));
    }
    // Autocast would round the widened operands.
    let _full_precision = autocast::off(call.device)?;
    let accumulator = accumulator(call.kind);
    let sizes = &call.sizes;
    let group = sizes.heads / sizes.kv_heads;
    let (by_group, by_head) = (
        [sizes.batch, sizes.kv_heads, group * sizes.queries],
        [sizes.batch, sizes.heads, sizes.queries],
    );
    let with = |shape: [i64; 3], last: i64| [shape[0], shape[1], shape[2], last];
    let wide = |tensor: &Tensor| tensor.f_to_kind(accumulator);

    // Heads that share a key use one matmul, which does not repeat keys.
    let query = wide(&call.query)?.f_reshape(with(by_group, sizes.key_dim))?;
    let key = wide(&call.key)?.f_transpose(2, 3)?;
    let scores = query
        .f_matmul(&key)?
        .f_reshape(with(by_head, sizes.keys))?
        .f_mul_scalar(call.scale)?;
    let scores = adjusted(call, scores)?;

    let (weights, lse) = softmax(call, &scores)?;
    let weights = match call.options.dropout_p {
        0.0 => weights,
        p => weights.f_dropout(p, true)?,
    };
    let output = weights
        .f_reshape(with(by_group, sizes.keys))?
        .f_matmul(&wide(&call.value)?)?
        .f_reshape(with(by_head, sizes.value_dim))?;
    Ok((output.f_to_kind(call.kind)?, lse))
}

/// Applies softcap, ALiBi, mask and window.
fn adjusted(call: &Call<'_>, mut scores: Tensor) -> Result<Tensor> {
    if let Some(cap) = call.options.softcap {
        scores = scores.f_div_scalar(cap)?.f_tanh()?.f_mul_scalar(cap)?;
    }
    let options = (Kind::Int64, call.device);
    let queries = Tensor::f_arange(call.sizes.queries, options)?
        .f_add_scalar(call.offset())?
        .f_unsqueeze(-1)?;
    let keys = Tensor::f_arange(call.sizes.keys, options)?;
    if let Some(slopes) = call.options.alibi_slopes {
        let distance = queries.f_sub(&keys)?.f_abs()?.f_to_kind(scores.kind())?;
        let slopes = slopes.f_to_kind(scores.kind())?;
        let slopes = slopes.f_reshape([-1, call.sizes.heads, 1, 1])?;
        scores = scores.f_sub(&slopes.f_mul(&distance)?)?;
    }
    match &call.mask {
        Some(mask) if mask.kind() == Kind::Bool => {
            scores = scores.f_masked_fill(&mask.f_logical_not()?, f64::NEG_INFINITY)?;
        }
        Some(mask) => scores = scores.f_add(&mask.f_to_kind(scores.kind())?)?,
        None => {}
    }
    let Limits {
        left,
        right,
        sink_tokens,
    } = call.limits;
    if let Some(right) = right {
        let hidden = keys.f_gt_tensor(&queries.f_add_scalar(as_limit(right))?)?;
        scores = scores.f_masked_fill(&hidden, f64::NEG_INFINITY)?;
    }
    if let Some(left) = left {
        let mut hidden = keys.f_lt_tensor(&queries.f_sub_scalar(as_limit(left))?)?;
        hidden = hidden.f_logical_and(&keys.f_ge(as_limit(sink_tokens))?)?;
        scores = scores.f_masked_fill(&hidden, f64::NEG_INFINITY)?;
    }
    Ok(scores)
}

/// Returns the weights and log-sum-exp; zero and `-inf` for a query that sees no key, with gradients of zero.
fn softmax(call: &Call<'_>, scores: &Tensor) -> Result<(Tensor, Tensor)> {
    let sinks = match call.options.sinks {
        Some(sinks) => Some(sinks.f_to_kind(scores.kind())?.f_reshape([1, -1, 1, 1])?),
        None => None,
    };
    let mut maximum = match call.sizes.keys {
        // `amax` refuses an empty dimension; a sum over it is 0.
        0 => scores.f_sum_dim_intlist(&[-1_i64][..], true, scores.kind())?,
        // The shift cancels in the quotient, so it needs no gradient.
        _ => scores.f_detach()?.f_amax([-1_i64], true)?,
    };
    if let Some(sinks) = &sinks {
        maximum = maximum.f_maximum(&sinks.f_detach()?)?;
    }
    let hidden = maximum.f_eq(f64::NEG_INFINITY)?;
    // -inf minus -inf would be NaN; with a shift of 0, all weights of such a row are 0.
    let maximum = maximum.f_masked_fill(&hidden, 0.0)?;
    let weights = scores.f_sub(&maximum)?.f_exp()?;
    let mut sum = weights.f_sum_dim_intlist(&[-1_i64][..], true, scores.kind())?;
    if let Some(sinks) = &sinks {
        sum = sum.f_add(&sinks.f_sub(&maximum)?.f_exp()?)?;
    }
    let empty = sum.f_eq(0.0)?;
    // Zeros over 1 stay zeros, and their gradients are zero rather than NaN.
    let sum = sum.f_masked_fill(&empty, 1.0)?;
    let lse = sum
        .f_log()?
        .f_add(&maximum)?
        .f_masked_fill(&empty, f64::NEG_INFINITY)?;
    Ok((weights.f_div(&sum)?, lse.f_squeeze_dim(-1)?))
}
