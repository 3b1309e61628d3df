//! Claim: the time of a complete training step of the `tiny` and `small` presets, and how much of it the CPU
//! cache of freed blocks saves (`cached` against `uncached`).
//!
//! Analysis: the matmuls are the lower bound. `products` runs the matmuls of a step alone, forward and
//! backward, without those of attention. The difference is attention, the memory traffic of norms, rotary
//! embeddings, activation and loss, and, uncached, the kernel's zeroing of pages that malloc returned.
//!
//! `trained` is the step of a `tiny` that has learned from text for 300 steps (`OVERDRIVE_TRAINED_STEPS`), which takes some
//! minutes first: it must not take longer than that of random weights. In `trained_keeping_denormals` libtorch's operators
//! compute with subnormal numbers, which shows on Intel's processors.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use overdrive::sys::denormals::set_flush_denormals;
use overdrive::sys::memory;
use overdrive::trainer::Preset;
use overdrive_benches::{Shape, Step, Trained};
use tch::{Device, Kind, Tensor};

/// Returns the matmuls of a step: y = x Wᵀ for each weight, and in backward dx = dy W and dW = dyᵀ x.
fn products(shape: Shape) -> impl FnMut() {
    let Shape {
        vocab,
        dim,
        layers,
        hidden,
        ..
    } = shape;
    let random = |rows, columns| Tensor::randn([rows, columns], (Kind::Float, Device::Cpu));
    let mut weights = vec![(vocab, dim)];
    for _ in 0..layers {
        weights.extend([(dim, dim); 4]);
        weights.extend([(hidden, dim), (hidden, dim), (dim, hidden)]);
    }
    let operands: Vec<[Tensor; 3]> = weights
        .into_iter()
        .map(|(outputs, inputs)| {
            let tokens = shape.tokens();
            [
                random(tokens, inputs),
                random(outputs, inputs),
                random(tokens, outputs),
            ]
        })
        .collect();
    move || {
        for [x, weight, dy] in &operands {
            let _ = std::hint::black_box((x.mm(&weight.tr()), dy.mm(weight), dy.tr().mm(x)));
        }
    }
}

fn train_step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("train_step");
    group.sample_size(10);
    for (name, shape) in [("tiny", Shape::TINY), ("small", Shape::SMALL)] {
        group.throughput(Throughput::Elements(shape.tokens() as u64));
        for (variant, caching) in [("cached", true), ("uncached", false)] {
            memory::set_cpu_caching(caching).expect("libtorch is there");
            let mut step = Step::new(shape, Device::Cpu).expect("a preset is a valid shape");
            let batch = step.batch().expect("memory for one batch");
            group.bench_function(format!("{name}/{variant}"), |bencher| {
                bencher.iter(|| step.run(&batch).expect("memory for one step"));
            });
        }
    }
    memory::set_cpu_caching(true).expect("libtorch is there");
    let steps = std::env::var("OVERDRIVE_TRAINED_STEPS").unwrap_or_else(|_| "300".to_owned());
    let steps = steps.parse().expect("a number of steps");
    set_flush_denormals(true);
    let mut trained = Trained::new(Preset::Tiny, &[], steps).expect("Cargo keeps source code here");
    group.throughput(Throughput::Elements(Shape::TINY.tokens() as u64));
    for (variant, flush) in [("trained", true), ("trained_keeping_denormals", false)] {
        set_flush_denormals(flush);
        let mut batches = trained.batches.iter().cycle();
        group.bench_function(format!("tiny/{variant}"), |bencher| {
            bencher.iter(|| {
                let batch = batches.next().expect("an endless iterator");
                trained.step.run(batch).expect("memory for one step")
            });
        });
    }
    for (name, shape) in [("tiny", Shape::TINY), ("small", Shape::SMALL)] {
        group.throughput(Throughput::Elements(shape.tokens() as u64));
        group.bench_function(format!("{name}/products"), |bencher| {
            bencher.iter(products(shape))
        });
    }
    group.finish();
}

criterion_group!(benches, train_step);
criterion_main!(benches);
