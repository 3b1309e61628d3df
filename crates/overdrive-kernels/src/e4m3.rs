//! 8-bit floats, e4m3fn: a sign, four bits of exponent with bias 7, three of mantissa; no infinity, and NaN
//! where all bits but the sign are set. `torch.float8_e4m3fn` (Micikevicius et al. 2022,
//! [arXiv:2209.05433](https://arxiv.org/abs/2209.05433)).

/// The largest number.
pub const MAX: f32 = 448.0;
/// The code of NaN; with the sign bit it is NaN too.
pub const NAN: u8 = 0x7F;
/// The smallest normal number, 2⁻⁶; below it, numbers are multiples of 2⁻⁹.
const LEAST_NORMAL: f32 = 0.015_625;

/// Returns the nearest code, ties to even. Numbers beyond the largest saturate, where torch makes NaN of those
/// beyond 464.
#[inline(always)]
pub fn encode(x: f32) -> u8 {
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
pub fn decode(code: u8) -> f32 {
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

#[cfg(test)]
mod tests {
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
}
