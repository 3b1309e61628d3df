//! The dynamic 8-bit data type of bitsandbytes, and the search for the nearest code.

use std::sync::OnceLock;

use overdrive_kernels::Nearest256;

/// Elements that share one scale.
pub(crate) const BLOCK: usize = 256;
/// The number of codes of a book.
pub(crate) const CODES: usize = 256;
/// The upper ends of the decades.
const DECADES: [f32; 7] = [1e-6, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0];

/// 256 values in ascending order, and tables for finding the nearest one.
///
/// The values are those of bitsandbytes' `create_dynamic_map` (Dettmers et al. 2022, [arXiv:2110.02861];
/// the idea is Dettmers 2016, [arXiv:1511.04561]): seven decades from 1e-6 to 1, each divided linearly
/// into twice as many cells as the previous one. The values are the centers of the cells, 0 and 1.
///
/// [arXiv:2110.02861]: https://arxiv.org/abs/2110.02861
/// [arXiv:1511.04561]: https://arxiv.org/abs/1511.04561
#[derive(Debug)]
pub(crate) struct CodeBook {
    pub(crate) codes: [f32; CODES],
    pub(crate) nearest: Nearest256,
}

impl CodeBook {
    /// Returns the book with both signs, for running averages of gradients.
    pub(crate) fn signed() -> &'static CodeBook {
        static SIGNED: OnceLock<CodeBook> = OnceLock::new();
        SIGNED.get_or_init(|| CodeBook::new(dynamic_map(true), false))
    }

    /// Returns the book of non-negative values, for running averages of squares.
    ///
    /// A positive value never becomes 0, because the update would then be divided by `eps` alone.
    /// (bitsandbytes' CUDA kernel rounds to 0; the smallest value of its CPU kernel is 1.6e-5.)
    pub(crate) fn unsigned() -> &'static CodeBook {
        static UNSIGNED: OnceLock<CodeBook> = OnceLock::new();
        UNSIGNED.get_or_init(|| CodeBook::new(dynamic_map(false), true))
    }

    fn new(codes: [f32; CODES], keep_above_zero: bool) -> Self {
        let mut bounds = [f32::INFINITY; CODES];
        for (bound, pair) in bounds.iter_mut().zip(codes.windows(2)) {
            *bound = (pair[0] + pair[1]) / 2.0;
        }
        // Every value above the bound gets the code after 0.
        if keep_above_zero {
            bounds[0] = 0.0;
        }
        Self {
            codes,
            nearest: Nearest256::new(bounds),
        }
    }
}

/// Returns bitsandbytes' `create_dynamic_map`, computed in float32 as PyTorch does there.
fn dynamic_map(signed: bool) -> [f32; CODES] {
    let mut numbers = vec![0f32, 1.0];
    for (decade, scale) in DECADES.into_iter().enumerate() {
        let cells = 1usize << if signed { decade } else { decade + 1 };
        // The signed map has half as many cells per decade, because each cell has two values.
        let borders = linspace(0.1, 1.0, cells + 1);
        for pair in borders.windows(2) {
            let middle = (pair[0] + pair[1]) / 2.0;
            let number = scale * middle;
            numbers.push(number);
            if signed {
                numbers.push(-number);
            }
        }
    }
    numbers.sort_by(f32::total_cmp);
    let mut codes = [0f32; CODES];
    for (code, number) in codes.iter_mut().zip(numbers) {
        *code = number;
    }
    codes
}

/// Returns `torch.linspace` in float32, which counts from both ends to the middle.
fn linspace(from: f32, to: f32, count: usize) -> Vec<f32> {
    let step = (to - from) / (count - 1) as f32;
    let at = |index: usize| {
        if index < count / 2 {
            step.mul_add(index as f32, from)
        } else {
            (-step).mul_add((count - 1 - index) as f32, to)
        }
    };
    (0..count).map(at).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_books_rise_and_hold_every_power_of_ten_they_should() {
        for book in [CodeBook::signed(), CodeBook::unsigned()] {
            assert!(book.codes.windows(2).all(|pair| pair[0] < pair[1]));
            assert_eq!(book.codes[255], 1.0);
        }
        assert_eq!(CodeBook::signed().codes[127], 0.0);
        assert_eq!(CodeBook::unsigned().codes[0], 0.0);
    }

    #[test]
    fn codes_are_those_of_bitsandbytes_bit_for_bit() {
        let path = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/tests/fixtures/adamw8bit.safetensors"
        );
        let fixture = tch::Tensor::read_safetensors(path).expect("gen_optimizers.py makes it");
        for (name, book) in [
            ("map.signed", CodeBook::signed()),
            ("map.unsigned", CodeBook::unsigned()),
        ] {
            let map = fixture.iter().find(|(key, _)| key == name);
            let map: Vec<f32> = (&map.expect("it is in the file").1)
                .try_into()
                .expect("floats");
            let bits = |codes: &[f32]| -> Vec<u32> { codes.iter().map(|c| c.to_bits()).collect() };
            assert_eq!(bits(&map), bits(&book.codes), "{name}");
        }
    }

    #[test]
    fn no_two_bounds_share_the_upper_half_of_their_bits() {
        for book in [CodeBook::signed(), CodeBook::unsigned()] {
            let halves = book.nearest.bounds()[..255]
                .iter()
                .map(|b| b.to_bits() >> 16);
            let distinct: std::collections::BTreeSet<u32> = halves.collect();
            assert_eq!(distinct.len(), 255);
        }
    }

    #[test]
    fn every_float_gets_the_code_that_a_search_finds() {
        for (book, signed) in [(CodeBook::signed(), true), (CodeBook::unsigned(), false)] {
            // Every 997th float from 0 to 1, and the neighbours of every bound.
            let sweep = (0..=1f32.to_bits()).step_by(997).map(f32::from_bits);
            let near = book.nearest.bounds()[..255]
                .iter()
                .flat_map(|b| [b.to_bits().wrapping_sub(1), b.to_bits(), b.to_bits() + 1])
                .map(f32::from_bits)
                .filter(|v| v.abs() <= 1.0);
            for value in sweep.chain(near) {
                for value in [value, -value] {
                    if value < 0.0 && !signed {
                        continue;
                    }
                    let expected = book.nearest.bounds().iter().filter(|&&b| b < value).count();
                    assert_eq!(
                        usize::from(book.nearest.nearest(value)),
                        expected,
                        "{value:e}"
                    );
                }
            }
        }
    }
}
