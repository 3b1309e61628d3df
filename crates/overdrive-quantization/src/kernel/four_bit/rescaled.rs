//! Groups of codes of 4 bits as bytes that share a scale.

use overdrive_kernels::{LANES, Simd};

use super::byte_rows::UNIT;
use super::coded_weight::{ByteCoding, ByteNumbers, MIN_GROUP_OF_NIBBLES};
use crate::codec::floats::round_bits;

/// The factors and starts, one of each for a group and output, that make the numbers of the groups of a unit bytes
/// with one scale, as [`rescale_bytes`](overdrive_kernels::FourBit::rescale_bytes) takes them.
///
/// A byte is off by half of 1/127 of the largest number of the unit: where the scales of the groups are the same, by
/// 1/16 of a step of integer codes.
pub(super) struct Rescaled<S: Simd> {
    pub(super) factors: [S::Sums; MAX_GROUPS],
    pub(super) starts: [S::Sums; MAX_GROUPS],
}

/// The largest number of groups of a unit, of codes of 4 bits.
const MAX_GROUPS: usize = UNIT / MIN_GROUP_OF_NIBBLES;

/// The largest byte, as the high one of a word.
const MOST: f32 = 127.0 * 256.0;

impl<S: Simd> Rescaled<S> {
    /// Makes those of some groups from their scales and offsets `(groups, 16)`; returns the scale of the unit for
    /// each output, too.
    #[inline(always)]
    pub(super) fn new(
        s: S,
        coding: &ByteCoding,
        scales: &[f32],
        offsets: &[f32],
    ) -> (Self, [f32; LANES]) {
        let (scales, _) = scales.as_chunks::<LANES>();
        let (offsets, _) = offsets.as_chunks::<LANES>();
        // Numbers of integer codes are `code · step + low`, with codes of 0 to 15.
        let zero = match coding.numbers {
            ByteNumbers::Integers(zero) => Some(f32::from(zero)),
            _ => None,
        };
        let mut lows = [[0.0; LANES]; MAX_GROUPS];
        let mut most = [0.0_f32; LANES];
        let mut bad = [0.0; LANES];
        for (g, (steps, lows)) in scales.iter().zip(&mut lows).enumerate() {
            let offsets = offsets.get(g).unwrap_or(&[0.0; LANES]);
            for lane in 0..LANES {
                let step = steps[lane];
                let magnitude = match zero {
                    Some(zero) => {
                        lows[lane] = offsets[lane] - zero * step;
                        lows[lane].abs().max((lows[lane] + 15.0 * step).abs())
                    }
                    None => 127.0 * step.abs(),
                };
                most[lane] = most[lane].max(magnitude);
                // NaN if a scale is infinite or NaN, which a maximum passes over.
                bad[lane] += magnitude * 0.0;
            }
        }
        let mut made = Rescaled {
            factors: [s.zero_sums(); MAX_GROUPS],
            starts: [s.zero_sums(); MAX_GROUPS],
        };
        let inverses = most.map(
            #[inline(always)]
            |most| {
                let inverse = MOST / most;
                // The quotient by a subnormal number may overflow: such units are zero.
                if inverse.is_finite() { inverse } else { 0.0 }
            },
        );
        // Both words of a lane.
        let twice = |word: i32| (word & 0xffff).wrapping_mul(0x1_0001);
        for (g, steps) in scales.iter().enumerate() {
            let (mut factors, mut starts) = ([0; LANES], [0; LANES]);
            for lane in 0..LANES {
                let factor = round_bits(steps[lane] * inverses[lane]) as i32;
                let low = round_bits(lows[g][lane] * inverses[lane]) as i32;
                // A book's numbers come with `BOOK_ZERO`; half a byte rounds the high one.
                let known = if zero.is_none() { S::BOOK_ZERO } else { 0 };
                let start = low.wrapping_sub(factor.wrapping_mul(known));
                factors[lane] = twice(factor);
                starts[lane] = twice(start.wrapping_add((S::BOOK_ZERO << 8) + 128));
            }
            made.factors[g] = s.load_sums(&factors);
            made.starts[g] = s.load_sums(&starts);
        }
        let mut of_unit = bad;
        for (scale, most) in of_unit.iter_mut().zip(most) {
            *scale += most / 127.0;
        }
        (made, of_unit)
    }
}
