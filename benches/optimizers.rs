//! Claim: over 20M float32 parameters, 8-bit AdamW keeps a quarter of the state of AdamW, Lion and SGD half and
//! Adafactor almost none; paged AdamW still steps at a useful speed if a quarter of its state fits into memory.
//!
//! Analysis: the bytes of its state are printed before each line. The baseline `adamw_fused` is libtorch's
//! own kernel at memory bandwidth: 28 bytes per parameter, the lower bound of all others. The 8-bit step moves
//! 16 bytes, but every element needs two table lookups and two searches, so it is bound by arithmetic and takes
//! a multiple of the baseline on a few cores; it saves memory, not time. Paging adds the mapping of pages, and
//! the disk's speed once the system's cache is full. Lion moves 20 bytes; Adafactor reads the gradient three
//! times; Muon is matmuls, and is listed for its cost.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use overdrive::optim::{
    Adafactor, AdafactorConfig, AdamW, AdamW8bit, AdamW8bitConfig, AdamWConfig, Implementation,
    Lion, LionConfig, Muon, MuonConfig, Optimizer, PagedAdamW, PagedAdamWConfig, PagingConfig,
    ParamGroup, Sgd, SgdConfig, StateBits, StateDict,
};
use overdrive::sys::grad;
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
/// A quarter of AdamW's state for these parameters.
const PAGED_BUDGET: u64 = 40 << 20;

type Make = fn(Vec<ParamGroup>) -> Box<dyn Optimizer>;

/// The matrices of a decoder with 20M parameters.
fn groups() -> Vec<ParamGroup> {
    let mut shapes = vec![[8192, 512]];
    for _ in 0..5 {
        shapes.extend([[512, 512]; 4]);
        shapes.extend([[1408, 512], [1408, 512], [512, 1408]]);
    }
    let with_gradient = |shape: [i64; 2]| {
        let weight = Tensor::randn(shape, F32).set_requires_grad(true);
        grad::set(&weight, &Tensor::randn(shape, F32)).expect("same shape, dtype and device");
        weight
    };
    let named = shapes.into_iter().enumerate();
    let named = named.map(|(i, shape)| (format!("weight.{i}"), with_gradient(shape)));
    vec![ParamGroup::new("all", named.collect())]
}

fn boxed<O: Optimizer + 'static>(made: overdrive::optim::Result<O>) -> Box<dyn Optimizer> {
    Box::new(made.expect("the options are valid"))
}

fn paged(state_bits: StateBits) -> PagedAdamWConfig {
    let paging = PagingConfig {
        max_resident_bytes: PAGED_BUDGET,
        ..PagingConfig::default()
    };
    PagedAdamWConfig {
        state_bits,
        paging,
        ..PagedAdamWConfig::default()
    }
}

fn all() -> Vec<(&'static str, Make)> {
    vec![
        ("adamw_fused", |groups| {
            let config = AdamWConfig {
                implementation: Implementation::Fused,
                ..AdamWConfig::default()
            };
            boxed(AdamW::new(groups, config))
        }),
        ("adamw_8bit", |groups| {
            boxed(AdamW8bit::new(groups, AdamW8bitConfig::default()))
        }),
        ("paged_adamw_32bit", |groups| {
            boxed(PagedAdamW::new(groups, paged(StateBits::ThirtyTwo)))
        }),
        ("paged_adamw_8bit", |groups| {
            boxed(PagedAdamW::new(groups, paged(StateBits::Eight)))
        }),
        ("sgd_momentum", |groups| {
            let config = SgdConfig {
                momentum: 0.9,
                ..SgdConfig::default()
            };
            boxed(Sgd::new(groups, config))
        }),
        ("lion", |groups| {
            boxed(Lion::new(groups, LionConfig::default()))
        }),
        ("adafactor", |groups| {
            boxed(Adafactor::new(groups, AdafactorConfig::default()))
        }),
        ("muon", |groups| {
            boxed(Muon::new(groups, MuonConfig::default()))
        }),
    ]
}

fn bytes(state: &StateDict) -> u64 {
    let of = |tensor: &Tensor| (tensor.numel() * tensor.kind().elt_size_in_bytes()) as u64;
    state.tensors.values().map(of).sum()
}

fn optimizers(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("optimizers");
    group.sample_size(10);
    for (name, make) in all() {
        let mut optimizer = make(groups());
        let parameters: usize = optimizer.parameters().iter().map(Tensor::numel).sum();
        optimizer.step().expect("every weight has a gradient");
        let state = bytes(&optimizer.state_dict().expect("it has stepped"));
        println!(
            "{name}: {:.1} MB of state, {:.2} bytes per parameter",
            state as f64 / 1e6,
            state as f64 / parameters as f64
        );
        group.throughput(Throughput::Elements(parameters as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| optimizer.step().expect("every weight has a gradient"));
        });
    }
    group.finish();
}

criterion_group!(benches, optimizers);
criterion_main!(benches);
