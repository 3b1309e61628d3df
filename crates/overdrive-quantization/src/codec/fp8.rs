//! 8-bit floats, e4m3fn: a sign, four bits of exponent with bias 7, three of mantissa; no infinity, and NaN
//! where all bits but the sign are set. `torch.float8_e4m3fn` (Micikevicius et al. 2022,
//! arXiv:2209.05433).

use super::not_finite::NotFinite;
use super::row_scale;
use overdrive_kernels::{InstructionSet, vectorized};

/// The largest number.
pub(crate) const MAX: f32 = 448.0;
/// The code of NaN; with the sign bit it is NaN too.
pub(crate) const NAN: u8 = 0x7F;
/// The smallest normal number, 2⁻⁶; below it, numbers are multiples of 2⁻⁹.
const LEAST_NORMAL: f32 = 0.015_625;

/// Returns the nearest code, ties to even. Numbers beyond the largest saturate, where torch makes NaN of those
/// beyond 464.
#[inline(always)]
pub(crate) fn encode(x: f32) -> u8 {
    let sign = (x.to_bits() >> 24) as u8 & 0x80;
    let magnitude = f32::from_bits(x.to_bits() & 0x7FFF_FFFF);
    // Not `min`, which returns `MAX` for NaN.
    let small = if magnitude > MAX { MAX } else { magnitude };
    let bits = small.to_bits();
    // Rounds to 3 of 23 bits, and changes the bias from 127 to 7.
    let normal = (bits.wrapping_add(0x7_FFFF + (bits >> 20 & 1)) >> 20).wrapping_sub(120 << 3);
    // Adding 2¹⁴ leaves multiples of 2⁻⁹, in the low bits.
    let tiny = (small + 16_384.0).to_bits() & 0xFF;
    let code = if small < LEAST_NORMAL { tiny } else { normal } as u8;
    sign | if magnitude.is_nan() { NAN } else { code }
}

/// Returns the number of a code.
#[inline(always)]
pub(crate) fn decode(code: u8) -> f32 {
    let magnitude = u32::from(code & 0x7F);
    // The three bits of the mantissa are the highest of 23, and 127 - 7 is 120.
    let normal = f32::from_bits((magnitude << 20) + (120 << 23));
    let tiny = magnitude as f32 * (1.0 / 512.0);
    let x = if magnitude < 8 { tiny } else { normal };
    let x = if magnitude == u32::from(NAN) {
        f32::NAN
    } else {
        x
    };
    f32::from_bits(x.to_bits() | u32::from(code & 0x80) << 24)
}

/// Quantizes a row; returns its scale. Numbers beyond `limit`, if given, saturate.
pub(crate) fn quantize_row(
    row: &[f32],
    limit: Option<f32>,
    codes: &mut [u8],
) -> Result<f32, NotFinite> {
    row_scale::quantize_row(row, limit, MAX, codes, |fit, codes| {
        encode_row(InstructionSet::best(), row, fit.scale, codes);
    })
}

vectorized! {
    fn encode_row<S: Simd>(_s: S, row: &[f32], scale: f32, codes: &mut [u8]) {
        for (code, x) in codes.iter_mut().zip(row) {
            *code = encode(x / scale);
        }
    }
}

vectorized! {
    /// Dequantizes a row.
    fn decode_row<S: Simd>(_s: S, codes: &[u8], scale: f32, row: &mut [f32]) {
        for (x, code) in row.iter_mut().zip(codes) {
            *x = decode(*code) * scale;
        }
    }
}

/// Dequantizes a row.
pub(crate) fn dequantize_row(codes: &[u8], scale: f32, row: &mut [f32]) {
    decode_row(InstructionSet::best(), codes, scale, row);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_code_is_the_nearest_of_its_own_number() {
        for code in 0..=u8::MAX {
            let x = decode(code);
            if code & 0x7F == NAN {
                assert!(x.is_nan());
                assert_eq!(encode(x) & 0x7F, NAN);
            } else {
                assert_eq!(encode(x), code, "{x}");
            }
        }
    }

    #[test]
    fn numbers_between_two_codes_become_the_nearer_and_ties_the_even() {
        for code in 0..NAN - 1 {
            let (low, high) = (decode(code), decode(code + 1));
            let middle = (low + high) / 2.0;
            let even = code + code % 2;
            assert_eq!(encode(middle), even, "{middle}");
            assert_eq!(encode(f32::from_bits(middle.to_bits() - 1)), code);
            assert_eq!(encode(f32::from_bits(middle.to_bits() + 1)), code + 1);
            assert_eq!(encode(-middle), even | 0x80);
        }
    }

    #[test]
    fn numbers_beyond_the_largest_become_the_largest() {
        for x in [448.0, 449.0, 464.1, 1e30, f32::INFINITY] {
            assert_eq!((encode(x), encode(-x)), (0x7E, 0xFE), "{x}");
        }
    }

    proptest! {
        #[test]
        fn rows_come_back_within_a_sixteenth(
            row in prop::collection::vec(-1e3f32..1e3, 1..200),
            exponent in -30..30,
        ) {
            let row: Vec<f32> = row.iter().map(|x| x * 2f32.powi(exponent)).collect();
            let mut codes = vec![0; row.len()];
            let scale = quantize_row(&row, None, &mut codes).expect("finite");
            let mut back = vec![0.0; row.len()];
            dequantize_row(&codes, scale, &mut back);
            for (x, y) in row.iter().zip(&back) {
                // Half of an eighth of the number, or half of the least step.
                let bound = (x.abs() / 16.0).max(scale / 1024.0) * 1.000_01;
                prop_assert!((x - y).abs() <= bound, "{} {}", x, y);
            }
        }
    }
}
