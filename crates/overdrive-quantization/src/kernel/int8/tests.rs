#![allow(clippy::unwrap_used, reason = "a test may panic")]

use std::sync::OnceLock;

use half::bf16;
use overdrive_kernels::Element;
use proptest::prelude::*;

use super::*;
use crate::kernel::joint_gemm::{JointGemm, joint_gemm};

/// Returns numbers in -1..1 that depend only on the seed.
fn numbers(seed: u64, len: usize) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let next = || {
        state = state
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    std::iter::repeat_with(next).take(len).collect()
}

fn codes(seed: u64, len: usize) -> Vec<i8> {
    // -128 too, which no codec of ours makes but a file may have.
    let code = |x: f32| (x * 128.5).clamp(-128.0, 127.0) as i8;
    numbers(seed, len).into_iter().map(code).collect()
}

/// Computes one output after another, with sums of 64 bits.
fn reference<T: Element>(x: &Int8Rows, codes: &[i8], scales: &[f32], bias: Option<&[T]>) -> Vec<T> {
    let mut y = Vec::new();
    for row in 0..x.rows {
        for (output, scale) in scales.iter().enumerate() {
            let w = &codes[output * x.width..(output + 1) * x.width];
            let products = x.row(row).iter().zip(w);
            let sum: i64 = products.map(|(x, w)| i64::from(*x) * i64::from(*w)).sum();
            let bias = bias.map_or(0.0, |bias| bias[output].to_f32());
            y.push(T::from_f32(sum as f32 * x.scales[row] * scale + bias));
        }
    }
    y
}

fn check<T: Element + PartialEq + std::fmt::Debug>(
    seed: u64,
    rows: usize,
    width: usize,
    outputs: &[usize],
) {
    let input: Vec<T> = numbers(seed, rows * width)
        .into_iter()
        .map(T::from_f32)
        .collect();
    let x = Int8Rows::quantize(&input, width);
    let weights: Vec<_> = outputs
        .iter()
        .zip(seed..)
        .map(|(outputs, seed)| {
            let bias = numbers(seed + 1, *outputs)
                .into_iter()
                .map(T::from_f32)
                .collect();
            let bias: Option<Vec<T>> = (seed % 2 == 0).then_some(bias);
            (
                codes(seed + 2, outputs * width),
                numbers(seed + 3, *outputs),
                bias,
            )
        })
        .collect();
    let each: Vec<Vec<T>> = weights
        .iter()
        .map(|(codes, scales, bias)| reference(&x, codes, scales, bias.as_deref()))
        .collect();
    let columns: usize = outputs.iter().sum();
    let mut expected = Vec::new();
    for row in 0..rows {
        for (y, outputs) in each.iter().zip(outputs) {
            expected.extend_from_slice(&y[row * outputs..(row + 1) * outputs]);
        }
    }
    for set in InstructionSet::available() {
        let mut first = 0;
        let mut joint = Vec::new();
        for (codes, scales, bias) in &weights {
            let gemm = Int8Gemm {
                x: &x,
                codes,
                scales,
                split: None,
                set,
            };
            let outputs = gemm.outputs();
            joint.push(JointGemm::new(first, Box::new(gemm), bias.as_deref()));
            first += outputs;
        }
        let mut y = vec![T::from_f32(f32::NAN); rows * columns];
        joint_gemm(&joint, rows, columns, &mut y);
        assert_eq!(
            y,
            expected,
            "{} {rows} rows, {outputs:?} x {width}",
            set.name()
        );
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn every_instruction_set_has_the_results_of_exact_sums(
        seed in 0_u64..1000,
        rows in 0_usize..60,
        width in 1_usize..400,
        outputs in prop::collection::vec(1_usize..120, 1..4),
    ) {
        check::<f32>(seed, rows, width, &outputs);
        check::<bf16>(seed, rows, width, &outputs);
    }
}

#[test]
fn inputs_of_several_blocks_are_summed_exactly() {
    for (rows, width) in [(2, 2048), (3, 4099), (8, 4096), (13, 2113), (20, 6200)] {
        check::<f32>(rows as u64, rows, width, &[37, 2]);
    }
}

#[test]
fn sums_beyond_the_unsigned_detour_are_exact() {
    // 127 · 255 · width does not fit 32 bits, 127 · 128 · width does.
    let width = MAX_WIDTH - 64;
    let x = Int8Rows::quantize(&vec![1.0_f32; width * 25], width);
    for code in [127, -128] {
        let codes = vec![code; width * 3];
        for set in InstructionSet::available() {
            for rows in [1, 2, 25] {
                let x = Int8Rows {
                    codes: x.codes[..rows * x.padded].to_vec(),
                    scales: x.scales[..rows].to_vec(),
                    sums: x.sums[..rows].to_vec(),
                    rows,
                    width: x.width,
                    padded: x.padded,
                    groups: OnceLock::new(),
                    spare: std::sync::Mutex::default(),
                };
                let gemm = Int8Gemm {
                    x: &x,
                    codes: &codes,
                    scales: &[1.0; 3],
                    split: None,
                    set,
                };
                let mut y = vec![0.0_f32; rows * 3];
                joint_gemm::<f32>(&[JointGemm::new(0, Box::new(gemm), None)], rows, 3, &mut y);
                let sum = 127 * i64::from(code) * width as i64;
                let expected = sum as f32 * (1.0 / 127.0);
                assert!(
                    y.iter().all(|y| *y == expected),
                    "{} {rows}: {y:?}",
                    set.name()
                );
            }
        }
    }
}

#[test]
fn a_column_that_reaches_the_threshold_is_an_outlier() {
    let input = [1.0, 6.0, -6.0, 5.9];
    let is_split = |threshold| {
        let split = OutlierSplit::new(&input, 4, threshold);
        let codes = &split.int8.codes[..4];
        [0, 1, 2, 3].map(|column| codes[column] == 0)
    };
    assert_eq!(is_split(6.0), [false, true, true, false]);
    assert_eq!(is_split(6.1), [false; 4]);
    let infinite = OutlierSplit::new(&[1.0, f32::INFINITY], 2, f32::INFINITY);
    for set in InstructionSet::available() {
        assert_eq!(infinite.products(set, &[1, 1], 0..1), None);
    }
}

#[test]
fn large_columns_are_multiplied_as_they_are() {
    let (rows, width, outputs) = (30, 150, 70);
    let mut input = numbers(7, rows * width);
    for row in 0..rows {
        input[row * width + 3] *= 1000.0;
        input[row * width + 149] = 64.0;
    }
    let codes = codes(8, outputs * width);
    let scales = numbers(9, outputs);
    let bias = numbers(10, outputs);
    let split = OutlierSplit::new(&input, width, 6.0);
    assert!(
        split
            .int8
            .codes
            .chunks(split.int8.padded)
            .all(|row| row[3] == 0 && row[149] == 0)
    );
    let small = reference::<f32>(&split.int8, &codes, &scales, Some(&bias));
    for set in InstructionSet::available() {
        for rows in [1, 5, 30] {
            let split = OutlierSplit::new(&input[..rows * width], width, 6.0);
            let gemm = Int8Gemm {
                x: &split.int8,
                codes: &codes,
                scales: &scales,
                split: Some(&split),
                set,
            };
            let mut y = vec![0.0_f32; rows * outputs];
            let joint = JointGemm::new(0, Box::new(gemm), Some(&bias[..]));
            joint_gemm(&[joint], rows, outputs, &mut y);
            for row in 0..rows {
                for output in 0..outputs {
                    let large = [3, 149].map(|column| {
                        let x = f64::from(input[row * width + column]);
                        x * f64::from(codes[output * width + column])
                    });
                    let large = (large[0] + large[1]) * f64::from(scales[output]);
                    let expected = f64::from(small[row * outputs + output]) + large;
                    let found = f64::from(y[row * outputs + output]);
                    // Rounding of sums of numbers up to 1.3e5.
                    assert!(
                        (found - expected).abs() < 0.1,
                        "{} {found} {expected}",
                        set.name()
                    );
                }
            }
        }
    }
}

#[test]
fn a_row_with_nan_gives_nan_and_others_do_not() {
    let width = 70;
    let mut input = numbers(1, 3 * width);
    input[width + 5] = f32::NAN;
    let x = Int8Rows::quantize(&input, width);
    let codes = codes(2, 2 * width);
    let gemm = Int8Gemm {
        x: &x,
        codes: &codes,
        scales: &[1.0, 1.0],
        split: None,
        set: InstructionSet::best(),
    };
    let mut y = vec![0.0_f32; 6];
    joint_gemm::<f32>(&[JointGemm::new(0, Box::new(gemm), None)], 3, 2, &mut y);
    assert_eq!(y.map_nan(), [false, false, true, true, false, false]);
}

trait MapNan {
    fn map_nan(&self) -> Vec<bool>;
}

impl MapNan for Vec<f32> {
    fn map_nan(&self) -> Vec<bool> {
        self.iter().map(|x| x.is_nan()).collect()
    }
}
