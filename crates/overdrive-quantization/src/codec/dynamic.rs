//! Magnitudes of blocks in 8 bits: the double quantization of bitsandbytes, bit for bit as on its CPU.
//!
//! The book is its "dynamic map" (Dettmers 2016, arXiv:1511.04561): seven decades from 1e-6 to 1, each
//! divided linearly into twice as many cells as the one below it; the midpoints of the cells with both signs,
//! zero and one. The nearest code is looked up in a table of 65536 cells from -1 to 1, so that numbers smaller
//! than a cell get the code of its midpoint.

use std::sync::OnceLock;

use overdrive_kernels::InstructionSet;

use super::floats::{first_not_finite, max_magnitude};
use super::not_finite::NotFinite;

/// The number of magnitudes that share a scale.
pub(crate) const BLOCK: usize = 256;
/// The number of cells of the table of nearest codes.
const CELLS: usize = 1 << 16;

/// Returns the numbers of the 256 codes, in ascending order.
pub(crate) fn code_book() -> &'static [f32; 256] {
    static BOOK: OnceLock<[f32; 256]> = OnceLock::new();
    BOOK.get_or_init(|| {
        let mut numbers = vec![0f32, 1.0];
        for (decade, scale) in [1e-6f32, 1e-5, 1e-4, 1e-3, 1e-2, 1e-1, 1.0]
            .into_iter()
            .enumerate()
        {
            let borders = linspace(0.1, 1.0, (1 << decade) + 1);
            for pair in borders.windows(2) {
                let number = scale * ((pair[0] + pair[1]) / 2.0);
                numbers.extend([number, -number]);
            }
        }
        numbers.sort_by(f32::total_cmp);
        let mut book = [0f32; 256];
        for (code, number) in book.iter_mut().zip(numbers) {
            *code = number;
        }
        book
    })
}

/// Returns `torch.linspace` in float32, which counts from both ends to the middle.
fn linspace(from: f32, to: f32, count: usize) -> Vec<f32> {
    // Bit for bit: another formula would change the last bit of some numbers of the book.
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

/// Returns the nearest code of the midpoint of each cell.
fn cells() -> &'static [u8; CELLS] {
    static TABLE: OnceLock<Box<[u8; CELLS]>> = OnceLock::new();
    TABLE.get_or_init(|| {
        let book = code_book();
        let mut table = Box::new([0u8; CELLS]);
        let mut code = 0;
        for (cell, slot) in table.iter_mut().enumerate() {
            let middle = -1.0 + (2.0 * cell as f32) / (CELLS - 1) as f32;
            while code < 255 && 0.5 * (book[code] + book[code + 1]) < middle {
                code += 1;
            }
            *slot = code as u8;
        }
        table
    })
}

/// Returns the code of a number.
fn nearest(x: f32) -> u8 {
    let cell = (x.clamp(-1.0, 1.0) + 1.0) * 0.5 * (CELLS - 1) as f32 + 0.5;
    // The mask makes the bounds check unnecessary; the cast maps NaN to cell 0.
    cells()[cell as usize & (CELLS - 1)]
}

/// Quantizes `magnitudes − offset` in blocks of [`BLOCK`]; `offset` is their mean.
pub(crate) fn quantize(
    magnitudes: &[f32],
    offset: f32,
    codes: &mut [u8],
    scales: &mut [f32],
) -> Result<(), NotFinite> {
    let blocks = magnitudes.chunks(BLOCK).zip(codes.chunks_mut(BLOCK));
    for (index, ((magnitudes, codes), scale)) in blocks.zip(scales).enumerate() {
        let centred: Vec<f32> = magnitudes.iter().map(|x| x - offset).collect();
        let most = max_magnitude(InstructionSet::best(), &centred);
        if !most.is_finite() {
            let index = index * BLOCK + first_not_finite(&centred).unwrap_or_default();
            return Err(NotFinite { index });
        }
        *scale = most;
        // All magnitudes equal: with the scale 0 any code gives the offset.
        if most == 0.0 {
            codes.fill(0);
            continue;
        }
        let inverse = 1.0 / most;
        for (code, x) in codes.iter_mut().zip(&centred) {
            *code = nearest(x * inverse);
        }
    }
    Ok(())
}

/// Returns the dequantized magnitudes.
#[cfg(test)]
pub(crate) fn dequantized(codes: &[u8], scales: &[f32], offset: f32) -> Vec<f32> {
    let magnitudes = crate::kernel::four_bit::MagnitudeSlices::Quantized {
        codes,
        book: code_book(),
        planes: None,
        scales,
        offset,
    };
    magnitudes.range(0..codes.len(), &mut Vec::new()).to_vec()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_book_rises_through_0_to_1() {
        let book = code_book();
        assert!(book.windows(2).all(|pair| pair[0] < pair[1]));
        assert_eq!((book[127], book[255]), (0.0, 1.0));
    }

    #[test]
    fn equal_magnitudes_come_back_exactly() {
        let (mut codes, mut scales) = ([1; 300], [1.0; 2]);
        quantize(&[0.5; 300], 0.5, &mut codes, &mut scales).expect("finite");
        let back = dequantized(&codes, &scales, 0.5);
        assert_eq!((scales, back), ([0.0; 2], vec![0.5; 300]));
    }

    proptest! {
        #[test]
        fn magnitudes_come_back_within_half_a_cell_of_the_book(
            magnitudes in prop::collection::vec(0f32..1.0, 1..600),
        ) {
            let offset = magnitudes.iter().sum::<f32>() / magnitudes.len() as f32;
            let mut codes = vec![0; magnitudes.len()];
            let mut scales = vec![0.0; magnitudes.len().div_ceil(BLOCK)];
            quantize(&magnitudes, offset, &mut codes, &mut scales).expect("finite");
            let back = dequantized(&codes, &scales, offset);
            for (index, (x, y)) in magnitudes.iter().zip(&back).enumerate() {
                // The widest cells, those of the last decade, are 0.9/64 of the largest; below
                // -0.993, the least number, there is none at all.
                let bound = scales[index / BLOCK] * (0.9 / 128.0 + 1e-4) + 1e-6;
                prop_assert!((x - y).abs() <= bound, "{} {}", x, y);
            }
        }
    }
}
