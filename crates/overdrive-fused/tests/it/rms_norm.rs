//! RMSNorm against libtorch's elementary operators in f64.

use crate::common::{KINDS, assert_close, compare, run, values};
use overdrive_autograd::{BackwardOptions, GradOptions, backward, grad};
use overdrive_fused::{add_rms_norm, rms_norm};
use proptest::prelude::*;
use tch::{Kind, Tensor};

fn reference(x: &Tensor, weight: &Tensor, eps: f64) -> Tensor {
    let mean = x.square().mean_dim([-1i64].as_slice(), true, None::<Kind>);
    x * (mean + eps).rsqrt() * weight
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn rms_norm_and_its_gradients_equal_elementary_operators(
        rows in 1i64..70, width in 1i64..200, seed in 0u64..1000, which in 0usize..3,
    ) {
        let (kind, tolerance) = KINDS[which];
        let inputs = [values(&[rows, width], seed), values(&[width], seed + 1)];
        compare(&inputs, kind, tolerance,
            |x| vec![rms_norm(&x[0], &x[1], 1e-5).unwrap()],
            |x| vec![reference(&x[0], &x[1], 1e-5)]);
    }

    #[test]
    fn add_rms_norm_and_its_gradients_equal_elementary_operators(
        rows in 1i64..70, width in 1i64..200, seed in 0u64..1000,
    ) {
        let shape = [rows, width];
        let inputs = [values(&shape, seed), values(&shape, seed + 1), values(&[width], seed + 2)];
        compare(&inputs, Kind::Float, 2e-6,
            |x| { let (y, sum) = add_rms_norm(&x[0], &x[1], &x[2], 1e-6).unwrap(); vec![y, sum] },
            |x| { let sum = &x[0] + &x[1]; vec![reference(&sum, &x[2], 1e-6), sum] });
    }
}

#[test]
fn a_long_batch_is_summed_to_the_gradient_of_the_weight_in_blocks() {
    let inputs = [values(&[3, 1001, 96], 5), values(&[96], 6)];
    compare(
        &inputs,
        Kind::Float,
        5e-6,
        |x| vec![rms_norm(&x[0], &x[1], 1e-5).unwrap()],
        |x| vec![reference(&x[0], &x[1], 1e-5)],
    );
}

#[test]
fn inputs_that_are_not_contiguous_give_the_same() {
    let inputs = [values(&[33, 5, 7], 1), values(&[33], 2)];
    compare(
        &inputs,
        Kind::Float,
        2e-6,
        |x| vec![rms_norm(&x[0].permute([1, 2, 0]), &x[1], 1e-5).unwrap()],
        |x| vec![reference(&x[0].permute([1, 2, 0]), &x[1], 1e-5)],
    );
}

#[test]
fn a_low_precision_sum_is_normalised_as_it_was_rounded() {
    let (x, residual) = (values(&[4, 40], 1), values(&[4, 40], 2));
    let [x, residual, weight] =
        [x, residual, values(&[40], 3)].map(|tensor| tensor.to_kind(Kind::BFloat16));
    let (y, sum) = add_rms_norm(&x, &residual, &weight, 1e-5).unwrap();
    assert_eq!(sum, &x + &residual);
    assert_eq!(y, rms_norm(&sum, &weight, 1e-5).unwrap());
}

#[test]
fn only_the_sum_or_only_the_normalised_may_be_used() {
    let inputs = [values(&[4, 20], 1), values(&[4, 20], 2), values(&[20], 3)];
    let only = |index: usize| {
        run(&inputs[..2], Kind::Float, |x| {
            let (y, sum) = add_rms_norm(&x[0], &x[1], &inputs[2], 1e-5).unwrap();
            vec![[y, sum][index].shallow_clone()]
        })
    };
    let [_, gradients] = only(1);
    assert_eq!(gradients[0], values(&[4, 20], 99));
    let [_, gradients] = only(0);
    let [_, exact] = run(&inputs[..2], Kind::Double, |x| {
        vec![reference(
            &(&x[0] + &x[1]),
            &inputs[2].to_kind(Kind::Double),
            1e-5,
        )]
    });
    assert_close("gradient", &gradients[1], &exact[1], 2e-6);
}

#[test]
fn mixed_dtypes_meet_where_libtorch_lets_them_meet() {
    let x = values(&[3, 8], 1).to_kind(Kind::BFloat16);
    let weight = values(&[8], 2);
    let y = rms_norm(&x, &weight, 1e-5).unwrap();
    assert_eq!(y.kind(), Kind::Float);
    assert_eq!(y, rms_norm(&x.to_kind(Kind::Float), &weight, 1e-5).unwrap());
}

#[test]
fn f64_goes_to_libtorchs_operators() {
    let (x, weight) = (
        values(&[3, 8], 1).to_kind(Kind::Double),
        values(&[8], 2).to_kind(Kind::Double),
    );
    let y = rms_norm(&x, &weight, 1e-5).unwrap();
    assert_close("output", &y, &reference(&x, &weight, 1e-5), 1e-14);
}

#[test]
fn the_results_of_a_batch_are_bit_equal_for_any_number_of_threads() {
    let all = || {
        let inputs = [values(&[517, 130], 1), values(&[130], 2)];
        run(&inputs, Kind::Float, |x| {
            vec![rms_norm(&x[0], &x[1], 1e-5).unwrap()]
        })
    };
    let several = all();
    // Inside a parallel region everything runs on one thread.
    let serial = std::sync::Mutex::new(None);
    overdrive_sys::threads::parallel_for(2, 1, |range| {
        if range.contains(&0) {
            *serial.lock().unwrap() = Some(all());
        }
    });
    let serial = serial.into_inner().unwrap().unwrap();
    for (a, b) in several.iter().flatten().zip(serial.iter().flatten()) {
        assert_eq!(a, b);
    }
}

#[test]
fn a_batch_of_no_rows_gives_no_rows() {
    let y = rms_norm(&values(&[0, 8], 1), &values(&[8], 2), 1e-5).unwrap();
    assert_eq!(y.size(), [0, 8]);
}

#[test]
fn nan_and_infinity_stay_in_their_row() {
    let x = Tensor::from_slice2(&[[1.0_f32, f32::NAN], [1.0, f32::INFINITY], [3.0, 4.0]]);
    let y = rms_norm(&x, &Tensor::from_slice(&[1.0_f32, 1.0]), 0.0).unwrap();
    assert!(y.double_value(&[0, 0]).is_nan());
    assert!(y.double_value(&[1, 1]).is_nan());
    assert!((y.double_value(&[2, 0]) - 3.0 / 12.5_f64.sqrt()).abs() < 1e-6);
}

#[test]
fn a_weight_of_another_length_is_refused_with_both_shapes() {
    let error = rms_norm(&values(&[2, 8], 1), &values(&[7], 2), 1e-5).unwrap_err();
    assert_eq!(
        error.to_string(),
        "`weight of rms_norm` has shape [7]; it must be (C,), one element for each channel of x, whose shape is [2, 8]"
    );
    let other = add_rms_norm(
        &values(&[2, 8], 1),
        &values(&[1, 8], 2),
        &values(&[8], 3),
        1e-5,
    );
    assert_eq!(
        other.unwrap_err().to_string(),
        "`residual of add_rms_norm` has shape [1, 8]; it must be [2, 8], the shape of x"
    );
    let integers = rms_norm(&Tensor::from_slice(&[1_i64]), &values(&[1], 2), 1e-5);
    assert_eq!(
        integers.unwrap_err().to_string(),
        "`x of rms_norm` is Int64; it must be Float, Double, Half or BFloat16"
    );
}

#[test]
fn a_second_derivative_is_refused() {
    let x = values(&[2, 8], 1).set_requires_grad(true);
    let y = rms_norm(&x, &values(&[8], 2), 1e-5)
        .unwrap()
        .square()
        .sum(Kind::Float);
    let options = GradOptions {
        create_graph: true,
        ..GradOptions::default()
    };
    let first = grad(&[&y], &[&x], &options).unwrap().remove(0).unwrap();
    let again = backward(&[&first.sum(Kind::Float)], &BackwardOptions::default());
    let error = again.unwrap_err().to_string();
    assert!(error.contains("rms_norm"), "{error}");
}
