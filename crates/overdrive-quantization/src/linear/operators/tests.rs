//! Each operator on the CPU, where libtorch has it too, against the dequantized weight. `tests/cuda.rs` has
//! what a GPU gives.
#![allow(clippy::unwrap_used, reason = "a test may panic")]

use super::scaled_mm::Scaling;
use super::*;
use crate::tiles::Tiled;
use crate::{Activations, GroupOptions, GroupScales, GroupedParts, Scheme};
use tch::Kind;

/// Returns values that need no generator, which other tests share.
fn numbers(seed: i64, size: [i64; 2], kind: Kind) -> Tensor {
    let x = Tensor::arange(size[0] * size[1], (Kind::Double, Device::Cpu)) + seed * 1000;
    let x = (x * 12.9898).sin() * 43_758.545_3;
    ((&x - x.floor()) * 2 - 1).view(size).to_kind(kind)
}

/// Returns the largest difference from the matmul with the dequantized weight, relative to its largest element.
fn error(y: &Tensor, x: &Tensor, weight: &QuantizedWeight) -> f64 {
    let dense = weight.dequantize(Kind::Double).unwrap();
    let exact = x.to_kind(Kind::Double).matmul(&dense.tr());
    let difference = (y.to_kind(Kind::Double) - &exact).abs().max();
    difference.double_value(&[]) / exact.abs().max().double_value(&[])
}

#[test]
fn rows_of_floats_times_bytes() {
    let weight =
        QuantizedWeight::quantize(&numbers(1, [72, 192], Kind::Float), Scheme::Int8WeightOnly);
    let weight = weight.unwrap();
    let Storage::Int8 { codes, scales } = &weight.storage else {
        panic!("bytes")
    };
    // Sums of 192 in f32; scales and results in the kind of x, on a CPU.
    for (kind, tolerance) in [
        (Kind::Float, 1e-6),
        (Kind::BFloat16, 8e-3),
        (Kind::Half, 1e-3),
    ] {
        for rows in [1, 3, 8] {
            let x = numbers(2, [rows, 192], kind);
            assert!(int8_pack::fits(&x));
            let y = int8_pack::product(&x, codes, scales).unwrap();
            let found = error(&y, &x, &weight);
            assert!(found < tolerance, "{rows} {kind:?}: {found}");
        }
    }
    // A GPU's kernel is for f32 alone.
    let hopper = Some((9, 0));
    let applies = |kind, capability| int8_pack::applies(&numbers(2, [4, 192], kind), capability);
    assert!(applies(Kind::Float, hopper));
    assert!(!applies(Kind::Float, None));
    assert!(!applies(Kind::BFloat16, hopper) && !applies(Kind::Half, hopper));
    assert!(!int8_pack::fits(&numbers(2, [9, 192], Kind::Float)));
    assert!(!int8_pack::fits(&numbers(2, [1, 192], Kind::Double)));
}

/// Returns the weight in the tiles of the CPU's operator.
fn tiled(weight: &QuantizedWeight) -> Tiled {
    let convert = |codes: &Tensor, adjacent| -> Result<Tensor> {
        let codes = crate::composed::unpacked(codes, true)?.f_to_kind(Kind::Int)?;
        Ok(codes.f_internal_convert_weight_to_int4pack_for_cpu(adjacent)?)
    };
    Tiled::new(weight, convert).unwrap().unwrap()
}

#[test]
fn rows_of_bf16_and_f16_times_four_bits_in_groups() {
    for group_size in [32, 64, 128] {
        for symmetric in [true, false] {
            for scales in [GroupScales::Half, GroupScales::Float] {
                let options = GroupOptions {
                    bits: 4,
                    group_size,
                    symmetric,
                };
                let dense = numbers(3, [64, 384], Kind::Float) + 0.2;
                let weight = QuantizedWeight::quantize_groups(&dense, options, scales).unwrap();
                let tiled = tiled(&weight);
                for (rows, kind) in [(1, Kind::BFloat16), (5, Kind::Half), (64, Kind::BFloat16)] {
                    let x = numbers(4, [rows, 384], kind);
                    assert!(int4_pack::fits(&x));
                    let y = int4_pack::product(&x, &tiled).unwrap();
                    // Activations, scales, offsets and results in bf16: half of 2⁻⁸ each, all but the last averaged.
                    let found = error(&y, &x, &weight);
                    assert!(
                        found < 8e-3,
                        "{options:?}, {rows} rows of {kind:?}: {found}"
                    );
                }
            }
        }
    }
}

#[test]
fn reordered_groups_take_activations_in_their_order() {
    let dense = numbers(5, [16, 64], Kind::Float);
    let weight = QuantizedWeight::quantize(&dense, "int4-g32".parse().unwrap()).unwrap();
    let Storage::Grouped { codes, scales, .. } = &weight.storage else {
        panic!("groups")
    };
    let order: Vec<i32> = (0..64).map(|place| (place * 7 + 3) % 64).collect();
    let weight = QuantizedWeight::from_grouped(GroupedParts {
        bits: 4,
        codes: codes.shallow_clone(),
        scales: scales.shallow_clone(),
        offsets: None,
        order: Some(Tensor::from_slice(&order)),
    });
    let (weight, x) = (weight.unwrap(), numbers(6, [3, 64], Kind::BFloat16));
    let y = int4_pack::product(&x, &tiled(&weight)).unwrap();
    assert!(error(&y, &x, &weight) < 8e-3);
}

#[test]
fn activations_that_four_bits_do_not_take_are_known_before() {
    assert!(int4_pack::fits(&numbers(8, [1, 96], Kind::BFloat16)));
    assert!(int4_pack::fits(&numbers(8, [64, 96], Kind::Half)));
    assert!(!int4_pack::fits(&numbers(8, [1, 96], Kind::Float)));
    assert!(!int4_pack::fits(&numbers(8, [65, 96], Kind::BFloat16)));
}

#[test]
fn more_rows_than_the_operator_takes_are_multiplied_with_the_dense_weight() {
    let dense = numbers(14, [16, 128], Kind::Float);
    let weight = QuantizedWeight::quantize(&dense, "int4-g32".parse().unwrap()).unwrap();
    let x = numbers(15, [70, 128], Kind::Float);
    let expected = forward(&x, &[&weight], &[None], Kind::Float, false).unwrap();
    let on_a_gpu = Tiled::new(&weight, crate::tiles::tests::as_on_a_gpu)
        .unwrap()
        .unwrap();
    let weight = QuantizedWeight {
        storage: Storage::Tiled(on_a_gpu),
        ..weight
    };
    for recording in [false, true] {
        let y = forward(&x, &[&weight], &[None], Kind::Float, recording).unwrap();
        assert_eq!(y, expected);
    }
    // The gradient too.
    let x = x.set_requires_grad(true);
    let y = crate::linear(&x, &weight, None).unwrap();
    y.sum(Kind::Float).backward();
    let exact = weight.dequantize(Kind::Float).unwrap().sum_dim_intlist(
        [0i64].as_slice(),
        false,
        Kind::Float,
    );
    let difference = (x.grad() - exact).abs().max().double_value(&[]);
    assert!(difference < 1e-4, "{difference}");
}

#[test]
fn rows_of_eight_bit_floats() {
    let dense = numbers(9, [48, 160], Kind::Float);
    let weight = QuantizedWeight::quantize(&dense, Scheme::Fp8).unwrap();
    let Storage::Fp8 { codes, scales } = &weight.storage else {
        panic!("floats")
    };
    for (kind, tolerance) in [(Kind::Float, 1e-6), (Kind::BFloat16, 1e-6)] {
        for rows in [1, 7, 40] {
            let x = numbers(10, [rows, 160], kind);
            let _ = x.get(0).fill_(0.0);
            let _ = x.get(0).get(1).fill_(1.0);
            assert!(scaled_mm::fits(&x, &weight));
            let y = scaled_mm::product(&x, codes, scales, Scaling::After).unwrap();
            // The activations are rounded as weights are: against those it is a product in f32.
            let rounded = QuantizedWeight::quantize(&x, Scheme::Fp8).unwrap();
            let rounded = rounded.dequantize(Kind::Double).unwrap();
            let found = error(&y, &rounded, &weight);
            assert!(found < tolerance, "{rows} {kind:?}: {found}");
            // Half of an eighth of each activation, or of the least step, 1/448/512 of the largest.
            let dense = weight.dequantize(Kind::Double).unwrap();
            let x = x.to_kind(Kind::Double);
            let most = x.abs().amax(1, true);
            let bound = (x.abs() / 16 + most / (448.0 * 1024.0)).matmul(&dense.abs().tr());
            let difference = (y.to_kind(Kind::Double) - x.matmul(&dense.tr())).abs();
            let within = difference.le_tensor(&(bound * 1.0001)).all();
            assert!(bool::try_from(within).unwrap(), "{rows} {kind:?}");
        }
    }
    let narrow = QuantizedWeight::quantize(&dense.narrow(0, 0, 40), Scheme::Fp8).unwrap();
    assert!(!scaled_mm::fits(
        &numbers(11, [2, 160], Kind::Float),
        &narrow
    ));
}

#[test]
fn operators_wait_for_the_device_that_has_them() {
    let weight = |name: &str| {
        let dense = numbers(12, [16, 128], Kind::Float);
        QuantizedWeight::quantize(&dense, name.parse().unwrap()).unwrap()
    };
    let x = numbers(13, [1, 128], Kind::BFloat16);
    let float8 = weight("fp8");
    for (capability, expected) in [
        (None, [false, false]),
        (Some((7, 5)), [false, false]),
        (Some((8, 0)), [false, false]),
        (Some((8, 9)), [false, true]),
        (Some((9, 0)), [false, true]),
        (Some((12, 0)), [false, true]),
    ] {
        let found = [
            // Its kernel takes f32 only.
            int8_pack::applies(&x, capability),
            scaled_mm::applies(&x, &float8, capability),
        ];
        assert_eq!(found, expected, "{capability:?}");
    }
    assert_eq!(Scaling::of(Some((8, 9))), Scaling::After);
    assert_eq!(Scaling::of(Some((9, 0))), Scaling::Rows);
    // Here there is none of them.
    assert_eq!(capability(Device::Cpu), None);
    let chosen = float8.with_activations(Activations::Float8).unwrap();
    let y = forward(&x, &[&chosen], &[None], Kind::BFloat16, false).unwrap();
    assert!(error(&y, &x, &chosen) < 8e-3);
}
