use anyhow::Result;
use overdrive::attention::{AttentionOptions, Backend, attention, explain};
use overdrive::sys::memory;
use tch::{Device, Kind, Tensor};

use crate::context::Context;
use crate::finding::Finding;
use crate::timing::seconds;

/// Above this length the scores of elementary operators do not fit or take all the time.
const LONGEST_OF_MATH: i64 = 4096;

pub(super) fn run(context: &mut Context) -> Result<()> {
    let device = context.device();
    let (heads, kv_heads, dim) = context.sized((32, 8, 128), (4, 2, 16));
    let kind = context.sized(Kind::BFloat16, Kind::Float);
    let lengths: &[i64] = context.sized(&[512, 2048, 8192, 32_768], &[64, 128]);
    // As many tokens at each length.
    let tokens = context.sized(32_768, 256);
    let backends: &[Backend] = match device {
        Device::Cpu => &[Backend::Auto, Backend::Blockwise, Backend::Math],
        _ => &[
            Backend::Auto,
            Backend::Flash,
            Backend::CuDnn,
            Backend::Efficient,
            Backend::Math,
        ],
    };
    for &length in lengths {
        for &backend in backends {
            if backend == Backend::Math && length > LONGEST_OF_MATH {
                continue;
            }
            context.check(format!("{backend} at {length}"), || {
                let batch = (tokens / length).max(1);
                let of = |heads: i64| -> Result<Tensor> {
                    let shape = [batch, heads, length, dim];
                    let values = Tensor::f_randn(shape, (Kind::Float, device))?.f_to_kind(kind)?;
                    Ok(values.f_set_requires_grad(true)?)
                };
                let (query, key, value) = (of(heads)?, of(kv_heads)?, of(kv_heads)?);
                let options = AttentionOptions {
                    backend,
                    ..AttentionOptions::causal()
                };
                let explanation = explain(&query, &key, &value, &options)?;
                let Some(runs) = explanation.backend else {
                    // A back end may lack a shape; that is an answer.
                    return Ok(Finding::passed().noting(explanation.reason));
                };
                memory::empty_cache(device)?;
                memory::reset_peak(device)?;
                let forward = seconds(device, 3, 2, || {
                    let _no_grad = tch::no_grad_guard();
                    let _output = attention(&query, &key, &value, &options)?;
                    Ok(())
                })?;
                let both = seconds(device, 3, 2, || {
                    let output = attention(&query, &key, &value, &options)?;
                    output.f_sum(Kind::Float)?.f_backward()?;
                    Ok(())
                })?;
                let peak = memory::stats(device)?.peak_allocated_bytes as f64;
                // Two products, half of them hidden by causality; backward has five.
                let flops = 2.0 * (batch * heads * length * length * dim) as f64;
                Ok(Finding::passed()
                    .noting(runs.to_string())
                    .with("forward ms", forward * 1e3)
                    .with("forward TFLOP/s", flops / forward / 1e12)
                    .with("with backward ms", both * 1e3)
                    .with("with backward TFLOP/s", 3.5 * flops / both / 1e12)
                    .with("peak GiB", peak / f64::from(1 << 30)))
            })?;
        }
    }
    Ok(())
}
