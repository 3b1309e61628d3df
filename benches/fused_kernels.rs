//! Claim: each fused function of overdrive-fused, forward and backward, takes less time than the same function
//! in libtorch's operators (as in a model without it), at the shapes of the `small` preset.
//!
//! Analysis: all but the head are bound by memory, so the throughput is given in the bytes that must be read and
//! written at least once in forward and backward together. The head (`linear_cross_entropy`) is three
//! matmuls; its throughput is in their floating-point operations.

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use overdrive_autograd::{GradOptions, grad};
use overdrive_fused::{
    CrossEntropyOptions, LinearCrossEntropyOptions, QkvShape, RotaryOptions, add_rms_norm,
    cross_entropy, linear_cross_entropy, rms_norm, split_qkv_rotary, swiglu,
};
use tch::{Device, Kind, Reduction, Tensor};

const F32: (Kind, Device) = (Kind::Float, Device::Cpu);

/// The `small` preset: batch 8, context 256.
const ROWS: i64 = 2048;
const LENGTH: i64 = 256;
const WIDTH: i64 = 384;
const INNER: i64 = 1024;
const HEADS: i64 = 6;
const HEAD: i64 = 64;
const CLASSES: i64 = 8192;

/// A fused function or its composed form, from tensors to tensors.
type Function = fn(&[Tensor]) -> Vec<Tensor>;

/// RMSNorm as overdrive-transformer composes it: one reduction and one multiplication forward.
fn composed_norm(x: &Tensor, weight: &Tensor) -> Tensor {
    let norm = x.linalg_norm(2.0, [-1i64].as_slice(), true, None::<Kind>);
    let inverse = (norm.square() * (1.0 / WIDTH as f64) + 1e-5).rsqrt();
    x * inverse * weight
}

/// Returns the angles of the positions, `(T, D/2)`.
fn angles() -> Tensor {
    let positions = Tensor::arange(LENGTH, F32).unsqueeze(1);
    positions * (Tensor::arange(HEAD / 2, F32) * -0.3).exp()
}

fn fused_rotary(x: &[Tensor]) -> Vec<Tensor> {
    let shape = QkvShape {
        heads: HEADS,
        kv_heads: HEADS,
        head_dim: HEAD,
    };
    let (cos, sin) = (&x[1], &x[2]);
    let (q, k, v) = split_qkv_rotary(&x[0], cos, sin, shape, &RotaryOptions::default())
        .expect("the shapes are those of the preset");
    vec![q, k, v]
}

/// Splits the features and multiplies complex numbers: the fastest form without a kernel.
fn composed_rotary(x: &[Tensor]) -> Vec<Tensor> {
    let turn = Tensor::complex(&x[1], &x[2]).unsqueeze(1);
    let heads = x[0].unflatten(2, [-1, HEAD]);
    let parts = heads.split_with_sizes([HEADS; 3], 2);
    let turned = |x: &Tensor| {
        let pairs = x.unflatten(-1, [HEAD / 2, 2]).view_as_complex();
        (pairs * &turn).view_as_real().flatten(-2, -1)
    };
    let parts = [turned(&parts[0]), turned(&parts[1]), parts[2].contiguous()];
    parts.map(|x| x.transpose(1, 2)).into()
}

/// Returns labels without a random generator.
fn labels() -> Tensor {
    (Tensor::arange(ROWS, (Kind::Int64, Device::Cpu)) * 37).remainder(CLASSES)
}

fn composed_loss(logits: &Tensor) -> Vec<Tensor> {
    vec![logits.cross_entropy_loss(&labels(), None::<&Tensor>, Reduction::Mean, -100, 0.0)]
}

/// Times forward and backward of both forms, with a fixed gradient for each output, so that only the claim is
/// timed. The first `leaves` inputs need gradients.
fn pair(
    criterion: &mut Criterion,
    name: &str,
    throughput: Throughput,
    (inputs, leaves): (&[Tensor], usize),
    forms: [(&str, Function); 2],
) {
    let mut group = criterion.benchmark_group(format!("fused_kernels/{name}"));
    group.throughput(throughput);
    let inputs: Vec<Tensor> = inputs
        .iter()
        .enumerate()
        .map(|(index, x)| x.detach().set_requires_grad(index < leaves))
        .collect();
    for (form, run) in forms {
        let gradients: Vec<Tensor> = run(&inputs).iter().map(Tensor::ones_like).collect();
        let gradients: Vec<Option<&Tensor>> = gradients.iter().map(Some).collect();
        let leaves: Vec<&Tensor> = inputs[..leaves].iter().collect();
        group.bench_function(form, |bencher| {
            bencher.iter(|| {
                let outputs = run(&inputs);
                let options = GradOptions {
                    gradients: &gradients,
                    ..GradOptions::default()
                };
                grad(&outputs.iter().collect::<Vec<_>>(), &leaves, &options)
                    .expect("every output depends on every leaf")
            });
        });
    }
    group.finish();
}

/// Returns the bytes of `floats` elements that are read or written.
fn traffic(floats: i64) -> Throughput {
    Throughput::Bytes(floats.unsigned_abs() * 4)
}

fn fused_kernels(criterion: &mut Criterion) {
    let x = |shape: &[i64]| Tensor::randn(shape, F32);
    let row = ROWS * WIDTH;

    // Forward reads x and writes y; backward reads x and dy and writes dx.
    let inputs = [x(&[ROWS, WIDTH]), x(&[WIDTH])];
    pair(
        criterion,
        "rms_norm",
        traffic(5 * row),
        (&inputs, 2),
        [
            ("fused", |x| {
                vec![rms_norm(&x[0], &x[1], 1e-5).expect("the shapes fit")]
            }),
            ("composed", |x| vec![composed_norm(&x[0], &x[1])]),
        ],
    );

    // Reads x and the residual, writes sum and y; backward reads the sum and two gradients, writes one.
    let inputs = [x(&[ROWS, WIDTH]), x(&[ROWS, WIDTH]), x(&[WIDTH])];
    pair(
        criterion,
        "add_rms_norm",
        traffic(8 * row),
        (&inputs, 3),
        [
            ("fused", |x| {
                let (y, sum) = add_rms_norm(&x[0], &x[1], &x[2], 1e-5).expect("the shapes fit");
                vec![y, sum]
            }),
            ("composed", |x| {
                let sum = &x[0] + &x[1];
                vec![composed_norm(&sum, &x[2]), sum]
            }),
        ],
    );

    // Reads and writes the projection, in each direction.
    let table = angles();
    let inputs = [
        x(&[ROWS / LENGTH, LENGTH, 3 * WIDTH]),
        table.cos(),
        table.sin(),
    ];
    pair(
        criterion,
        "split_qkv_rotary",
        traffic(4 * 3 * row),
        (&inputs, 1),
        [("fused", fused_rotary), ("composed", composed_rotary)],
    );

    // Reads two and writes one; backward reads three and writes two.
    let inputs = [x(&[ROWS, 2 * INNER])];
    pair(
        criterion,
        "swiglu",
        traffic(8 * ROWS * INNER),
        (&inputs, 1),
        [
            ("fused", |x| vec![swiglu(&x[0]).expect("an even width")]),
            ("composed", |x| {
                let halves = x[0].chunk(2, -1);
                vec![halves[0].silu() * &halves[1]]
            }),
        ],
    );

    // Reads the logits; backward reads them again and writes their gradient.
    let inputs = [x(&[ROWS, CLASSES])];
    pair(
        criterion,
        "cross_entropy",
        traffic(3 * ROWS * CLASSES),
        (&inputs, 1),
        [
            ("fused", |x| {
                let output = cross_entropy(&x[0], &labels(), &CrossEntropyOptions::default());
                vec![output.expect("labels are classes").loss]
            }),
            ("composed", |x| composed_loss(&x[0])),
        ],
    );

    // Three matmuls of two operations per element.
    let inputs = [x(&[ROWS, WIDTH]), x(&[CLASSES, WIDTH]) * 0.02];
    let operations = (6 * ROWS * WIDTH * CLASSES).unsigned_abs();
    pair(
        criterion,
        "linear_cross_entropy",
        Throughput::Elements(operations),
        (&inputs, 2),
        [
            ("fused", |x| {
                let options = LinearCrossEntropyOptions::default();
                let output = linear_cross_entropy(&x[0], &x[1], &labels(), &options);
                vec![output.expect("labels are classes").loss]
            }),
            ("composed", |x| {
                composed_loss(&x[0].linear(&x[1], None::<&Tensor>))
            }),
        ],
    );
}

criterion_group!(benches, fused_kernels);
criterion_main!(benches);
