//! The functions on the kernels of overdrive-gpu, with a library that stands in for the CUDA driver: it writes down
//! launches and does in plain loops in f32 what the kernels do. So results and gradients are those of the arguments
//! that a GPU would get. A target of its own: the stand-in serves all tensors on the CPU of the process.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

#[path = "it/common.rs"]
mod common;

use common::{assert_close, compare, labels, run, values};
use counted::StandIn;
use overdrive_fused::{
    Convention, CrossEntropyOptions, Layout, LinearCrossEntropyOptions, QkvShape, Reduction,
    RotaryOptions, add_rms_norm, cross_entropy, linear_cross_entropy, rms_norm, rotary,
    split_qkv_rotary, swiglu, swiglu_pair,
};
use tch::{Kind, Tensor};

#[path = "../../overdrive-gpu/tests/stand_in/counted.rs"]
mod counted;

fn norm(x: &Tensor, weight: &Tensor) -> Tensor {
    let mean = x.square().mean_dim([-1i64].as_slice(), true, None::<Kind>);
    x * (mean + 1e-5).rsqrt() * weight
}

#[test]
fn norms_launch_once_in_each_direction() {
    let stand_in = StandIn::new();
    let inputs = [
        values(&[3, 7, 48], 1),
        values(&[48], 2),
        values(&[3, 7, 48], 3),
    ];
    compare(
        &inputs[..2],
        Kind::Float,
        3e-6,
        |x| vec![rms_norm(&x[0], &x[1], 1e-5).unwrap()],
        |x| vec![norm(&x[0], &x[1])],
    );
    assert_eq!(
        stand_in.launches(),
        ["rms_norm_forward", "rms_norm_backward"]
    );
    compare(
        &inputs,
        Kind::Float,
        3e-6,
        |x| {
            let (y, sum) = add_rms_norm(&x[0], &x[2], &x[1], 1e-5).unwrap();
            vec![y, sum]
        },
        |x| {
            let sum = &x[0] + &x[2];
            vec![norm(&sum, &x[1]), sum]
        },
    );
    assert_eq!(
        stand_in.launches(),
        ["rms_norm_forward", "rms_norm_backward"]
    );
}

#[test]
fn a_result_of_the_sum_that_nobody_uses_is_not_needed() {
    let stand_in = StandIn::new();
    let inputs = [values(&[5, 32], 1), values(&[5, 32], 2), values(&[32], 3)];
    for index in [0, 1] {
        let [_, ours] = run(&inputs, Kind::Float, |x| {
            let (y, sum) = add_rms_norm(&x[0], &x[1], &x[2], 1e-5).unwrap();
            // The weight is used in both cases, so that it has a gradient.
            vec![[y, sum + &x[2] * 2.0][index].shallow_clone()]
        });
        let [_, exact] = run(&inputs, Kind::Double, |x| {
            let sum = &x[0] + &x[1];
            vec![[norm(&sum, &x[2]), sum + &x[2] * 2.0][index].shallow_clone()]
        });
        for (ours, exact) in ours.iter().zip(&exact) {
            assert_close("gradient", ours, exact, 3e-6);
        }
    }
    // The gradient of the sum alone is passed on.
    let expected = ["rms_norm_forward", "rms_norm_backward", "rms_norm_forward"];
    assert_eq!(stand_in.launches(), expected);
}

#[test]
fn gates_launch_once_in_each_direction() {
    let stand_in = StandIn::new();
    let inputs = [values(&[2, 5, 64], 1), values(&[2, 5, 64], 2)];
    compare(
        &inputs,
        Kind::Float,
        3e-6,
        |x| vec![swiglu_pair(&x[0], &x[1]).unwrap()],
        |x| vec![x[0].silu() * &x[1]],
    );
    assert_eq!(stand_in.launches(), ["glu_forward", "glu_backward"]);
    compare(
        &inputs[..1],
        Kind::Float,
        3e-6,
        |x| vec![swiglu(&x[0]).unwrap()],
        |x| vec![x[0].narrow(-1, 0, 32).silu() * x[0].narrow(-1, 32, 32)],
    );
    assert_eq!(stand_in.launches(), ["glu_forward", "glu_backward"]);
}

#[test]
fn rotations_launch_once_in_each_direction() {
    let stand_in = StandIn::new();
    let (batch, length, dim, pairs) = (2, 5, 16, 6);
    let shape = QkvShape {
        heads: 4,
        kv_heads: 2,
        head_dim: dim,
    };
    let inputs = [values(&[batch, length, shape.width()], 1)];
    for own in [1, batch] {
        let angles = values(&[own, length, pairs], 2) * 3.0;
        let (cos, sin) = (angles.cos(), angles.sin());
        for layout in [Layout::Bhtd, Layout::Bthd] {
            let options = RotaryOptions {
                convention: Convention::HalfSplit,
                layout,
            };
            let split = |x: &[Tensor]| {
                let (q, k, v) = split_qkv_rotary(&x[0], &cos, &sin, shape, &options).unwrap();
                vec![q, k, v]
            };
            // f64 has no kernel, so libtorch's operators are the reference.
            compare(&inputs, Kind::Float, 3e-6, split, split);
            assert_eq!(stand_in.launches(), ["rotary_split", "rotary_join"]);
        }
        let heads = [
            values(&[batch, 4, length, dim], 3),
            values(&[batch, 2, length, dim], 4),
        ];
        let both = |x: &[Tensor]| {
            let (q, k) = rotary(&x[0], &x[1], &cos, &sin, &RotaryOptions::default()).unwrap();
            vec![q, k]
        };
        compare(&heads, Kind::Float, 3e-6, both, both);
        assert_eq!(stand_in.launches(), ["rotary_join"; 4]);
    }
}

#[test]
fn losses_and_their_gradients_come_from_the_logits_in_place() {
    let stand_in = StandIn::new();
    let labels = labels(&[2, 9], 33, 4, 7);
    let logits = [values(&[2, 9, 33], 1) * 2.0];
    for reduction in [Reduction::Sum, Reduction::Mean] {
        for (softcap, label_smoothing, z_loss) in
            [(None, 0.0, 0.0), (None, 0.1, 1e-2), (Some(3.0), 0.0, 1e-2)]
        {
            let options = CrossEntropyOptions {
                reduction,
                softcap,
                label_smoothing,
                z_loss,
                ..Default::default()
            };
            let loss = |x: &[Tensor]| vec![cross_entropy(&x[0], &labels, &options).unwrap().loss];
            compare(&logits, Kind::Float, 3e-6, loss, loss);
            assert_eq!(stand_in.launches(), ["cross_entropy", "cross_entropy"]);
        }
    }
}

#[test]
fn a_chunk_of_logits_is_one_launch() {
    let stand_in = StandIn::new();
    let labels = labels(&[20], 33, 0, 7);
    let inputs = [values(&[20, 8], 1), values(&[33, 8], 2), values(&[33], 3)];
    let head = |x: &[Tensor], chunk| {
        let options = LinearCrossEntropyOptions {
            bias: Some(&x[2]),
            chunk_rows: std::num::NonZeroUsize::new(chunk),
            ..Default::default()
        };
        vec![
            linear_cross_entropy(&x[0], &x[1], &labels, &options)
                .unwrap()
                .loss,
        ]
    };
    compare(&inputs, Kind::Float, 5e-6, |x| head(x, 8), |x| head(x, 20));
    assert_eq!(stand_in.launches(), ["cross_entropy"; 3]);
    // Without a gradient only the losses are computed, and the logits of the chunk stay as they are.
    let loss = tch::no_grad(|| head(&inputs, 8)).remove(0);
    let exact = inputs.each_ref().map(|x| x.to_kind(Kind::Double));
    assert_close("loss", &loss, &tch::no_grad(|| head(&exact, 20))[0], 3e-6);
    assert_eq!(stand_in.launches(), ["cross_entropy"; 3]);
}

#[test]
fn what_has_no_kernel_is_computed_as_before() {
    let stand_in = StandIn::new();
    // 33 elements: not a multiple of 16.
    let inputs = [values(&[4, 33], 1), values(&[33], 2)];
    compare(
        &inputs,
        Kind::Float,
        3e-6,
        |x| vec![rms_norm(&x[0], &x[1], 1e-5).unwrap()],
        |x| vec![norm(&x[0], &x[1])],
    );
    assert!(stand_in.launches().is_empty());
}
