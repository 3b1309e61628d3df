//! The code books of NF4 and FP4, those of bitsandbytes, and of the 4-bit floats of MXFP4 and NVFP4.

/// A book of 16 numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Book {
    /// The quantiles of a normal distribution, in ascending order (Dettmers et al. 2023, arXiv:2305.14314).
    Nf4,
    /// The floats with a sign, two bits of exponent and one of mantissa, divided by the largest.
    Fp4,
    /// The floats e2m1: a sign, two bits of exponent with bias 1, one of mantissa.
    E2m1,
}

const NF4: [f32; 16] = [
    -1.0,
    -0.696_192_8,
    -0.525_073_05,
    -0.394_917_5,
    -0.284_441_38,
    -0.184_773_43,
    -0.091_050_036,
    0.0,
    0.079_580_3,
    0.160_930_2,
    0.246_112_3,
    0.337_915_24,
    0.440_709_83,
    0.562_617,
    0.722_956_84,
    1.0,
];

/// The numbers divided by the largest, which is 12.
const FP4: [f32; 16] = [
    0.0,
    0.0625 / 12.0,
    8.0 / 12.0,
    1.0,
    4.0 / 12.0,
    6.0 / 12.0,
    2.0 / 12.0,
    3.0 / 12.0,
    0.0,
    -0.0625 / 12.0,
    -8.0 / 12.0,
    -1.0,
    -4.0 / 12.0,
    -6.0 / 12.0,
    -2.0 / 12.0,
    -3.0 / 12.0,
];

const E2M1: [f32; 16] = [
    0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0,
];

/// The codes of e2m1, as [`FP4_ORDER`].
const E2M1_ORDER: u64 = 0x7654_3218_09AB_CDEF;

/// The codes of FP4 in ascending order of their numbers, four bits each, the least in the low bits. Of its two
/// zeros the code 0 comes first.
pub(crate) const FP4_ORDER: u64 = 0x3254_7618_09EF_CDAB;

impl Book {
    /// Returns the number of each code.
    pub(crate) const fn numbers(self) -> &'static [f32; 16] {
        match self {
            Book::Nf4 => &NF4,
            Book::Fp4 => &FP4,
            Book::E2m1 => &E2M1,
        }
    }

    /// Returns the name in quantization states and configurations.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Book::Nf4 => "nf4",
            Book::Fp4 => "fp4",
            Book::E2m1 => "e2m1",
        }
    }

    /// Returns the code whose number has this rank in ascending order.
    pub(crate) const fn code_at(self, rank: u32) -> u8 {
        match self {
            Book::Nf4 => rank as u8,
            Book::Fp4 => (FP4_ORDER >> (4 * rank)) as u8 & 15,
            Book::E2m1 => (E2M1_ORDER >> (4 * rank)) as u8 & 15,
        }
    }

    /// Returns the midpoints between neighbours in ascending order: beyond a midpoint the next number is nearer.
    pub(crate) const fn bounds(self) -> [f32; 15] {
        let numbers = self.numbers();
        let mut bounds = [0.0; 15];
        let mut rank = 0;
        while rank < 15 {
            let low = numbers[self.code_at(rank) as usize];
            let high = numbers[self.code_at(rank + 1) as usize];
            bounds[rank as usize] = (low + high) / 2.0;
            rank += 1;
        }
        bounds
    }

    /// Returns the two numbers of each byte, that of the high half first.
    pub(crate) const fn pairs(self) -> &'static [[f32; 2]; 256] {
        const fn pairs(book: Book) -> [[f32; 2]; 256] {
            let numbers = book.numbers();
            let mut pairs = [[0.0; 2]; 256];
            let mut byte = 0;
            while byte < 256 {
                pairs[byte] = [numbers[byte >> 4], numbers[byte & 15]];
                byte += 1;
            }
            pairs
        }
        // Computed at compile time: 2 KB for each book, and one look-up for two codes.
        static NF4_PAIRS: [[f32; 2]; 256] = pairs(Book::Nf4);
        static FP4_PAIRS: [[f32; 2]; 256] = pairs(Book::Fp4);
        static E2M1_PAIRS: [[f32; 2]; 256] = pairs(Book::E2m1);
        match self {
            Book::Nf4 => &NF4_PAIRS,
            Book::Fp4 => &FP4_PAIRS,
            Book::E2m1 => &E2M1_PAIRS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_one_rank_in_ascending_order() {
        for book in [Book::Nf4, Book::Fp4, Book::E2m1] {
            let in_order: Vec<f32> = (0..16)
                .map(|place| book.numbers()[usize::from(book.code_at(place))])
                .collect();
            assert!(in_order.is_sorted(), "{in_order:?}");
            let codes: std::collections::BTreeSet<u8> = (0..16).map(|p| book.code_at(p)).collect();
            assert_eq!(codes.len(), 16);
        }
    }
}
