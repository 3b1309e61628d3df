//! Claim: one AdamW step over the 13.8M parameters of the `small` preset with libtorch's fused kernel runs at
//! memory bandwidth, and several times faster than with elementary operators (`plain`).
//!
//! Analysis: the lower bound is the memory traffic: a step reads parameter, gradient and two moments and writes
//! three of them back, 7 · 4 bytes per parameter, 385 MB here. Clipping (`clip`) reads and writes the
//! gradients, 12 bytes per parameter.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use overdrive::optim::{
    AdamW, AdamWConfig, ClipOptions, Implementation, Optimizer, ParamGroup, clip_grad_norm,
};
use overdrive::sys::grad;
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The matrices of the preset, with gradients.
fn parameters() -> Vec<(String, Tensor)> {
    let mut shapes = vec![[8192, 384]];
    for _ in 0..6 {
        shapes.extend([[384, 384]; 4]);
        shapes.extend([[1024, 384], [1024, 384], [384, 1024]]);
    }
    let with_gradient = |shape: [i64; 2]| {
        let weight = Tensor::randn(shape, F32).set_requires_grad(true);
        grad::set(&weight, &Tensor::randn(shape, F32)).expect("same shape, dtype and device");
        weight
    };
    let named =
        |(index, shape): (usize, [i64; 2])| (format!("weight.{index}"), with_gradient(shape));
    shapes.into_iter().enumerate().map(named).collect()
}

fn adamw_step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("adamw_step");
    let weights: usize = parameters().iter().map(|(_, weight)| weight.numel()).sum();
    group.throughput(Throughput::Bytes(weights as u64 * 28));
    for (name, implementation) in [
        ("fused", Implementation::Fused),
        ("plain", Implementation::Plain),
    ] {
        let config = AdamWConfig {
            implementation,
            ..AdamWConfig::default()
        };
        let mut optimizer = AdamW::new(vec![ParamGroup::new("all", parameters())], config)
            .expect("the default options are valid");
        group.bench_function(name, |bencher| {
            bencher.iter(|| optimizer.step().expect("every weight has a gradient"));
        });
    }
    let weights_only: Vec<Tensor> = parameters().into_iter().map(|(_, weight)| weight).collect();
    group.throughput(Throughput::Bytes(weights as u64 * 12));
    group.bench_function("clip", |bencher| {
        bencher.iter(|| {
            clip_grad_norm(&weights_only, 1.0, ClipOptions::default()).expect("one device")
        });
    });
    group.finish();
}

criterion_group!(benches, adamw_step);
criterion_main!(benches);
