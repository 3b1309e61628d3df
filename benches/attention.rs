//! Claim: on a CPU, blockwise attention is at least three times as fast as unfused attention from T = 1024 on,
//! forward and with backward, and its peak memory grows with T and not with T².
//!
//! `unfused` is causal attention as a user of tch writes it: matmul, mask, softmax, matmul. `flash` is
//! libtorch's CPU kernel (that of `scaled_dot_product_attention`), `blockwise` that of overdrive-attention.
//! Batch 2, 6 heads of 64.
//!
//! Analysis: the lower bound is the matmuls, 4 · B · H · T² · D / 2 operations forward and 2.5 times those
//! backward. Unfused attention does twice as many, because a mask saves no work, and moves T² scores through
//! memory several times. `windowed` has a window of 256 keys, whose work grows linearly with T; libtorch has no
//! kernel for it.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use overdrive::sys::memory;
use overdrive_attention::{AttentionOptions, Backend, Window, attention};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
const BATCH: i64 = 2;
const HEADS: i64 = 6;
const DIM: i64 = 64;

/// Returns query, key and value (B, H, T, D) in the layout of projections: (B, T, H, D) in memory.
fn inputs(length: i64) -> [Tensor; 3] {
    let one = |_| {
        let x = Tensor::randn([BATCH, length, HEADS, DIM], F32).transpose(1, 2);
        x.detach().set_requires_grad(true)
    };
    [0, 1, 2].map(one)
}

fn unfused([query, key, value]: &[Tensor; 3]) -> Tensor {
    let length = query.size()[2];
    let hidden = Tensor::ones([length, length], (Kind::Bool, Device::Cpu)).triu(1);
    let scores = query.matmul(&key.transpose(2, 3)) * (1.0 / (DIM as f64).sqrt());
    scores
        .masked_fill(&hidden, f64::NEG_INFINITY)
        .softmax(-1, Kind::Float)
        .matmul(value)
}

fn fused([query, key, value]: &[Tensor; 3], backend: Backend, window: Window) -> Tensor {
    let options = AttentionOptions {
        causal: true,
        window,
        backend,
        ..AttentionOptions::default()
    };
    attention(query, key, value, &options).expect("every option here has a kernel")
}

/// Returns the peak of the bytes that are allocated beyond the inputs.
fn peak_mib(run: impl FnOnce()) -> f64 {
    let stats = || memory::stats(Device::Cpu).expect("the counting allocator is in place");
    let before = stats().allocated_bytes;
    memory::reset_peak(Device::Cpu).expect("as above");
    run();
    (stats().peak_allocated_bytes - before) as f64 / (1 << 20) as f64
}

type Variant = (&'static str, fn(&[Tensor; 3]) -> Tensor);

fn attentions(criterion: &mut Criterion) {
    let variants: [Variant; 4] = [
        ("unfused", unfused),
        ("flash", |x| fused(x, Backend::Flash, Window::default())),
        ("blockwise", |x| {
            fused(x, Backend::Blockwise, Window::default())
        }),
        ("windowed", |x| {
            fused(x, Backend::Blockwise, Window::sliding(256))
        }),
    ];
    for backward in [false, true] {
        let name = if backward {
            "attention/forward_backward"
        } else {
            "attention/forward"
        };
        let mut group = criterion.benchmark_group(name);
        group.sample_size(10);
        for length in [512, 1024, 2048, 4096] {
            let inputs = inputs(length);
            let gradient = Tensor::randn([BATCH, HEADS, length, DIM], F32);
            let products = if backward { 7 } else { 2 };
            let operations = products * BATCH * HEADS * length * length * DIM;
            group.throughput(Throughput::Elements(operations.unsigned_abs()));
            for (variant, run) in variants {
                let step = || {
                    if !backward {
                        return tch::no_grad(|| run(&inputs));
                    }
                    let loss = (run(&inputs) * &gradient).sum(Kind::Float);
                    loss.backward();
                    loss
                };
                println!(
                    "{name}/{variant}/{length}: peak {:.1} MiB",
                    peak_mib(|| drop(step()))
                );
                group.bench_function(BenchmarkId::new(variant, length), |bencher| {
                    bencher.iter(step);
                });
            }
        }
        group.finish();
    }
}

criterion_group!(benches, attentions);
criterion_main!(benches);
