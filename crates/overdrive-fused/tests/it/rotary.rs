//! Rotary positions against complex products in f64.

use crate::common::{KINDS, assert_close, compare, run, values};
use overdrive_fused::rows::RowAngles;
use overdrive_fused::{Convention, Layout, QkvShape, RotaryOptions, rotary, split_qkv_rotary};
use proptest::prelude::*;
use tch::{Kind, Tensor};

/// `x (B, T, H, D)` turned by `angles (B or 1, T, R/2)`.
fn reference(x: &Tensor, angles: &Tensor, convention: Convention) -> Tensor {
    let pairs = angles.size()[2];
    let (turned, rest) = (
        x.narrow(3, 0, 2 * pairs),
        x.narrow(3, 2 * pairs, x.size()[3] - 2 * pairs),
    );
    let angles = angles.to_kind(Kind::Double).unsqueeze(2);
    let turn = Tensor::complex(&angles.cos(), &angles.sin());
    let as_pairs = match convention {
        Convention::HalfSplit => turned.unflatten(3, [2, pairs]).transpose(3, 4),
        Convention::Interleaved => turned.unflatten(3, [pairs, 2]),
    };
    let product = (as_pairs.contiguous().view_as_complex() * turn).view_as_real();
    let back = match convention {
        Convention::HalfSplit => product.transpose(3, 4),
        Convention::Interleaved => product,
    };
    Tensor::cat(&[back.flatten(3, 4), rest], 3)
}

fn in_layout(x: &Tensor, layout: Layout) -> Tensor {
    match layout {
        Layout::Bthd => x.shallow_clone(),
        Layout::Bhtd => x.transpose(1, 2),
    }
}

fn any_options() -> impl Strategy<Value = RotaryOptions> {
    let convention = prop_oneof![Just(Convention::HalfSplit), Just(Convention::Interleaved)];
    let layout = prop_oneof![Just(Layout::Bhtd), Just(Layout::Bthd)];
    (convention, layout).prop_map(|(convention, layout)| RotaryOptions { convention, layout })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn rotary_and_its_gradients_equal_complex_products(
        batch in 1i64..4, length in 1i64..20, kv_heads in 1i64..4, group in 1i64..3,
        pairs in 1i64..40, rest in 0i64..10, own in any::<bool>(), which in 0usize..3,
        options in any_options(), seed in 0u64..1000,
    ) {
        let (kind, tolerance) = KINDS[which];
        let dim = 2 * pairs + rest;
        let angles = values(&[if own { batch } else { 1 }, length, pairs], seed) * 3.0;
        let (cos, sin) = (angles.cos(), angles.sin());
        let (cos, sin) = if own { (cos, sin) } else { (cos.squeeze_dim(0), sin.squeeze_dim(0)) };
        let inputs = [
            in_layout(&values(&[batch, length, kv_heads * group, dim], seed + 1), options.layout),
            in_layout(&values(&[batch, length, kv_heads, dim], seed + 2), options.layout),
        ];
        compare(&inputs, kind, tolerance,
            |x| { let (q, k) = rotary(&x[0], &x[1], &cos, &sin, &options).unwrap(); vec![q, k] },
            |x| x.iter().map(|x| {
                let x = in_layout(x, options.layout);
                in_layout(&reference(&x, &angles, options.convention), options.layout)
            }).collect());
    }

    #[test]
    fn splitting_a_joint_projection_equals_narrowing_and_turning(
        batch in 1i64..4, length in 1i64..40, kv_heads in 1i64..4, group in 1i64..4,
        pairs in 1i64..36, own in any::<bool>(), which in 0usize..3,
        options in any_options(), seed in 0u64..1000,
    ) {
        let (kind, tolerance) = KINDS[which];
        let shape = QkvShape { heads: kv_heads * group, kv_heads, head_dim: 2 * pairs };
        let angles = values(&[if own { batch } else { 1 }, length, pairs], seed) * 3.0;
        let (cos, sin) = (angles.cos(), angles.sin());
        let inputs = [values(&[batch, length, shape.width()], seed + 1)];
        compare(&inputs, kind, tolerance,
            |x| {
                let (q, k, v) = split_qkv_rotary(&x[0], &cos, &sin, shape, &options).unwrap();
                vec![q, k, v]
            },
            |x| {
                let heads = x[0].unflatten(2, [-1, shape.head_dim]);
                let parts = heads.split_with_sizes([shape.heads, kv_heads, kv_heads], 2);
                parts.iter().enumerate().map(|(index, part)| {
                    let part = if index < 2 {
                        reference(part, &angles, options.convention)
                    } else {
                        part.shallow_clone()
                    };
                    in_layout(&part, options.layout)
                }).collect()
            });
    }
}

#[test]
fn a_rotation_depends_on_the_distance_of_positions_only() {
    let frequencies = Tensor::from_slice(&[1.0_f32, 0.1, 0.01, 0.001]);
    let (q, k) = (values(&[1, 1, 1, 8], 1), values(&[1, 1, 1, 8], 2));
    let dot = |i: f64, j: f64| {
        let turn = |x: &Tensor, position: f64| {
            let angles = &frequencies * position;
            let (cos, sin) = (angles.cos().unsqueeze(0), angles.sin().unsqueeze(0));
            rotary(x, x, &cos, &sin, &RotaryOptions::default())
                .unwrap()
                .0
        };
        (turn(&q, i) * turn(&k, j))
            .sum(Kind::Double)
            .double_value(&[])
    };
    assert!((dot(7.0, 3.0) - dot(104.0, 100.0)).abs() < 1e-5);
}

#[test]
fn the_results_lie_in_memory_as_attention_wants_them() {
    let shape = QkvShape {
        heads: 4,
        kv_heads: 2,
        head_dim: 16,
    };
    let angles = values(&[6, 8], 1);
    let qkv = values(&[2, 6, shape.width()], 2);
    let options = RotaryOptions::default();
    let (q, k, v) = split_qkv_rotary(&qkv, &angles.cos(), &angles.sin(), shape, &options).unwrap();
    for x in [&q, &k, &v] {
        assert!(x.transpose(1, 2).is_contiguous());
    }
    let attended =
        Tensor::scaled_dot_product_attention(&q, &k, &v, None::<&Tensor>, 0.0, true, None, true);
    assert_eq!(attended.size(), [2, 4, 6, 16]);
}

#[test]
fn a_gradient_of_the_values_alone_leaves_queries_and_keys_at_zero() {
    let shape = QkvShape {
        heads: 2,
        kv_heads: 1,
        head_dim: 4,
    };
    let angles = values(&[3, 2], 1);
    let [_, gradients] = run(&[values(&[1, 3, 16], 2)], Kind::Float, |x| {
        let options = RotaryOptions::default();
        let (_, _, v) =
            split_qkv_rotary(&x[0], &angles.cos(), &angles.sin(), shape, &options).unwrap();
        vec![v.transpose(1, 2).flatten(2, 3)]
    });
    assert_eq!(
        gradients[0].narrow(2, 0, 12).abs().max().double_value(&[]),
        0.0
    );
    assert_eq!(gradients[0].narrow(2, 12, 4), values(&[1, 3, 4], 99));
}

#[test]
fn f64_goes_to_libtorchs_operators_and_equals_the_kernel() {
    let shape = QkvShape {
        heads: 2,
        kv_heads: 1,
        head_dim: 10,
    };
    let angles = values(&[3, 4], 1);
    for convention in [Convention::HalfSplit, Convention::Interleaved] {
        let options = RotaryOptions {
            convention,
            ..RotaryOptions::default()
        };
        let split = |kind| {
            run(&[values(&[2, 3, 40], 2)], kind, |x| {
                let (q, k, v) =
                    split_qkv_rotary(&x[0], &angles.cos(), &angles.sin(), shape, &options).unwrap();
                vec![q, k, v]
            })
        };
        let pairs = split(Kind::Float).into_iter().zip(split(Kind::Double));
        for (kernel, composed) in pairs.flat_map(|(a, b)| a.into_iter().zip(b)) {
            assert_close("f64", &kernel, &composed, 2e-6);
        }
    }
}

#[test]
fn shapes_that_do_not_fit_are_refused_with_what_was_expected() {
    let shape = QkvShape {
        heads: 2,
        kv_heads: 1,
        head_dim: 4,
    };
    let options = RotaryOptions::default();
    let angles = values(&[3, 2], 1);
    let error = split_qkv_rotary(&values(&[1, 3, 15], 1), &angles, &angles, shape, &options);
    assert_eq!(
        error.unwrap_err().to_string(),
        "`qkv of split_qkv_rotary` has shape [1, 3, 15]; it must be (B, T, 16), the width of QkvShape { heads: 2, kv_heads: 1, head_dim: 4 }"
    );
    let error = split_qkv_rotary(&values(&[1, 4, 16], 1), &angles, &angles, shape, &options);
    assert_eq!(
        error.unwrap_err().to_string(),
        "`cos of split_qkv_rotary` has shape [3, 2]; it must be (4, R/2) or (1, 4, R/2) with R at most the head size 4, for both cos and sin"
    );
    let x = values(&[2, 3, 4], 1);
    let error = rotary(&x, &x, &angles, &angles, &options);
    assert_eq!(
        error.unwrap_err().to_string(),
        "`q of rotary` has shape [2, 3, 4]; it must be four dimensions: batch, heads, length and head size"
    );
}

#[test]
fn rows_are_rotated_as_tensors_are_and_their_shape_is_checked() {
    let shape = QkvShape {
        heads: 4,
        kv_heads: 2,
        head_dim: 6,
    };
    let qkv = values(&[2, 3, shape.width()], 1).to_kind(Kind::Float);
    let angles = values(&[3, 2], 2).to_kind(Kind::Float);
    let (cos, sin) = (angles.cos(), angles.sin());
    let rotation = RowAngles::new(&cos, &sin, [2, 3], shape).unwrap();
    let mut rows: Vec<f32> = Vec::try_from(qkv.flatten(0, 2)).unwrap();
    assert!(rotation.rotate(&mut rows[1..]).is_err());
    rotation.rotate(&mut rows).unwrap();
    let options = RotaryOptions {
        layout: Layout::Bthd,
        ..RotaryOptions::default()
    };
    let (q, k, v) = split_qkv_rotary(&qkv, &cos, &sin, shape, &options).unwrap();
    let expected = Tensor::cat(&[q, k, v], 2).flatten(2, 3);
    assert_eq!(Tensor::from_slice(&rows).view_as(&expected), expected);
    // Two pairs are more than a head of three channels has.
    for (heads, head_dim) in [(4, 3), (4, 0), (0, 6), (-1, 6)] {
        let wrong = QkvShape {
            heads,
            head_dim,
            ..shape
        };
        assert!(
            RowAngles::new(&cos, &sin, [2, 3], wrong).is_err(),
            "{wrong:?}"
        );
    }
}
