//! Blocks of 4-bit codes of the flattened weight, bit for bit those of bitsandbytes' `quantize_4bit` on the
//! CPU.

use super::code_book::{Book, FP4_ORDER};
use super::floats::{first_not_finite, max_magnitude};
use super::not_finite::NotFinite;
use overdrive_kernels::{InstructionSet, vectorized};

/// The smallest magnitude by which a block is divided, as in bitsandbytes.
const LEAST_MAGNITUDE: f32 = 1e-38;

/// Quantizes `numbers` in blocks of `block`, an even number, the last of which may be shorter.
///
/// `packed` has `⌈len/2⌉` bytes, the first of two elements in the high half, and `magnitudes` has
/// `⌈len/block⌉` numbers.
pub(crate) fn quantize(
    numbers: &[f32],
    block: usize,
    book: Book,
    packed: &mut [u8],
    magnitudes: &mut [f32],
) -> Result<(), NotFinite> {
    let set = InstructionSet::best();
    let blocks = numbers.chunks(block).zip(packed.chunks_mut(block / 2));
    // `chunks` of the packed bytes stay aligned with those of the numbers, since blocks are even.
    for (index, ((numbers, packed), magnitude)) in blocks.zip(magnitudes).enumerate() {
        let most = max_magnitude(set, numbers);
        if !most.is_finite() {
            let index = index * block + first_not_finite(numbers).unwrap_or_default();
            return Err(NotFinite { index });
        }
        let divisor = most.max(LEAST_MAGNITUDE);
        if numbers.len() == block {
            *magnitude = most;
            let fp4 = book == Book::Fp4;
            encode(set, numbers, 1.0 / divisor, fp4, packed);
        } else {
            // bitsandbytes divides the last, shorter block, stores the divisor, and multiplies the others
            // by the inverse.
            *magnitude = divisor;
            let mut scaled: Vec<f32> = numbers.iter().map(|x| x / divisor).collect();
            // It pads the last byte with a 0.
            scaled.resize(scaled.len().next_multiple_of(2), 0.0);
            encode(set, &scaled, 1.0, book == Book::Fp4, packed);
        }
    }
    Ok(())
}

const NF4_BOUNDS: [f32; 15] = Book::Nf4.bounds();
const FP4_BOUNDS: [f32; 15] = Book::Fp4.bounds();

/// Returns the number of bounds that `x` is beyond: the rank of the nearest number.
#[inline(always)]
fn rank(x: f32, bounds: &[f32; 15]) -> u32 {
    let mut rank = 0;
    // Comparisons without branches, which become vectors.
    for bound in bounds {
        rank += u32::from(x > *bound);
    }
    rank
}

/// The number of elements that are encoded before they are packed.
const TILE: usize = 32;

vectorized! {
    fn encode<S: Simd>(_s: S, numbers: &[f32], inverse: f32, fp4: bool, packed: &mut [u8]) {
        let mut codes = [0u8; TILE];
        for (numbers, packed) in numbers.chunks(TILE).zip(packed.chunks_mut(TILE / 2)) {
            if fp4 {
                for (code, x) in codes.iter_mut().zip(numbers) {
                    *code = (FP4_ORDER >> (4 * rank(x * inverse, &FP4_BOUNDS))) as u8 & 15;
                }
            } else {
                for (code, x) in codes.iter_mut().zip(numbers) {
                    *code = rank(x * inverse, &NF4_BOUNDS) as u8;
                }
            }
            for (byte, pair) in packed.iter_mut().zip(codes.chunks_exact(2)) {
                *byte = pair[0] << 4 | pair[1];
            }
        }
    }
}

vectorized! {
    fn decode_pairs<S: Simd>(_s: S, packed: &[u8], pairs: &[[f32; 2]; 256], magnitude: f32, numbers: &mut [f32]) {
        for (to, byte) in numbers.chunks_exact_mut(2).zip(packed) {
            let pair = pairs[usize::from(*byte)];
            to[0] = pair[0] * magnitude;
            to[1] = pair[1] * magnitude;
        }
    }
}

/// Dequantizes the elements from `start` of the flattened weight on. `magnitudes` begins with the block of
/// `start`.
pub(crate) fn dequantize(
    packed: &[u8],
    start: usize,
    block: usize,
    book: Book,
    magnitudes: &[f32],
    numbers: &mut [f32],
) {
    let magnitude = |at: usize| magnitudes[at / block - start / block];
    let one = |at: usize| {
        let byte = packed[at / 2];
        let code = if at.is_multiple_of(2) {
            byte >> 4
        } else {
            byte & 15
        };
        book.numbers()[usize::from(code)] * magnitude(at)
    };
    let (mut at, end) = (start, start + numbers.len());
    while at < end {
        let block_end = (at / block + 1) * block;
        let until = block_end.min(end);
        let part = &mut numbers[at - start..until - start];
        let mut first = 0;
        if at % 2 == 1 {
            part[0] = one(at);
            first = 1;
        }
        let even = (part.len() - first) / 2 * 2;
        let bytes = &packed[(at + first) / 2..(at + first + even) / 2];
        let whole = &mut part[first..first + even];
        decode_pairs(
            InstructionSet::best(),
            bytes,
            book.pairs(),
            magnitude(at),
            whole,
        );
        if first + even < part.len() {
            let last = part.len() - 1;
            part[last] = one(at + last);
        }
        at = until;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn every_number_gets_the_nearest_of_its_book(
            numbers in prop::collection::vec(-1f32..1.0, 1..300),
            exponent in -30..30,
            size in 5u32..=8,
            fp4 in any::<bool>(),
        ) {
            let numbers: Vec<f32> = numbers.iter().map(|x| x * 2f32.powi(exponent)).collect();
            let (block, book) = (1 << size, if fp4 { Book::Fp4 } else { Book::Nf4 });
            let mut packed = vec![0; numbers.len().div_ceil(2)];
            let mut magnitudes = vec![0.0; numbers.len().div_ceil(block)];
            quantize(&numbers, block, book, &mut packed, &mut magnitudes).expect("finite");
            let mut back = vec![0.0; numbers.len()];
            dequantize(&packed, 0, block, book, &magnitudes, &mut back);
            for (index, (x, y)) in numbers.iter().zip(&back).enumerate() {
                let magnitude = magnitudes[index / block];
                let nearest = book.numbers().iter().map(|n| (n * magnitude - x).abs());
                let least = nearest.fold(f32::INFINITY, f32::min);
                prop_assert!((x - y).abs() <= least + magnitude * 2.0 * f32::EPSILON);
            }
            // Any range of it, also from odd positions.
            let from = numbers.len() / 3;
            let mut part = vec![0.0; numbers.len() - from];
            dequantize(&packed, from, block, book, &magnitudes[from / block..], &mut part);
            prop_assert_eq!(&part, &back[from..]);
        }
    }

    #[test]
    fn blocks_of_zeros_are_zeros() {
        let (mut packed, mut magnitudes) = ([1; 35], [1.0; 2]);
        quantize(&[0.0; 70], 64, Book::Nf4, &mut packed, &mut magnitudes).expect("finite");
        assert_eq!(packed, [0x77; 35]);
        assert_eq!(magnitudes, [0.0, 1e-38]);
        let mut back = [1.0; 70];
        dequantize(&packed, 0, 64, Book::Nf4, &magnitudes, &mut back);
        assert_eq!(back, [0.0; 70]);
    }

    #[test]
    fn the_first_bad_number_is_named() {
        let mut numbers = [0.5; 100];
        numbers[70] = f32::NEG_INFINITY;
        let (mut packed, mut magnitudes) = ([0; 50], [0.0; 2]);
        let found = quantize(&numbers, 64, Book::Fp4, &mut packed, &mut magnitudes);
        assert_eq!(found, Err(NotFinite { index: 70 }));
    }
}
