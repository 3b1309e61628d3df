//! Floats of three widths as slices of `f32`, and what is asked of a slice before it is quantized.

use half::slice::HalfFloatSliceExt;
use half::{bf16, f16};
use overdrive_sys::raw;

use super::vectors::vectorised;

/// A floating-point type of weights. Codecs compute in `f32`.
pub(crate) trait Float: raw::Element {
    /// The numbers as `f32`, in `scratch` unless they are so already.
    fn read<'a>(from: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32];

    /// Lets `fill` write the numbers as `f32`, each of them, and rounds them to nearest, ties to even.
    fn write(to: &mut [Self], scratch: &mut Vec<f32>, fill: impl FnOnce(&mut [f32]));
}

impl Float for f32 {
    fn read<'a>(from: &'a [f32], _: &'a mut Vec<f32>) -> &'a [f32] {
        from
    }

    fn write(to: &mut [f32], _: &mut Vec<f32>, fill: impl FnOnce(&mut [f32])) {
        fill(to);
    }
}

impl Float for bf16 {
    fn read<'a>(from: &'a [bf16], scratch: &'a mut Vec<f32>) -> &'a [f32] {
        scratch.resize(from.len(), 0.0);
        widen(from, scratch);
        scratch
    }

    fn write(to: &mut [bf16], scratch: &mut Vec<f32>, fill: impl FnOnce(&mut [f32])) {
        scratch.resize(to.len(), 0.0);
        fill(scratch);
        narrow(scratch, to);
    }
}

impl Float for f16 {
    fn read<'a>(from: &'a [f16], scratch: &'a mut Vec<f32>) -> &'a [f32] {
        scratch.resize(from.len(), 0.0);
        from.convert_to_f32_slice(scratch);
        scratch
    }

    fn write(to: &mut [f16], scratch: &mut Vec<f32>, fill: impl FnOnce(&mut [f32])) {
        scratch.resize(to.len(), 0.0);
        fill(scratch);
        to.convert_from_f32_slice(scratch);
    }
}

vectorised! {
    fn widen(from: &[bf16], to: &mut [f32]) {
        for (to, from) in to.iter_mut().zip(from) {
            *to = f32::from_bits(u32::from(from.to_bits()) << 16);
        }
    }

    fn narrow(from: &[f32], to: &mut [bf16]) {
        for (to, from) in to.iter_mut().zip(from) {
            let bits = from.to_bits();
            let rounded = bits.wrapping_add(0x7FFF + (bits >> 16 & 1)) >> 16;
            let nan = bits >> 16 | 0x40;
            let bits = if bits & 0x7FFF_FFFF > 0x7F80_0000 { nan } else { rounded };
            *to = bf16::from_bits(bits as u16);
        }
    }

    /// The largest magnitude; infinite or NaN if any number is.
    ///
    /// Bits of magnitudes rise as the magnitudes do, NaN above all, and a maximum of integers has no
    /// special cases that would keep the loop from vectors.
    pub(crate) fn max_magnitude(numbers: &[f32]) -> f32 {
        let bits = numbers.iter().fold(0, |most, x| u32::max(most, x.to_bits() & 0x7FFF_FFFF));
        f32::from_bits(bits)
    }

    /// The least and the largest number; infinite or NaN if any is. Zeros for no numbers.
    pub(crate) fn extremes(numbers: &[f32]) -> [f32; 2] {
        // Magnitudes of negative numbers fall as the numbers rise: turned over, signed integers are in
        // the order of the floats.
        let (mut least, mut most) = (i32::MAX, i32::MIN);
        for x in numbers {
            let bits = x.to_bits() as i32;
            let key = bits ^ (bits >> 31 & 0x7FFF_FFFF);
            least = least.min(key);
            most = most.max(key);
        }
        if numbers.is_empty() {
            return [0.0; 2];
        }
        [least, most].map(|key| f32::from_bits((key ^ (key >> 31 & 0x7FFF_FFFF)) as u32))
    }
}

/// The index of the first number that is infinite or NaN.
pub(crate) fn first_not_finite(numbers: &[f32]) -> Option<usize> {
    numbers.iter().position(|x| !x.is_finite())
}

/// The nearest integer of a number in `-2²²..2²²`, ties to even, in the low bits.
///
/// Adding 1.5·2²³ leaves no bits for fractions, so the addition itself rounds; and unlike a conversion
/// it is one instruction on any vector unit.
#[inline(always)]
pub(crate) fn round_bits(x: f32) -> u32 {
    (x + 12_582_912.0).to_bits()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn extremes_are_those_of_the_floats_and_tell_of_bad_numbers() {
        assert_eq!(extremes(&[0.5, -2.0, 1.5, -0.0]), [-2.0, 1.5]);
        assert_eq!(extremes(&[-3.0, -1.0]), [-3.0, -1.0]);
        assert_eq!(extremes(&[]), [0.0, 0.0]);
        assert_eq!(max_magnitude(&[0.5, -2.0, 1.5]), 2.0);
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut numbers = [1f32; 40];
            numbers[33] = bad;
            assert!(!max_magnitude(&numbers).is_finite());
            assert!(extremes(&numbers).iter().any(|x| !x.is_finite()));
            assert_eq!(first_not_finite(&numbers), Some(33));
        }
    }

    #[test]
    fn bf16_rounds_as_the_half_crate_does() {
        let numbers: Vec<f32> = (0..=u32::MAX).step_by(65_521).map(f32::from_bits).collect();
        let mut to = vec![bf16::ZERO; numbers.len()];
        narrow(&numbers, &mut to);
        for (x, y) in numbers.iter().zip(&to) {
            let expected = bf16::from_f32(*x);
            assert!(
                expected.to_bits() == y.to_bits() || x.is_nan() && y.is_nan(),
                "{x:e}"
            );
        }
    }

    #[test]
    fn rounding_by_addition_takes_ties_to_even() {
        for x in [-127.5, -126.5, -0.5, 0.5, 1.5, 2.5, 3.4999, 126.5, 254.5f32] {
            let expected = x.round_ties_even() as i32 as u8;
            assert_eq!(round_bits(x) as u8, expected, "{x}");
        }
    }
}
