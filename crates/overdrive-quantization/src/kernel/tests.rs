#![allow(clippy::unwrap_used, reason = "a test may panic")]

use half::{bf16, f16};
use overdrive_kernels::{InstructionSet, Kernel, Simd, Table256};
use proptest::prelude::*;

use super::dequantizing_gemm::DequantizingGemm;
use super::int8_rows::Int8Rows;
use super::joint_gemm::{JointGemm, joint_gemm};
use crate::codec::fp8;

proptest! {
    #[test]
    fn quantized_rows_are_within_half_a_step_and_know_their_sums(
        x in prop::collection::vec(-1e3_f32..1e3, 1..300),
        rows in 1_usize..4,
    ) {
        let width = x.len();
        let scaled = |row: usize| x.iter().map(move |x| x * (row + 1) as f32);
        let all: Vec<f32> = (0..rows).flat_map(scaled).collect();
        let quantized = Int8Rows::quantize(&all, width);
        for (row, x) in all.chunks(width).enumerate() {
            let (codes, scale) = (quantized.row(row), quantized.scales[row]);
            prop_assert!(codes[width..].iter().all(|code| *code == 0));
            let most = x.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
            prop_assert_eq!(scale, most / 127.0);
            let sum: i32 = codes.iter().map(|code| i32::from(*code)).sum();
            prop_assert_eq!(quantized.sums[row], sum);
            for (x, code) in x.iter().zip(codes) {
                // Half a step, and the roundings of two products of up to 127 steps.
                prop_assert!((x - f32::from(*code) * scale).abs() <= scale * 0.5001);
                prop_assert!(*code >= -127);
            }
        }
    }
}

#[test]
fn rows_of_zeros_tiny_and_bad_numbers_quantize() {
    // Subnormal activations are zero in kernels.
    for (x, scale) in [(0.0_f32, 0.0), (1e-42, 0.0)] {
        let rows = Int8Rows::quantize(&[x; 10], 10);
        assert_eq!((rows.scales[0], rows.sums[0]), (scale, 0));
    }
    assert!(Int8Rows::quantize(&[1.0, f32::NAN], 2).scales[0].is_nan());
    assert!(Int8Rows::quantize(&[1.0, f32::NEG_INFINITY], 2).scales[0].is_infinite());
    assert_eq!(Int8Rows::quantize::<f32>(&[], 2).rows, 0);
}

#[test]
fn many_rows_are_quantized_by_several_threads_as_by_one() {
    let width = 1000;
    let x: Vec<f32> = (0..97 * width)
        .map(|i| ((i * 37) % 1001) as f32 - 500.0)
        .collect();
    let all = Int8Rows::quantize(&x, width);
    for (row, x) in x.chunks(width).enumerate() {
        let one = Int8Rows::quantize(x, width);
        assert_eq!(one.row(0), all.row(row));
        assert_eq!(
            (one.scales[0], one.sums[0]),
            (all.scales[row], all.sums[row])
        );
    }
}

#[test]
fn activations_of_all_dtypes_quantize_alike() {
    let x: Vec<f32> = (0..200)
        .map(|i| ((i * 7) % 32) as f32 / 8.0 - 2.0)
        .collect();
    let of = |all: Int8Rows| (all.codes.clone(), all.scales.clone(), all.sums.clone());
    let floats = of(Int8Rows::quantize(&x, 100));
    let bf16s: Vec<bf16> = x.iter().map(|x| bf16::from_f32(*x)).collect();
    let f16s: Vec<f16> = x.iter().map(|x| f16::from_f32(*x)).collect();
    assert_eq!(of(Int8Rows::quantize(&bf16s, 100)), floats);
    assert_eq!(of(Int8Rows::quantize(&f16s, 100)), floats);
}

/// Returns the outputs in f64, with codes as numbers.
fn reference(x: &[f32], width: usize, weight: &[f64], scales: &[f32]) -> Vec<f64> {
    let mut y = Vec::new();
    for x in x.chunks(width) {
        for (w, scale) in weight.chunks(width).zip(scales) {
            let sum: f64 = x.iter().zip(w).map(|(x, w)| f64::from(*x) * w).sum();
            y.push(sum * f64::from(*scale));
        }
    }
    y
}

fn close(found: &[f32], expected: &[f64], width: usize, most: f64, what: &str) {
    // Roundings of `width` products and sums of numbers up to `most`, in chains as long as a sixteenth.
    let tolerance =
        most * width as f64 * f64::from(f32::EPSILON) * (1.0 + width as f64 / 16.0).sqrt();
    for (found, expected) in found.iter().zip(expected) {
        assert!(
            (f64::from(*found) - expected).abs() <= tolerance,
            "{what}: {found} {expected}"
        );
    }
}

#[test]
fn the_dequantizing_gemm_is_that_of_the_dequantized_weight() {
    for (rows, width, outputs) in [
        (1, 1, 1),
        (1, 64, 33),
        (1, 203, 9),
        (2, 77, 70),
        (7, 130, 34),
        (33, 48, 5),
    ] {
        let x: Vec<f32> = (0..rows * width)
            .map(|i| ((i * 29) % 97) as f32 / 48.0 - 1.0)
            .collect();
        let scales: Vec<f32> = (0..outputs).map(|i| 0.5 + i as f32 / 7.0).collect();
        let signed: Vec<i8> = (0..outputs * width)
            .map(|i| ((i * 31) % 256) as u8 as i8)
            .collect();
        let floats: Vec<u8> = (0..outputs * width)
            .map(|i| ((i * 31) % 256) as u8)
            .map(|code| if code & 0x7f == fp8::NAN { 0 } else { code })
            .collect();
        let signed_numbers: Vec<f64> = signed.iter().map(|code| f64::from(*code)).collect();
        let float_numbers: Vec<f64> = floats
            .iter()
            .map(|code| f64::from(fp8::decode(*code)))
            .collect();
        for set in InstructionSet::available() {
            let what = format!("{} {rows} rows {outputs} x {width}", set.name());
            let mut y = vec![0.0_f32; rows * outputs];
            let gemm = DequantizingGemm::<i8> {
                x: &x,
                width,
                codes: &signed,
                scales: &scales,
                group: width,
                set,
            };
            joint_gemm::<f32>(
                &[JointGemm::new(0, Box::new(gemm), None)],
                rows,
                outputs,
                &mut y,
            );
            let most = 128.0 * f64::from(scales[outputs - 1]);
            close(
                &y,
                &reference(&x, width, &signed_numbers, &scales),
                width,
                most,
                &what,
            );
            let codes = &floats;
            let gemm = DequantizingGemm::<u8> {
                x: &x,
                width,
                codes,
                scales: &scales,
                group: width,
                set,
            };
            joint_gemm::<f32>(
                &[JointGemm::new(0, Box::new(gemm), None)],
                rows,
                outputs,
                &mut y,
            );
            let most = 448.0 * f64::from(scales[outputs - 1]);
            close(
                &y,
                &reference(&x, width, &float_numbers, &scales),
                width,
                most,
                &what,
            );
        }
    }
}

#[test]
fn the_dequantizing_gemm_applies_the_scale_of_each_group() {
    let group = 32;
    for (rows, width, outputs) in [(1, 32, 3), (1, 77, 9), (3, 96, 5), (6, 130, 34)] {
        let x: Vec<f32> = (0..rows * width)
            .map(|i| ((i * 29) % 97) as f32 / 48.0 - 1.0)
            .collect();
        let groups = usize::div_ceil(width, group);
        let scales: Vec<f32> = (0..outputs * groups)
            .map(|i| 0.5 + (i % 7) as f32 / 7.0)
            .collect();
        let codes: Vec<i8> = (0..outputs * width)
            .map(|i| ((i * 31) % 256) as u8 as i8)
            .collect();
        // With the scales in the numbers of the reference.
        let scale_of = |at: usize| scales[at / width * groups + at % width / group];
        let numbers: Vec<f64> = codes
            .iter()
            .enumerate()
            .map(|(at, code)| f64::from(*code) * f64::from(scale_of(at)))
            .collect();
        let expected = reference(&x, width, &numbers, &vec![1.0; outputs]);
        for set in InstructionSet::available() {
            let gemm = DequantizingGemm::<i8> {
                x: &x,
                width,
                codes: &codes,
                scales: &scales,
                group,
                set,
            };
            let mut y = vec![0.0_f32; rows * outputs];
            joint_gemm::<f32>(
                &[JointGemm::new(0, Box::new(gemm), None)],
                rows,
                outputs,
                &mut y,
            );
            let what = format!("{} {rows} rows {outputs} x {width}", set.name());
            close(&y, &expected, width, 256.0, &what);
        }
    }
}

#[test]
fn every_number_of_eight_bits_is_read_exactly() {
    let codes: Vec<u8> = (0..=255).filter(|code| code & 0x7f != fp8::NAN).collect();
    // Each alone: x is one, and the number of inputs is one.
    let scales = vec![1.0; codes.len()];
    for set in InstructionSet::available() {
        let mut y = vec![0.0_f32; codes.len()];
        let gemm = DequantizingGemm::<u8> {
            x: &[1.0],
            width: 1,
            codes: &codes,
            scales: &scales,
            group: 1,
            set,
        };
        joint_gemm::<f32>(
            &[JointGemm::new(0, Box::new(gemm), None)],
            1,
            codes.len(),
            &mut y,
        );
        let expected: Vec<f32> = codes.iter().map(|code| fp8::decode(*code) + 0.0).collect();
        assert_eq!(y, expected, "{}", set.name());
    }
}

/// A look-up of some bytes.
struct LookUp<'a>(&'a Table256, &'a [u8], &'a mut [u32]);

impl Kernel for LookUp<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        simd.look_up_256(self.0, self.1, self.2);
    }
}

#[test]
fn a_table_of_256_floats_is_looked_up_bit_by_bit() {
    // No two bytes of a number, and no two numbers, are alike.
    let numbers =
        std::array::from_fn(|code| f32::from_bits((code as u32).wrapping_mul(0x9E37_79B9)));
    let book = Table256::new(&numbers);
    let codes: Vec<u8> = (0..300_u32).map(|at| (at * 167 + 13) as u8).collect();
    for set in InstructionSet::available() {
        for count in 0..codes.len() {
            let mut bits = vec![7; codes.len()];
            set.run(LookUp(&book, &codes[..count], &mut bits[..count]));
            for (at, bits) in bits.iter().enumerate() {
                let expected = match at < count {
                    true => numbers[usize::from(codes[at])].to_bits(),
                    false => 7,
                };
                assert_eq!(*bits, expected, "{} {count} {at}", set.name());
            }
        }
    }
}
