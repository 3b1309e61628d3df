//! The kernels of overdrive-gpu on a GPU, against libtorch's operators in f64 on the CPU. A target of its own, because
//! the kernels are turned on for the whole process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "it/common.rs"]
mod common;

use common::{KINDS, assert_close, labels, values};
use overdrive_fused::{
    Activation, Convention, CrossEntropyOptions, LinearCrossEntropyOptions, QkvShape, Reduction,
    RotaryOptions, add_rms_norm, cross_entropy, glu, glu_pair, linear_cross_entropy, rms_norm,
    split_qkv_rotary,
};
use tch::{Device, Kind, Tensor};

const GPU: Device = Device::Cuda(0);

/// Compares `f` on the GPU in each dtype with `f` in f64 on the CPU: outputs, and the gradients of a fixed combination.
fn compare(what: &str, inputs: &[Tensor], f: impl Fn(&[Tensor]) -> Vec<Tensor>) {
    let _on = overdrive_gpu::override_enabled(true);
    assert!(overdrive_gpu::kernels(GPU).unwrap().is_some());
    for (kind, tolerance) in KINDS {
        let run = |device, wide: Kind| {
            let inputs: Vec<Tensor> = inputs
                .iter()
                .map(|x| x.to_kind(kind).to_kind(wide).to_device(device))
                .map(|x| x.detach().set_requires_grad(true))
                .collect();
            let outputs = f(&inputs);
            let mut loss = Tensor::from(0.0_f64).to_device(device);
            for (index, y) in outputs.iter().enumerate() {
                let factors = values(&y.size(), 99 + index as u64).to_kind(kind);
                let factors = factors.to_device(device).to_kind(Kind::Double);
                loss += (y.to_kind(Kind::Double) * factors).sum(Kind::Double);
            }
            loss.backward();
            let gradients = inputs.iter().map(Tensor::grad);
            let all = outputs.iter().map(Tensor::shallow_clone).chain(gradients);
            all.map(|x| x.detach().to_device(Device::Cpu))
                .collect::<Vec<_>>()
        };
        let (ours, exact) = (run(GPU, kind), run(Device::Cpu, Kind::Double));
        for (index, (ours, exact)) in ours.iter().zip(&exact).enumerate() {
            // Sums of thousands of rows in f32.
            let tolerance = tolerance * if kind == Kind::Float { 10.0 } else { 2.0 };
            assert_close(
                &format!("{what} {index} in {kind:?}"),
                ours,
                exact,
                tolerance,
            );
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn norms_and_gates_on_a_gpu() {
    for (rows, width) in [
        (1, 64),
        (300, 128),
        (2049, 1024),
        (1030, 4096),
        (65, 5120),
        (9, 16384),
    ] {
        let inputs = [
            values(&[rows, width], 1),
            values(&[width], 2),
            values(&[rows, width], 3),
        ];
        compare("rms_norm", &inputs[..2], |x| {
            vec![rms_norm(&x[0], &x[1], 1e-5).unwrap()]
        });
        compare("add_rms_norm", &inputs, |x| {
            let (y, sum) = add_rms_norm(&x[0], &x[2], &x[1], 1e-5).unwrap();
            vec![y, sum]
        });
        for activation in [
            Activation::Silu,
            Activation::Gelu,
            Activation::GeluTanh,
            Activation::Relu,
        ] {
            compare("glu", &inputs[..1], |x| {
                vec![glu(&x[0], activation).unwrap()]
            });
            let pair = [inputs[0].shallow_clone(), inputs[2].shallow_clone()];
            compare("glu_pair", &pair, |x| {
                vec![glu_pair(&x[0], &x[1], activation).unwrap()]
            });
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn rotations_on_a_gpu() {
    for (dim, pairs) in [(64, 32), (128, 64), (80, 16), (256, 128), (12, 5)] {
        for convention in [Convention::HalfSplit, Convention::Interleaved] {
            let shape = QkvShape {
                heads: 6,
                kv_heads: 2,
                head_dim: dim,
            };
            let angles = values(&[33, pairs], 2) * 3.0;
            let options = RotaryOptions {
                convention,
                ..Default::default()
            };
            compare(
                "split_qkv_rotary",
                &[values(&[2, 33, shape.width()], 1)],
                |x| {
                    let kind = if x[0].kind() == Kind::Double {
                        Kind::Double
                    } else {
                        Kind::Float
                    };
                    let angles = angles.to_kind(kind).to_device(x[0].device());
                    let (q, k, v) =
                        split_qkv_rotary(&x[0], &angles.cos(), &angles.sin(), shape, &options)
                            .unwrap();
                    vec![q, k, v]
                },
            );
        }
    }
}

#[test]
#[ignore = "needs a CUDA GPU"]
fn losses_on_a_gpu() {
    for classes in [33, 5003, 32_000] {
        let labels = labels(&[70], classes, 5, 3);
        for (softcap, label_smoothing, z_loss) in
            [(None, 0.0, 0.0), (None, 0.1, 1e-3), (Some(8.0), 0.0, 1e-3)]
        {
            let options = CrossEntropyOptions {
                softcap,
                label_smoothing,
                z_loss,
                ..Default::default()
            };
            for reduction in [Reduction::Sum, Reduction::Mean] {
                let options = CrossEntropyOptions {
                    reduction,
                    ..options
                };
                compare("cross_entropy", &[values(&[70, classes], 1)], |x| {
                    let labels = labels.to_device(x[0].device());
                    vec![cross_entropy(&x[0], &labels, &options).unwrap().loss]
                });
            }
            let options = LinearCrossEntropyOptions {
                loss: options,
                chunk_rows: std::num::NonZeroUsize::new(32),
                ..Default::default()
            };
            compare(
                "linear_cross_entropy",
                &[values(&[70, 64], 1), values(&[classes, 64], 2)],
                |x| {
                    let labels = labels.to_device(x[0].device());
                    vec![
                        linear_cross_entropy(&x[0], &x[1], &labels, &options)
                            .unwrap()
                            .loss,
                    ]
                },
            );
        }
    }
}
