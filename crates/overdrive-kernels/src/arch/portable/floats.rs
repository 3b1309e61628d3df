//! Vectors of 16 floats in an array.

use half::{bf16, f16};

use super::vector::Array;
use super::{FUSED, Portable};
use crate::{Floats, LANES};

/// 1.5 · 2²³: adding and subtracting it drops the fraction by the machine's own rounding, in two
/// instructions that every baseline has. Arguments of `exp` are far below it.
const SHIFT: f32 = 12_582_912.0;

type F = Array<f32, LANES>;

impl Floats for Portable {
    type F = F;
    // Two registers of 128 bits, which the loops of `Array` keep busy.
    type F32 = Array<f32, 8>;
    type F64 = Array<f64, 4>;

    const FUSED: bool = FUSED;

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> F {
        Array(from.map(
            #[inline(always)]
            |x| f32::from_bits(u32::from(x.to_bits()) << 16),
        ))
    }

    #[inline(always)]
    fn store_bf16(self, x: F, to: &mut [bf16; LANES]) {
        for (to, x) in to.iter_mut().zip(x.0) {
            let bits = x.to_bits();
            // Half of the dropped bits, less one if the last bit that stays is even: ties go to even.
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) >> 16;
            *to = bf16::from_bits(if x.is_nan() { 0x7fc0 } else { rounded as u16 });
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> F {
        Array(from.map(
            #[inline(always)]
            |half| f32::from_bits(widened(half.to_bits())),
        ))
    }

    #[inline(always)]
    fn store_f16(self, x: F, to: &mut [f16; LANES]) {
        // Rounding to f16 has many cases; the crate uses the instruction of the target where there is one.
        *to = x.0.map(f16::from_f32);
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> F {
        Array(from.map(f32::from))
    }

    #[inline(always)]
    fn load_e4m3(self, from: &[u8; LANES]) -> F {
        Array(from.map(
            #[inline(always)]
            |code| {
                // The bits of an f16, whose bias is 8 more than that of e4m3. Not of an f32, where the least of e4m3
                // would be subnormal, hence zero here.
                let code = u16::from(code);
                f32::from_bits(widened((code & 0x80) << 8 | (code & 0x7f) << 7))
            },
        ))
    }

    #[inline(always)]
    fn round(self, x: F) -> F {
        x.map(
            #[inline(always)]
            |x| (x + SHIFT) - SHIFT,
        )
    }

    #[inline(always)]
    fn scale(self, x: F, n: F) -> F {
        x.zip(
            n,
            #[inline(always)]
            |x, n| {
                // The shifted number has the integer in its lowest bits.
                let n = (n + SHIFT).to_bits().wrapping_sub(SHIFT.to_bits()) as i32;
                let (first, second) = (n >> 1, n - (n >> 1));
                let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
                x * power(first) * power(second)
            },
        )
    }

    #[inline(always)]
    fn swap_pairs(self, mut x: F) -> F {
        for pair in 0..LANES / 2 {
            x.0.swap(2 * pair, 2 * pair + 1);
        }
        x
    }

    #[inline(always)]
    fn reduce_max(self, x: F) -> f32 {
        x.fold(
            #[inline(always)]
            |a, b| if a > b { a } else { b },
        )
    }
}

/// Returns the bits of the f32 of an f16: without a call or a branch, so that loops become vectors.
#[inline(always)]
fn widened(half: u16) -> u32 {
    const BIAS: u32 = (127 - 15) << 23;
    let magnitude = u32::from(half & 0x7FFF) << 13;
    let normal = magnitude + BIAS;
    // A subnormal number: computed as an addend to 2⁻¹⁴, which is then subtracted.
    let tiny = (f32::from_bits(normal + (1 << 23)) - 6.103_515_6e-5).to_bits();
    // Infinity and NaN have the largest exponent in both formats.
    let special = normal + BIAS;
    let bits = if magnitude < 1 << 23 { tiny } else { normal };
    let bits = if magnitude >= 31 << 23 { special } else { bits };
    bits | u32::from(half & 0x8000) << 16
}
