//! Gated units and biased activations against libtorch's operators in f64.

use crate::common::{KINDS, compare, values};
use overdrive_fused::{Activation, bias_activation, glu, glu_pair, swiglu, swiglu_pair};
use proptest::prelude::*;
use tch::{Kind, Tensor};

fn reference(activation: Activation, x: &Tensor) -> Tensor {
    match activation {
        Activation::Silu => x * x.sigmoid(),
        Activation::Gelu => x.gelu("none"),
        Activation::GeluTanh => x.gelu("tanh"),
        _ => x.relu(),
    }
}

fn any_activation() -> impl Strategy<Value = Activation> {
    prop_oneof![
        Just(Activation::Silu),
        Just(Activation::Gelu),
        Just(Activation::GeluTanh),
        Just(Activation::Relu)
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn gated_units_and_their_gradients_equal_libtorchs_operators(
        rows in 1i64..60, width in 1i64..120, which in 0usize..3,
        activation in any_activation(), seed in 0u64..1000,
    ) {
        let (kind, tolerance) = KINDS[which];
        let joint = [values(&[rows, 2 * width], seed) * 3.0];
        compare(&joint, kind, tolerance,
            |x| vec![glu(&x[0], activation).unwrap()],
            |x| {
                let halves = x[0].chunk(2, -1);
                vec![reference(activation, &halves[0]) * &halves[1]]
            });
        let pair = [values(&[rows, width], seed) * 3.0, values(&[rows, width], seed + 1)];
        compare(&pair, kind, tolerance,
            |x| vec![glu_pair(&x[0], &x[1], activation).unwrap()],
            |x| vec![reference(activation, &x[0]) * &x[1]]);
    }

    #[test]
    fn biased_activations_and_their_gradients_equal_libtorchs_operators(
        rows in 1i64..200, width in 1i64..120, activation in any_activation(), seed in 0u64..1000,
    ) {
        let inputs = [values(&[rows, width], seed) * 3.0, values(&[width], seed + 1)];
        compare(&inputs, Kind::Float, 4e-6,
            |x| vec![bias_activation(&x[0], &x[1], activation).unwrap()],
            |x| vec![reference(activation, &(&x[0] + &x[1]))]);
    }
}

#[test]
fn swiglu_is_the_gated_unit_with_silu() {
    let joint = values(&[3, 20], 1);
    let y = swiglu(&joint).unwrap();
    let halves = joint.chunk(2, 1);
    assert_eq!(y, swiglu_pair(&halves[0], &halves[1]).unwrap());
    assert_eq!(y, glu(&joint, Activation::Silu).unwrap());
}

#[test]
fn inputs_that_are_not_contiguous_give_the_same() {
    let inputs = [values(&[34, 5, 7], 1)];
    compare(
        &inputs,
        Kind::Float,
        2e-6,
        |x| vec![swiglu(&x[0].permute([1, 2, 0])).unwrap()],
        |x| {
            let x = x[0].permute([1, 2, 0]);
            let halves = x.chunk(2, -1);
            vec![reference(Activation::Silu, &halves[0]) * &halves[1]]
        },
    );
}

#[test]
fn a_large_batch_is_cut_into_blocks_and_stays_the_same() {
    let inputs = [values(&[700, 2 * 333], 1)];
    compare(
        &inputs,
        Kind::Float,
        2e-6,
        |x| vec![swiglu(&x[0]).unwrap()],
        |x| {
            let halves = x[0].chunk(2, -1);
            vec![halves[0].silu() * &halves[1]]
        },
    );
}

#[test]
fn gates_far_from_zero_are_open_or_shut_and_never_nan() {
    let gates = [-1e30_f32, -200.0, -88.8, 88.8, 200.0, 1e15];
    for activation in [
        Activation::Silu,
        Activation::Gelu,
        Activation::GeluTanh,
        Activation::Relu,
    ] {
        let gate = Tensor::from_slice(&gates).set_requires_grad(true);
        let y = glu_pair(&gate, &gate.ones_like(), activation).unwrap();
        y.sum(Kind::Float).backward();
        for (index, gate_value) in gates.iter().enumerate() {
            let y = y.double_value(&[index as i64]);
            let slope = gate.grad().double_value(&[index as i64]);
            if *gate_value < 0.0 {
                assert!(
                    y.abs() < 1e-30 && slope.abs() < 1e-30,
                    "{activation:?}({gate_value}) = {y}, {slope}"
                );
            } else {
                assert_eq!(
                    (y, slope),
                    (f64::from(*gate_value), 1.0),
                    "{activation:?}({gate_value})"
                );
            }
        }
    }
}

#[test]
fn f64_and_empty_batches_go_to_libtorchs_operators() {
    let joint = values(&[3, 20], 1).to_kind(Kind::Double);
    let halves = joint.chunk(2, 1);
    assert_eq!(swiglu(&joint).unwrap(), halves[0].silu() * &halves[1]);
    assert_eq!(swiglu(&values(&[0, 8], 1)).unwrap().size(), [0, 4]);
}

#[test]
fn shapes_that_do_not_fit_are_refused() {
    assert_eq!(
        swiglu(&values(&[2, 7], 1)).unwrap_err().to_string(),
        "`gate_up of glu` has shape [2, 7]; it must be (…, 2·I), with as many gates as gated values"
    );
    assert_eq!(
        swiglu_pair(&values(&[2, 7], 1), &values(&[2, 6], 1))
            .unwrap_err()
            .to_string(),
        "`up of glu_pair` has shape [2, 6]; it must be [2, 7], the shape of gate"
    );
    assert_eq!(
        bias_activation(&values(&[2, 7], 1), &values(&[6], 1), Activation::Gelu)
            .unwrap_err()
            .to_string(),
        "`bias of bias_activation` has shape [6]; it must be (I,), one element for each channel of x, whose shape is [2, 7]"
    );
}
