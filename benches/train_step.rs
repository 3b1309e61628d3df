//! Claim: a training step of the `tiny` and `small` presets, whole, and how much of it the CPU cache
//! of freed blocks saves (`cached` against `uncached`).
//!
//! Analysis: the matrix products are the floor. `products` runs those of a step alone, forward and
//! backward, without attention's; what lies over it is attention, the memory traffic of norms,
//! rotation, activation and the loss, and, uncached, the kernel's zeroing of pages that malloc gave
//! back.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use overdrive::sys::memory;
use overdrive_benches::{Shape, Step};
use tch::{Device, Kind, Tensor};

/// The products of a step: y = x Wᵀ for each weight, and in backward dx = dy W and dW = dyᵀ x.
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
