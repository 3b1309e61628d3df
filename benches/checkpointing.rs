//! Claim: with √n segments the activations of n blocks take memory that grows with the square root of the
//! depth, at the cost of one more forward pass. With every block checkpointed they take one input per block,
//! and the peak is the lowest. Keeping the matmul results (`selective`) lies between that and the plain run in
//! memory and in time.
//!
//! Analysis: full recomputation costs one more forward pass, 0.3 to 0.4 of a step (here the upper end, because
//! dropout draws its random numbers in forward). Segments skip the last one, and `selective` skips matmuls and
//! attention. Bytes are the peak above the allocations before the step, with the gradients of the weights in
//! place: the activations and the temporaries of backward. The table is printed first, then criterion times
//! the same steps.

use std::time::Instant;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use overdrive::sys::memory;
use overdrive_checkpointing::{
    CheckpointOptions, RegionResult, SavePolicy, Schedule, Shared, checkpoint_scheduled,
};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
const DEPTHS: [usize; 5] = [4, 9, 16, 25, 36];
const DIM: i64 = 128;
const HEADS: i64 = 4;
const INPUT: [i64; 3] = [4, 128, DIM];

/// A pre-norm attention and MLP block with dropout.
struct Block {
    qkv: Tensor,
    out: Tensor,
    up: Tensor,
    down: Tensor,
}

impl Block {
    fn new() -> Self {
        let weight = |rows, columns| {
            (Tensor::randn([rows, columns], F32) * 0.05)
                .detach()
                .set_requires_grad(true)
        };
        Self {
            qkv: weight(3 * DIM, DIM),
            out: weight(DIM, DIM),
            up: weight(4 * DIM, DIM),
            down: weight(DIM, 4 * DIM),
        }
    }

    fn forward(&self, x: &Tensor) -> RegionResult<Tensor> {
        let (batch, length, _) = x.size3()?;
        let none = None::<&Tensor>;
        let normed = x.f_layer_norm([DIM], none, none, 1e-5, false)?;
        let heads = [batch, length, 3, HEADS, DIM / HEADS];
        let qkv = normed.f_linear(&self.qkv, none)?.f_view(heads)?;
        let parts = qkv.f_permute([2, 0, 3, 1, 4])?.f_unbind(0)?;
        let attended = Tensor::f_scaled_dot_product_attention(
            &parts[0], &parts[1], &parts[2], none, 0.0, true, None, false,
        )?;
        let attended = attended
            .f_transpose(1, 2)?
            .f_reshape([batch, length, DIM])?;
        let x = x.f_add(&attended.f_linear(&self.out, none)?.f_dropout(0.1, true)?)?;
        let normed = x.f_layer_norm([DIM], none, none, 1e-5, false)?;
        let hidden = normed.f_linear(&self.up, none)?.f_gelu("none")?;
        Ok(x.f_add(&hidden.f_linear(&self.down, none)?.f_dropout(0.1, true)?)?)
    }
}

struct Variant {
    name: &'static str,
    schedule: Schedule,
    options: CheckpointOptions,
}

fn variants() -> [Variant; 4] {
    let variant = |name, schedule, policy| Variant {
        name,
        schedule,
        options: CheckpointOptions::keeping(policy),
    };
    [
        variant("plain", Schedule::Never, SavePolicy::Nothing),
        variant("every_block", Schedule::EveryBlock, SavePolicy::Nothing),
        variant("sqrt_segments", Schedule::SqrtSegments, SavePolicy::Nothing),
        variant(
            "selective",
            Schedule::EveryBlock,
            SavePolicy::MatmulsAndAttention,
        ),
    ]
}

fn step(blocks: &[Shared<Block>], x: &Tensor, variant: &Variant) {
    let y = checkpoint_scheduled(
        blocks,
        &variant.schedule,
        x,
        &variant.options,
        Block::forward,
    )
    .expect("the blocks fit the input");
    y.square().mean(Kind::Float).backward();
}

/// Returns the peak bytes of a step, and the minimum time of five in seconds.
fn measure(blocks: &[Shared<Block>], x: &Tensor, variant: &Variant) -> (f64, f64) {
    let stats = || memory::stats(Device::Cpu).expect("the CPU is counted");
    let before = stats().allocated_bytes;
    memory::reset_peak(Device::Cpu).expect("the CPU is counted");
    step(blocks, x, variant);
    let bytes = stats().peak_allocated_bytes - before;
    let seconds = (0..5).map(|_| {
        let start = Instant::now();
        step(blocks, x, variant);
        start.elapsed().as_secs_f64()
    });
    (bytes as f64, seconds.fold(f64::INFINITY, f64::min))
}

fn checkpointing(criterion: &mut Criterion) {
    let blocks: Vec<Shared<Block>> = (0..36).map(|_| Shared::new(Block::new())).collect();
    let x = Tensor::randn(INPUT, F32);
    let variants = variants();
    // Allocates the gradients, and fills the allocator's cache.
    step(&blocks, &x, &variants[0]);

    println!("| blocks | variant | peak MiB | of plain | ms | of plain |");
    println!("|---:|---|---:|---:|---:|---:|");
    for depth in DEPTHS {
        let mut plain = None;
        for variant in &variants {
            let (bytes, seconds) = measure(&blocks[..depth], &x, variant);
            let (plain_bytes, plain_seconds) = *plain.get_or_insert((bytes, seconds));
            println!(
                "| {depth} | {} | {:.1} | {:.2} | {:.1} | {:.2} |",
                variant.name,
                bytes / f64::from(1 << 20),
                bytes / plain_bytes,
                seconds * 1e3,
                seconds / plain_seconds
            );
        }
    }

    let mut group = criterion.benchmark_group("checkpointing");
    group.sample_size(10);
    for depth in DEPTHS {
        for variant in &variants {
            let id = BenchmarkId::new(variant.name, depth);
            group.bench_function(id, |bencher| {
                bencher.iter(|| step(&blocks[..depth], &x, variant));
            });
        }
    }
    group.finish();
}

criterion_group!(benches, checkpointing);
criterion_main!(benches);
