//! 8-bit integers with one scale for each row: `w = code · scale`, with codes in `-127..=127`.
//!
//! The codes equal those of bitsandbytes' `int8_vectorwise_quant`.

use super::floats::round_bits;
use super::not_finite::NotFinite;
use super::row_scale;
use overdrive_kernels::{InstructionSet, vectorized};

/// The largest code.
pub(crate) const MAX: f32 = 127.0;

/// Quantizes a row; returns its scale. Numbers beyond `limit`, if given, saturate.
pub(crate) fn quantize_row(
    row: &[f32],
    limit: Option<f32>,
    codes: &mut [i8],
) -> Result<f32, NotFinite> {
    row_scale::quantize_row(row, limit, MAX, codes, |fit, codes| {
        // Rounded twice, as torch divides a number by a tensor.
        encode(InstructionSet::best(), row, 1.0 / fit.most * MAX, codes);
    })
}

vectorized! {
    fn encode<S: Simd>(_s: S, row: &[f32], inverse: f32, codes: &mut [i8]) {
        for (code, x) in codes.iter_mut().zip(row) {
            *code = round_bits((x * inverse).clamp(-MAX, MAX)) as i8;
        }
    }
}

vectorized! {
    /// Dequantizes a row.
    fn decode<S: Simd>(_s: S, codes: &[i8], scale: f32, row: &mut [f32]) {
        for (x, code) in row.iter_mut().zip(codes) {
            *x = f32::from(*code) * scale;
        }
    }
}

/// Dequantizes a row.
pub(crate) fn dequantize_row(codes: &[i8], scale: f32, row: &mut [f32]) {
    decode(InstructionSet::best(), codes, scale, row);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::LEAST_SCALE;
    use super::*;

    proptest! {
        #[test]
        fn numbers_come_back_within_half_a_step(
            row in prop::collection::vec(-1e3f32..1e3, 1..200),
            exponent in -30..30,
        ) {
            let row: Vec<f32> = row.iter().map(|x| x * 2f32.powi(exponent)).collect();
            let mut codes = vec![0; row.len()];
            let scale = quantize_row(&row, None, &mut codes).expect("finite");
            let mut back = vec![0.0; row.len()];
            dequantize_row(&codes, scale, &mut back);
            for (x, y) in row.iter().zip(&back) {
                // Half a step, and the roundings of two products of up to 127 steps.
                prop_assert!((x - y).abs() <= scale * (0.5 + 127.0 * 4.0 * f32::EPSILON));
            }
            prop_assert!(codes.iter().all(|&code| code >= -127));
        }
    }

    #[test]
    fn rows_of_zeros_and_of_the_tiniest_numbers_are_zeros() {
        for row in [[0.0f32, -0.0, 0.0], [1e-40, -1e-38, 1e-37]] {
            let mut codes = [1i8; 3];
            assert_eq!(quantize_row(&row, None, &mut codes), Ok(LEAST_SCALE));
            assert_eq!(codes, [0; 3]);
        }
    }

    #[test]
    fn the_first_bad_number_is_named() {
        let mut codes = [0i8; 3];
        let row = [1.0, f32::INFINITY, f32::NAN];
        assert_eq!(
            quantize_row(&row, None, &mut codes),
            Err(NotFinite { index: 1 })
        );
    }

    #[test]
    fn a_limit_makes_larger_numbers_the_largest() {
        let mut codes = [0i8; 3];
        let scale = quantize_row(&[1.0, -4.0, 0.5], Some(1.0), &mut codes);
        assert_eq!(scale, Ok(1.0 / 127.0));
        assert_eq!(codes, [127, -127, 64]);
    }
}
