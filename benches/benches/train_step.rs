//! Claim: a training step of the `tiny` and `small` presets, whole, and how much of it the CPU cache
//! of freed blocks saves (`cached` against `uncached`).
//!
//! Analysis: the matrix products are the floor (6 · parameters · tokens operations); what lies over
//! it is memory traffic of norms, rotation, activation, softmax and the loss, and, uncached, the
//! kernel's zeroing of pages that malloc gave back.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use overdrive::sys::memory;
use overdrive_benches::{Shape, Step};
use tch::Device;

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
    group.finish();
}

criterion_group!(benches, train_step);
criterion_main!(benches);
