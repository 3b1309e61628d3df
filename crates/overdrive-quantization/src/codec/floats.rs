//! Floats of three widths as slices of f32, and the extremes of a slice before it is quantized.

use overdrive_kernels::{Element, InstructionSet, vectorized};

/// The dtypes of weights and activations, as slices of f32, in which codecs compute.
pub(crate) trait Float: Element {
    /// Returns the numbers as f32, in `scratch` unless they are f32 already.
    fn read<'a>(from: &'a [Self], scratch: &'a mut Vec<f32>) -> &'a [f32] {
        match Self::as_acc(from) {
            Some(floats) => floats,
            None => {
                scratch.resize(from.len(), 0.0);
                Self::widen(InstructionSet::best(), from, scratch);
                scratch
            }
        }
    }

    /// Calls `fill` to write the numbers as f32, each of them, and rounds them to nearest, ties to even.
    fn write(to: &mut [Self], scratch: &mut Vec<f32>, fill: impl FnOnce(&mut [f32])) {
        if let Some(floats) = Self::as_acc_mut(to) {
            return fill(floats);
        }
        scratch.resize(to.len(), 0.0);
        fill(scratch);
        Self::narrow(InstructionSet::best(), scratch, to);
    }
}

impl<T: Element> Float for T {}

/// Returns the largest magnitude; infinite or NaN if any number is.
///
/// The bits of magnitudes rise as the magnitudes do, NaN above all, and a maximum of integers has no special
/// cases that would keep the loop from becoming vectors.
#[inline(always)]
pub(crate) fn max_magnitude_of(numbers: &[f32]) -> f32 {
    let bits = numbers
        .iter()
        .fold(0, |most, x| u32::max(most, x.to_bits() & 0x7FFF_FFFF));
    f32::from_bits(bits)
}

vectorized! {
    /// Returns the largest magnitude; infinite or NaN if any number is.
    pub(crate) fn max_magnitude<S: Simd>(_s: S, numbers: &[f32]) -> f32 {
        max_magnitude_of(numbers)
    }
}

vectorized! {
    /// Returns the least and the largest number; infinite or NaN if any is. Zeros for no numbers.
    pub(crate) fn extremes<S: Simd>(_s: S, numbers: &[f32]) -> [f32; 2] {
        // The magnitudes of negative numbers fall as the numbers rise: with these bits flipped, signed
        // integers have the order of the floats.
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

/// Returns the index of the first number that is infinite or NaN.
pub(crate) fn first_not_finite(numbers: &[f32]) -> Option<usize> {
    // Not vectorized: it runs only to name the number in an error.
    numbers.iter().position(|x| !x.is_finite())
}

/// Returns the nearest integer of a number in `-2²²..2²²`, ties to even, in the low bits.
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
    fn extremes_are_those_of_the_floats_and_show_bad_numbers() {
        let set = InstructionSet::best();
        assert_eq!(extremes(set, &[0.5, -2.0, 1.5, -0.0]), [-2.0, 1.5]);
        assert_eq!(extremes(set, &[-3.0, -1.0]), [-3.0, -1.0]);
        assert_eq!(extremes(set, &[]), [0.0, 0.0]);
        assert_eq!(max_magnitude(set, &[0.5, -2.0, 1.5]), 2.0);
        for bad in [f32::NAN, -f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            let mut numbers = [1f32; 40];
            numbers[33] = bad;
            assert!(!max_magnitude(set, &numbers).is_finite());
            assert!(extremes(set, &numbers).iter().any(|x| !x.is_finite()));
            assert_eq!(first_not_finite(&numbers), Some(33));
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
