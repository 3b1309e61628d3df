//! Claim: the recurrent kernel of overdrive-linear-attention takes less time than the chunked form in libtorch's operators, for
//! a prompt, a training step and a decode step, at the shape of Qwen3-Next (16 key heads, 32 value heads of 128).
//!
//! Analysis: a prompt is bound by arithmetic, four operations for each element of the states and token; the throughput is in
//! these elements, so that a core with 16 lanes of multiply-adds at 3 GHz can reach 12 G a second at most. A decode step
//! reads and writes the states, so its throughput is in their bytes, twice. The pools of a decode step take turns, so that the
//! states come from memory as those of a model's layers do. The convolution is bound by memory.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use overdrive::linear_attention::{
    Backend, CausalConv1dOptions, DeltaRuleInputs, DeltaRuleOptions, causal_conv1d,
    gated_delta_rule, gated_delta_rule_update,
};
use tch::{Device, Kind, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);
const KEY_HEADS: i64 = 16;
const HEADS: i64 = 32;
const DIM: i64 = 128;
const TOKENS: i64 = 2048;
const BACKENDS: [(&str, Backend); 2] = [("kernel", Backend::Fused), ("libtorch", Backend::Math)];

fn options(backend: Backend) -> DeltaRuleOptions {
    DeltaRuleOptions {
        qk_l2norm: true,
        backend,
        ..DeltaRuleOptions::default()
    }
}

/// The tensors of the delta rule, of which the first dimensions are `leading`.
fn random(leading: &[i64], requires_grad: bool) -> [Tensor; 5] {
    let of = |rest: &[i64]| Tensor::randn([leading, rest].concat(), F32);
    let tensors = [
        of(&[KEY_HEADS, DIM]),
        of(&[KEY_HEADS, DIM]),
        of(&[HEADS, DIM]),
        of(&[HEADS]).abs() * -0.1,
        of(&[HEADS]).sigmoid(),
    ];
    tensors.map(|x| x.set_requires_grad(requires_grad))
}

fn inputs([query, key, value, decay, beta]: &[Tensor; 5]) -> DeltaRuleInputs<'_> {
    DeltaRuleInputs {
        query,
        key,
        value,
        decay,
        beta,
    }
}

fn prompt(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("gated_delta_rule_prompt_2048");
    group.throughput(Throughput::Elements((TOKENS * HEADS * DIM * DIM) as u64));
    group.sample_size(10);
    let tensors = random(&[1, TOKENS], false);
    for (name, backend) in BACKENDS {
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                gated_delta_rule(inputs(&tensors), None, &options(backend)).expect("the shapes fit")
            });
        });
    }
    group.finish();

    let mut group = criterion.benchmark_group("gated_delta_rule_forward_and_backward_2048");
    group.throughput(Throughput::Elements((TOKENS * HEADS * DIM * DIM) as u64));
    group.sample_size(10);
    let tensors = random(&[1, TOKENS], true);
    let gradient = Tensor::randn([1, TOKENS, HEADS, DIM], F32);
    for (name, backend) in BACKENDS {
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                let (output, _) = gated_delta_rule(inputs(&tensors), None, &options(backend))
                    .expect("the shapes fit");
                let loss = (output * &gradient).sum(Kind::Float);
                Tensor::run_backward(&[loss], &tensors.each_ref(), false, false)
            });
        });
    }
    group.finish();
}

fn decode(criterion: &mut Criterion) {
    for sequences in [1, 8] {
        let name = format!("gated_delta_rule_decode_{sequences}");
        let mut group = criterion.benchmark_group(name);
        let bytes = sequences * HEADS * DIM * DIM * 4;
        group.throughput(Throughput::Bytes(2 * bytes as u64));
        let tensors = random(&[sequences], false);
        let slots: Vec<i64> = (0..sequences).collect();
        let offsets: Vec<i64> = (0..=sequences).collect();
        for (name, backend) in BACKENDS {
            // Larger than the caches together.
            let shape = [sequences, HEADS, DIM, DIM];
            let mut pools: Vec<Tensor> = (0..64).map(|_| Tensor::zeros(shape, F32)).collect();
            let mut next = 0;
            group.bench_function(name, |bencher| {
                bencher.iter(|| {
                    next = (next + 1) % pools.len();
                    gated_delta_rule_update(
                        inputs(&tensors),
                        &mut pools[next],
                        &slots,
                        &offsets,
                        &options(backend),
                    )
                });
            });
        }
        group.finish();
    }
}

fn convolution(criterion: &mut Criterion) {
    let channels = 2 * KEY_HEADS * DIM + HEADS * DIM;
    let weight = Tensor::randn([channels, 4], F32).set_requires_grad(true);
    for kind in [Kind::Float, Kind::BFloat16] {
        let name = format!("causal_conv1d_forward_and_backward_2048_{kind:?}");
        let mut group = criterion.benchmark_group(name);
        group.throughput(Throughput::Elements((TOKENS * channels) as u64));
        group.sample_size(10);
        let x = Tensor::randn([1, TOKENS, channels], F32).to_kind(kind);
        let gradient = x.randn_like();
        let x = x.set_requires_grad(true);
        for (name, backend) in BACKENDS {
            let options = CausalConv1dOptions {
                backend,
                ..CausalConv1dOptions::default()
            };
            group.bench_function(name, |bencher| {
                bencher.iter(|| {
                    let (y, _) =
                        causal_conv1d(&x, &weight, None, None, &options).expect("the shapes fit");
                    let loss = (y * &gradient).sum(Kind::Float);
                    Tensor::run_backward(&[loss], &[&x, &weight], false, false)
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, prompt, decode, convolution);
criterion_main!(benches);
