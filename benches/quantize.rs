//! Claim: quantizing and dequantizing a checkpoint takes about as long as reading and writing it.
//!
//! A 4096×4096 f32 weight (64 MiB). GB/s refer to the floats: those read by `quantize` and those written by
//! `dequantize`. `copy` is the upper bound: libtorch's copy of the weight, which reads and writes as many floats.
//!
//! Analysis: `dequantize` writes the floats and reads an eighth or a quarter as many bytes of codes, so it can
//! be faster than the copy; memory that is new to the process costs page faults in both.

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use overdrive_quantization::{QuantizedWeight, Scheme};
use tch::{Device, Kind, Tensor};

const SIDE: i64 = 4096;
const SCHEMES: [&str; 8] = [
    "int8",
    "int8-g32",
    "int4",
    "int4-g32-asym",
    "nf4",
    "nf4-single",
    "fp4",
    "fp8",
];

fn quantize(criterion: &mut Criterion) {
    let _no_grad = tch::no_grad_guard();
    let weight = Tensor::randn([SIDE, SIDE], (Kind::Float, Device::Cpu));
    let bytes = weight.numel() as u64 * 4;
    let mut group = criterion.benchmark_group("quantize");
    group.throughput(Throughput::Bytes(bytes)).sample_size(10);
    group.bench_function("copy", |bench| bench.iter(|| weight.copy()));
    for name in SCHEMES {
        let scheme: Scheme = name.parse().expect("a name");
        group.bench_function(BenchmarkId::new("codes", name), |bench| {
            bench.iter(|| QuantizedWeight::quantize(&weight, scheme).expect("it fits"));
        });
    }
    group.finish();
    let mut group = criterion.benchmark_group("dequantize");
    group.throughput(Throughput::Bytes(bytes)).sample_size(10);
    for name in SCHEMES {
        let scheme: Scheme = name.parse().expect("a name");
        let quantized = QuantizedWeight::quantize(&weight, scheme).expect("it fits");
        for kind in [Kind::Float, Kind::BFloat16] {
            group.bench_function(BenchmarkId::new(format!("{kind:?}"), name), |bench| {
                bench.iter(|| quantized.dequantize(kind).expect("memory"));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, quantize);
criterion_main!(benches);
