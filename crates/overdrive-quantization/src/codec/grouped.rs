//! Integers of 4 or 8 bits in groups along the input.
//!
//! The scales, zero points and codes equal those of compressed-tensors (`calculate_qparams`,
//! `quantize`): a symmetric group's scale is its largest magnitude over half the range (7.5, 127.5), and
//! the others' zero point is an integer, so that 0 has its own code.
//!
//! Scales in f16 are rounded up before the codes are chosen, so that the codes still cover the range; with
//! offsets they are rounded to so few digits that the offset, a multiple of the scale, is a number of f16 as
//! well.

use super::LEAST_SCALE;
use super::floats::{extremes, first_not_finite, round_bits};
use super::not_finite::NotFinite;
use overdrive_kernels::{InstructionSet, vectorized};

/// The integers that the codes of a group can be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Levels {
    /// The number of bits: 4 or 8.
    pub(crate) bits: u8,
    /// If `true`, 0 is the middle of the range.
    pub(crate) symmetric: bool,
    /// If `true`, scales, and at 4 bits offsets, must be numbers of f16.
    pub(crate) half: bool,
}

/// The range of the largest scale of a weight whose scales may be in f16. It is a normal number there, so that
/// smaller ones lose less than it does, and offsets of 15 times as much, and scales of the clipping search, are
/// finite.
pub(crate) const HALF_SCALES: std::ops::RangeInclusive<f32> = 6.103_515_6e-5..=2048.0;

/// The smallest positive number of f16, 2⁻²⁴.
pub(crate) const HALF_STEP: f32 = 1.0 / 16_777_216.0;

/// The number of bits of f16's mantissa, with the one that is not stored.
pub(crate) const HALF_DIGITS: u32 = 11;

/// The number of bits that leaves room for those of a zero point of 4 bits.
pub(crate) const LEAST_DIGITS: u32 = HALF_DIGITS - 4;

/// Returns the smallest number with this number of bits that is not below `scale` and a multiple of [`HALF_STEP`].
pub(crate) fn rounded_up(scale: f32, digits: u32) -> f32 {
    let unit = 1u32 << (24 - digits);
    let rounded = f32::from_bits(scale.to_bits().saturating_add(unit - 1) & !(unit - 1));
    // Products with a power of two are exact.
    (rounded / HALF_STEP).ceil().max(1.0) * HALF_STEP
}

/// Returns the smallest scale in f16 that is not below `scale` and of which `zero` (0 to 15) times is a number of
/// f16.
pub(crate) fn half_scale(scale: f32, zero: f32) -> f32 {
    let tries = (LEAST_DIGITS..=HALF_DIGITS).rev();
    let mut scales = tries.map(|digits| rounded_up(scale, digits));
    // The last one has room for all four bits of the zero point.
    scales
        .find(|scale| has_half_digits(zero * scale))
        .unwrap_or_else(|| rounded_up(scale, LEAST_DIGITS))
}

/// Returns `true` if `x` has no more bits than a number of f16.
fn has_half_digits(x: f32) -> bool {
    x.to_bits().is_multiple_of(1 << (24 - HALF_DIGITS))
}

/// The scale and zero point of a group: `w = (code − zero) · scale` for stored codes, from [`Levels::first`] on.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Fit {
    pub(crate) scale: f32,
    pub(crate) zero: f32,
}

impl Levels {
    /// Returns the largest code minus the smallest.
    #[inline(always)]
    pub(crate) fn span(self) -> f32 {
        if self.bits == 4 { 15.0 } else { 255.0 }
    }

    /// Returns the smallest stored code: -128 for signed bytes, otherwise 0.
    #[inline(always)]
    pub(crate) fn first(self) -> f32 {
        if self.bits == 8 && self.symmetric {
            -128.0
        } else {
            0.0
        }
    }

    /// Returns the stored code of 0 in symmetric groups.
    #[inline(always)]
    pub(crate) fn middle(self) -> f32 {
        self.first() + (self.span() + 1.0) / 2.0
    }

    /// Returns the scale and zero point with which the codes cover `low..=high` and 0.
    pub(crate) fn fit(self, [low, high]: [f32; 2]) -> Fit {
        let (low, high) = (low.min(0.0), high.max(0.0));
        let span = self.span();
        let scale = match (high - low) / span {
            _ if self.symmetric => high.max(-low) / (span / 2.0),
            // The difference of two large numbers may overflow where the scale does not.
            scale if scale.is_finite() => scale,
            _ => high / span - low / span,
        };
        if self.half {
            return self.half_fit(low, scale);
        }
        if scale < LEAST_SCALE {
            let zero = self.middle();
            return Fit {
                scale: LEAST_SCALE,
                zero,
            };
        }
        if self.symmetric {
            let zero = self.middle();
            return Fit { scale, zero };
        }
        let zero = self.zero(low, scale);
        Fit { scale, zero }
    }

    /// Returns the stored code of 0 with which the codes cover the numbers from `low` on.
    fn zero(self, low: f32, scale: f32) -> f32 {
        // Counted from the middle of the range, as compressed-tensors does, for the same rounding.
        let half = (self.span() + 1.0) / 2.0;
        let zero = (-half - low / scale).clamp(-half, half - 1.0);
        zero.round_ties_even() + half
    }

    /// Returns the fit whose scale, and at 4 bits its offset, is a number of f16, if it is in [`HALF_SCALES`].
    fn half_fit(self, low: f32, scale: f32) -> Fit {
        if self.symmetric {
            return Fit {
                scale: rounded_up(scale, HALF_DIGITS),
                zero: self.middle(),
            };
        }
        // Offsets of 8 bits are in f32.
        let least = if self.bits == 4 {
            LEAST_DIGITS
        } else {
            HALF_DIGITS
        };
        // The zero point depends on the rounded scale, so each number of bits is tried.
        let mut digits = HALF_DIGITS;
        loop {
            let scale = rounded_up(scale, digits);
            let zero = self.zero(low, scale);
            if has_half_digits(zero * scale) || digits == least {
                return Fit { scale, zero };
            }
            digits -= 1;
        }
    }

    /// Returns the stored code of `x`, as a byte.
    #[inline(always)]
    pub(crate) fn code(self, x: f32, fit: Fit) -> u8 {
        // Counted from the middle, for the same rounding as in compressed-tensors.
        let half = (self.span() + 1.0) / 2.0;
        let shift = half + self.first();
        let level = x / fit.scale + (fit.zero - shift);
        let level = level.clamp(-half, half - 1.0);
        (round_bits(level).wrapping_add(shift as i32 as u32)) as u8
    }
}

/// The codes, scales and offsets of a row.
#[derive(Debug)]
pub(crate) struct RowMut<'a> {
    /// The codes; at 4 bits two in a byte, the first in the low half.
    pub(crate) codes: &'a mut [u8],
    pub(crate) scales: &'a mut [f32],
    /// The offsets; empty if the levels are symmetric.
    pub(crate) offsets: &'a mut [f32],
}

/// A function that returns the range that the codes of a group must cover, from the numbers of the group.
pub(crate) type RangeOf<'a> = &'a (dyn Fn(&[f32]) -> [f32; 2] + Sync);

/// Quantizes a row of groups of `group` numbers, a divisor of the row's length.
pub(crate) fn quantize_row(
    row: &[f32],
    group: usize,
    levels: Levels,
    range_of: Option<RangeOf<'_>>,
    to: RowMut<'_>,
) -> Result<(), NotFinite> {
    // The largest group; codes are made one in each byte, in vectors, and then packed.
    let mut bytes = [0u8; 256];
    let per_byte = if levels.bits == 4 { 2 } else { 1 };
    let set = InstructionSet::best();
    let groups = row.chunks_exact(group);
    let packed = to.codes.chunks_exact_mut(group / per_byte);
    for (index, ((numbers, packed), scale)) in groups.zip(packed).zip(to.scales).enumerate() {
        let mut range = extremes(set, numbers);
        if !range.iter().all(|x| x.is_finite()) {
            let index = index * group + first_not_finite(numbers).unwrap_or_default();
            return Err(NotFinite { index });
        }
        if let Some(range_of) = range_of {
            range = range_of(numbers);
        }
        let fit = levels.fit(range);
        *scale = fit.scale;
        if let Some(offset) = to.offsets.get_mut(index) {
            *offset = -fit.zero * fit.scale;
        }
        match (levels.bits, levels.symmetric) {
            (4, _) => {
                let bytes = &mut bytes[..group];
                encode(
                    set,
                    numbers,
                    4,
                    levels.symmetric,
                    fit.scale,
                    fit.zero,
                    bytes,
                );
                pack(set, bytes, packed);
            }
            _ => encode(
                set,
                numbers,
                8,
                levels.symmetric,
                fit.scale,
                fit.zero,
                packed,
            ),
        }
    }
    Ok(())
}

vectorized! {
    fn encode<S: Simd>(
        _s: S,
        numbers: &[f32],
        bits: u8,
        symmetric: bool,
        scale: f32,
        zero: f32,
        codes: &mut [u8],
    ) {
        let levels = Levels { bits, symmetric, half: false };
        let fit = Fit { scale, zero };
        for (code, x) in codes.iter_mut().zip(numbers) {
            *code = levels.code(*x, fit);
        }
    }
}

vectorized! {
    /// Packs two codes into a byte, the first in the low half.
    fn pack<S: Simd>(_s: S, codes: &[u8], packed: &mut [u8]) {
        for (byte, pair) in packed.iter_mut().zip(codes.chunks_exact(2)) {
            *byte = pair[0] | pair[1] << 4;
        }
    }
}

vectorized! {
    /// Dequantizes a row of 4-bit codes to `(code − zero) · scale + offset`, with a scale and offset for each
    /// group of the row. No offsets: all 0.
    pub(crate) fn dequantize_row_4<S: Simd>(
        _s: S,
        packed: &[u8],
        zero: f32,
        scales: &[f32],
        offsets: &[f32],
        row: &mut [f32],
    ) {
        let group = row.len() / scales.len().max(1);
        let groups = row.chunks_exact_mut(group.max(2)).zip(packed.chunks_exact(group.max(2) / 2));
        for (index, ((numbers, packed), scale)) in groups.zip(scales).enumerate() {
            let offset = offsets.get(index).copied().unwrap_or_default();
            for (pair, byte) in numbers.chunks_exact_mut(2).zip(packed) {
                pair[0] = (f32::from(byte & 15) - zero) * scale + offset;
                pair[1] = (f32::from(byte >> 4) - zero) * scale + offset;
            }
        }
    }
}

vectorized! {
    /// Like [`dequantize_row_4`], but with one code in each byte, signed if `signed`.
    pub(crate) fn dequantize_row_8<S: Simd>(
        _s: S,
        codes: &[u8],
        signed: bool,
        scales: &[f32],
        offsets: &[f32],
        row: &mut [f32],
    ) {
        let group = (row.len() / scales.len().max(1)).max(1);
        let groups = row.chunks_exact_mut(group).zip(codes.chunks_exact(group));
        for (index, ((numbers, codes), scale)) in groups.zip(scales).enumerate() {
            let offset = offsets.get(index).copied().unwrap_or_default();
            // A signed byte is the unsigned one with its top bit flipped, minus 128.
            let (flip, zero) = if signed { (0x80, 128.0) } else { (0, 0.0) };
            for (x, code) in numbers.iter_mut().zip(codes) {
                *x = (f32::from(code ^ flip) - zero) * scale + offset;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use proptest::prelude::*;

    use super::*;

    /// Returns scales, offsets and the dequantized numbers.
    fn round_trip(row: &[f32], group: usize, levels: Levels) -> (Vec<f32>, Vec<f32>, Vec<f32>) {
        let groups = row.len() / group;
        let mut codes = vec![0; row.len() * usize::from(levels.bits) / 8];
        let mut scales = vec![0.0; groups];
        let mut offsets = vec![0.0; if levels.symmetric { 0 } else { groups }];
        let to = RowMut {
            codes: &mut codes,
            scales: &mut scales,
            offsets: &mut offsets,
        };
        quantize_row(row, group, levels, None, to).expect("finite");
        let mut back = vec![0.0; row.len()];
        match levels.bits {
            4 => {
                let zero = if levels.symmetric { 8.0 } else { 0.0 };
                dequantize_row_4(
                    InstructionSet::best(),
                    &codes,
                    zero,
                    &scales,
                    &offsets,
                    &mut back,
                );
            }
            _ => dequantize_row_8(
                InstructionSet::best(),
                &codes,
                levels.symmetric,
                &scales,
                &offsets,
                &mut back,
            ),
        }
        (scales, offsets, back)
    }

    proptest! {
        #[test]
        fn numbers_come_back_within_half_a_step_of_their_group(
            numbers in prop::collection::vec(-1f32..1.0, 256),
            shift in -2f32..2.0,
            exponent in -40..40,
            size in 4u32..=8,
            eight in any::<bool>(),
            symmetric in any::<bool>(),
            half in any::<bool>(),
        ) {
            let row: Vec<f32> = numbers.iter().map(|x| (x + shift) * 2f32.powi(exponent)).collect();
            let (group, bits) = (1 << size, if eight { 8 } else { 4 });
            let levels = Levels { bits, symmetric, half };
            let (scales, offsets, back) = round_trip(&row, group, levels);
            for (index, (x, y)) in row.iter().zip(&back).enumerate() {
                let scale = scales[index / group];
                // Half a step, and roundings of sums and products of up to 255 steps.
                let bound = scale * (0.5 + 255.0 * 4.0 * f32::EPSILON);
                prop_assert!((x - y).abs() <= bound, "{} {} {}", x, y, scale);
            }
            if half && scales.iter().all(|scale| HALF_SCALES.contains(scale)) {
                let kept = |x: &f32| f16::from_f32(*x).to_f32() == *x;
                prop_assert!(scales.iter().all(kept), "{:?}", scales);
                prop_assert!(bits == 8 || offsets.iter().all(kept), "{:?}", offsets);
            }
        }

        #[test]
        fn scales_in_f16_are_little_larger_than_others(
            numbers in prop::collection::vec(-1f32..1.0, 64),
            shift in -2f32..2.0,
            symmetric in any::<bool>(),
        ) {
            let row: Vec<f32> = numbers.iter().map(|x| x + shift).collect();
            let scale = |half| round_trip(&row, 64, Levels { bits: 4, symmetric, half }).0[0];
            let ratio = scale(true) / scale(false);
            // A unit in the last of 11 digits, or of 7 where zero points have to fit in.
            let most = if symmetric { 1.0 / 1024.0 } else { 1.0 / 64.0 };
            prop_assert!((1.0..=1.0 + most).contains(&ratio), "{}", ratio);
        }

        #[test]
        fn zero_stays_zero_in_every_group(
            mut row in prop::collection::vec(-1f32..3.0, 64),
            eight in any::<bool>(),
            symmetric in any::<bool>(),
        ) {
            row[17] = 0.0;
            let levels = Levels { bits: if eight { 8 } else { 4 }, symmetric, half: false };
            let (scales, _, back) = round_trip(&row, 64, levels);
            // The offset is a rounded product, so code and offset cancel up to its rounding.
            prop_assert!(back[17].abs() <= scales[0] * 255.0 * f32::EPSILON);
            // In f16 it is not rounded.
            if !eight {
                let (_, _, back) = round_trip(&row, 64, Levels { half: true, ..levels });
                prop_assert_eq!(back[17], 0.0);
            }
        }
    }

    #[test]
    fn scales_of_f16_are_worked_out_by_hand() {
        let unit = 1.0 / 1024.0;
        assert_eq!(rounded_up(1.0, 11), 1.0);
        assert_eq!(rounded_up(1.0 + unit / 8.0, 11), 1.0 + unit);
        assert_eq!(rounded_up(1.0 + unit / 8.0, 7), 1.0 + unit * 16.0);
        // The next power of two.
        assert_eq!(rounded_up(1.9999, 11), 2.0);
        // Numbers without a bit of their own are multiples of the least.
        assert_eq!(rounded_up(0.0, 11), HALF_STEP);
        assert_eq!(rounded_up(2.5 * HALF_STEP, 11), 3.0 * HALF_STEP);
        // 3 times 1 + 1/1024 has 12 digits, and 1 + 2/1024 times 3 has 11.
        assert_eq!(half_scale(1.0 + unit / 8.0, 2.0), 1.0 + unit);
        assert_eq!(half_scale(1.0 + unit / 8.0, 3.0), 1.0 + 2.0 * unit);
        assert_eq!(half_scale(1.0 + unit / 8.0, 15.0), 1.0 + 8.0 * unit);
    }

    #[test]
    fn the_fit_is_worked_out_by_hand() {
        let four = |symmetric| Levels {
            bits: 4,
            symmetric,
            half: false,
        };
        assert_eq!(
            four(true).fit([-1.0, 3.0]),
            Fit {
                scale: 0.4,
                zero: 8.0
            }
        );
        assert_eq!(
            four(false).fit([-1.0, 2.0]),
            Fit {
                scale: 0.2,
                zero: 5.0
            }
        );
        // 0 is covered although no number is there.
        assert_eq!(
            four(false).fit([1.0, 3.0]),
            Fit {
                scale: 0.2,
                zero: 0.0
            }
        );
        assert_eq!(four(true).code(3.0, four(true).fit([-1.0, 3.0])), 15);
        assert_eq!(four(true).code(-0.4, four(true).fit([-1.0, 3.0])), 7);
        let eight = Levels {
            bits: 8,
            symmetric: true,
            half: false,
        };
        let fit = eight.fit([-2.0, 255.0]);
        assert_eq!(
            fit,
            Fit {
                scale: 2.0,
                zero: 0.0
            }
        );
        assert_eq!(eight.code(-2.0, fit) as i8, -1);
    }

    #[test]
    fn groups_of_zeros_are_zeros() {
        for bits in [4, 8] {
            for symmetric in [true, false] {
                for (half, scale) in [(false, LEAST_SCALE), (true, HALF_STEP)] {
                    let levels = Levels {
                        bits,
                        symmetric,
                        half,
                    };
                    let (scales, _, back) = round_trip(&[0.0; 32], 16, levels);
                    assert_eq!(scales, [scale; 2]);
                    assert_eq!(back, [0.0; 32]);
                }
            }
        }
    }

    #[test]
    fn the_largest_floats_do_not_overflow() {
        let row: Vec<f32> = (0..32)
            .map(|i| if i % 2 == 0 { f32::MAX } else { f32::MIN })
            .collect();
        for symmetric in [true, false] {
            for half in [false, true] {
                let levels = Levels {
                    bits: 8,
                    symmetric,
                    half,
                };
                let (scales, _, _) = round_trip(&row, 32, levels);
                // Not NaN; infinite is what no f16 is, and tells that it cannot be kept so.
                assert!(scales[0].is_finite() || half && scales[0] == f32::INFINITY);
            }
        }
    }

    #[test]
    fn the_first_bad_number_is_named() {
        let mut row = [1.0; 64];
        row[40] = f32::NAN;
        let (mut codes, mut scales) = ([0; 32], [0.0; 2]);
        let to = RowMut {
            codes: &mut codes,
            scales: &mut scales,
            offsets: &mut [],
        };
        let levels = Levels {
            bits: 4,
            symmetric: true,
            half: false,
        };
        let found = quantize_row(&row, 32, levels, None, to);
        assert_eq!(found, Err(NotFinite { index: 40 }));
    }
}
