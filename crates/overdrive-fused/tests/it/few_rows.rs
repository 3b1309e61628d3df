//! Products of few rows, which nobody differentiates, against f64.

use crate::common::{assert_close, values};
use overdrive_fused::{joint_linear, linear};
use proptest::prelude::*;
use tch::{Kind, Tensor};

/// Relative to the largest element: rounding of the result, and of sums of up to 300 products in f32.
const KINDS: [(Kind, f64); 3] = [
    (Kind::Float, 3e-6),
    (Kind::BFloat16, 4e-3),
    (Kind::Half, 5e-4),
];

proptest! {
    #![proptest_config(ProptestConfig::with_cases(96))]

    #[test]
    fn a_product_of_few_rows_equals_that_of_f64(
        rows in 1i64..40, width in 1i64..300, outputs in 1i64..400, second in 0i64..9,
        biased in any::<bool>(), seed in 0u64..1000, which in 0usize..3,
    ) {
        let (kind, tolerance) = KINDS[which];
        let rounded = |shape: &[i64], seed| values(shape, seed).to_kind(kind);
        let x = rounded(&[rows, width], seed);
        let weights = [rounded(&[outputs, width], seed + 1), rounded(&[second, width], seed + 2)];
        let biases = [rounded(&[outputs], seed + 3), rounded(&[second], seed + 4)];
        let (weights, biases): (Vec<_>, Vec<_>) = (weights.iter().collect(), biases.iter().collect());
        let given = biased.then_some(biases.as_slice());
        let y = joint_linear(&x, &weights, given).unwrap();
        let wide = |tensors: &[&Tensor]| Tensor::cat(tensors, 0).to_kind(Kind::Double);
        let bias = biased.then(|| wide(&biases));
        let exact = x.to_kind(Kind::Double).linear(&wide(&weights), bias.as_ref());
        prop_assert_eq!(y.kind(), kind);
        assert_close("product", &y, &exact, tolerance);
    }
}

#[test]
fn a_row_is_the_same_in_every_batch_up_to_rounding_and_for_every_number_of_threads() {
    let (x, w) = (values(&[7, 768], 1), values(&[3000, 768], 2));
    let all = linear(&x, &w, None).unwrap();
    for row in 0..7 {
        let one = linear(&x.narrow(0, row, 1), &w, None).unwrap();
        assert_close("row", &one, &all.narrow(0, row, 1), 3e-6);
    }
    let again = linear(&x, &w, None).unwrap();
    assert_eq!(all, again);
}

#[test]
fn more_dimensions_are_kept_and_a_view_that_is_not_contiguous_gives_the_same() {
    let (x, w) = (values(&[2, 3, 20], 1), values(&[5, 20], 2));
    let y = linear(&x, &w, None).unwrap();
    assert_eq!(y.size(), [2, 3, 5]);
    let turned = values(&[20, 2, 3], 1).permute([1, 2, 0]);
    let y = linear(&turned, &w, None).unwrap();
    assert_close("turned", &y, &turned.matmul(&w.tr()), 3e-6);
}

#[test]
fn where_a_gradient_is_wanted_there_is_one() {
    let (x, w) = (
        values(&[1, 20], 1),
        values(&[5, 20], 2).set_requires_grad(true),
    );
    linear(&x, &w, None).unwrap().sum(Kind::Float).backward();
    assert_close("gradient", &w.grad(), &x.expand([5, 20], false), 1e-6);
}
