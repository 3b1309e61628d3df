//! The books of 16 numbers of NF4 and FP4, as bitsandbytes has them.

/// 16 numbers in `-1..=1`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Book {
    /// Quantiles of a normal distribution, in rising order (Dettmers et al. 2023, arXiv:2305.14314).
    Nf4,
    /// Floats with a sign, two bits of exponent and one of mantissa.
    Fp4,
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

/// In twelfths of the largest, which is 12.
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

/// The codes of FP4 in rising order of their numbers, four bits each, the least in the low bits. Of its
/// two zeros the code 0 comes first.
pub(crate) const FP4_ORDER: u64 = 0x3254_7618_09EF_CDAB;

impl Book {
    /// The number of each code.
    pub(crate) const fn numbers(self) -> &'static [f32; 16] {
        match self {
            Book::Nf4 => &NF4,
            Book::Fp4 => &FP4,
        }
    }

    /// The name in quantization states and configurations.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Book::Nf4 => "nf4",
            Book::Fp4 => "fp4",
        }
    }

    /// The code at a place in rising order of numbers.
    pub(crate) const fn code_at(self, place: u32) -> u8 {
        match self {
            Book::Nf4 => place as u8,
            Book::Fp4 => (FP4_ORDER >> (4 * place)) as u8 & 15,
        }
    }

    /// The middles between neighbours in rising order: beyond the middle the next one is nearer.
    pub(crate) const fn bounds(self) -> [f32; 15] {
        let numbers = self.numbers();
        let mut bounds = [0.0; 15];
        let mut place = 0;
        while place < 15 {
            let low = numbers[self.code_at(place) as usize];
            let high = numbers[self.code_at(place + 1) as usize];
            bounds[place as usize] = (low + high) / 2.0;
            place += 1;
        }
        bounds
    }

    /// The two numbers of each byte, that of the high half first.
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
        static NF4_PAIRS: [[f32; 2]; 256] = pairs(Book::Nf4);
        static FP4_PAIRS: [[f32; 2]; 256] = pairs(Book::Fp4);
        match self {
            Book::Nf4 => &NF4_PAIRS,
            Book::Fp4 => &FP4_PAIRS,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_code_has_its_place_in_rising_order() {
        for book in [Book::Nf4, Book::Fp4] {
            let in_order: Vec<f32> = (0..16)
                .map(|place| book.numbers()[usize::from(book.code_at(place))])
                .collect();
            assert!(in_order.is_sorted(), "{in_order:?}");
            let codes: std::collections::BTreeSet<u8> = (0..16).map(|p| book.code_at(p)).collect();
            assert_eq!(codes.len(), 16);
        }
    }
}
