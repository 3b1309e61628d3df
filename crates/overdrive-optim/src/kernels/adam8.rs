//! AdamW with both averages in 8-bit blocks: dequantize, update and quantize in one pass.

use std::ops::Range;

use overdrive_kernels::threads::{chunk_len, run_jobs};
use overdrive_kernels::{Element, InstructionSet, Simd, convert, vectorized};
use tch::Tensor;

use super::adam::{AdamNumbers, update};
use super::elements::{read, write};
use crate::Result;
use crate::code_book::{BLOCK, CodeBook};

/// The number of blocks that are worth a thread.
const GRAIN: usize = 32;

/// The two averages in 8 bits: a code for each element of the parameter, a scale for each block.
#[derive(Debug)]
pub(crate) struct Quantized<'a> {
    pub(crate) exp_avg: &'a Tensor,
    pub(crate) absmax1: &'a Tensor,
    pub(crate) exp_avg_sq: &'a Tensor,
    pub(crate) absmax2: &'a Tensor,
}

/// Updates elements `range` of a contiguous parameter on the CPU. `range` starts at a block.
pub(crate) fn adam8<T: Element>(
    numbers: &AdamNumbers,
    parameter: &Tensor,
    gradient: &Tensor,
    state: &Quantized<'_>,
    range: Range<usize>,
) -> Result<()> {
    debug_assert_eq!(range.start % BLOCK, 0);
    let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
    // SAFETY: the tensors of one parameter, each taken once; see `elements::write`.
    let (gradient, parameter, codes1, codes2, scales1, scales2): (&[T], &mut [T], _, _, _, _) = unsafe {
        (
            &read(gradient)?[range.clone()],
            &mut write(parameter)?[range.clone()],
            &mut write::<u8>(state.exp_avg)?[range.clone()],
            &mut write::<u8>(state.exp_avg_sq)?[range],
            &mut write::<f32>(state.absmax1)?[blocks.clone()],
            &mut write::<f32>(state.absmax2)?[blocks.clone()],
        )
    };
    let chunk = chunk_len(blocks.len(), GRAIN);
    let values = parameter
        .chunks_mut(chunk * BLOCK)
        .zip(gradient.chunks(chunk * BLOCK));
    let codes = codes1
        .chunks_mut(chunk * BLOCK)
        .zip(codes2.chunks_mut(chunk * BLOCK));
    let scales = scales1.chunks_mut(chunk).zip(scales2.chunks_mut(chunk));
    let jobs = values.zip(codes.zip(scales));
    run_jobs(jobs, |((parameter, gradient), (codes, scales))| {
        let set = InstructionSet::best();
        update_blocks(set, numbers, parameter, gradient, codes, scales);
    });
    Ok(())
}

vectorized! {
    /// Updates some blocks, each through buffers that stay in the first-level cache.
    fn update_blocks<S: Simd, T: Element>(
        s: S,
        numbers: &AdamNumbers,
        parameter: &mut [T],
        gradient: &[T],
        codes: (&mut [u8], &mut [u8]),
        scales: (&mut [f32], &mut [f32]),
    ) {
        let (signed, unsigned) = (CodeBook::signed(), CodeBook::unsigned());
        let (mut p, mut g) = ([0f32; BLOCK], [0f32; BLOCK]);
        let (mut m, mut v) = ([0f32; BLOCK], [0f32; BLOCK]);
        let codes = codes.0.chunks_mut(BLOCK).zip(codes.1.chunks_mut(BLOCK));
        let scales = scales.0.iter_mut().zip(scales.1);
        let values = parameter.chunks_mut(BLOCK).zip(gradient.chunks(BLOCK));
        for (((codes1, codes2), (scale1, scale2)), (parameter, gradient)) in
            codes.zip(scales).zip(values)
        {
            let len = parameter.len();
            convert(s, parameter, &mut p[..len]);
            convert(s, gradient, &mut g[..len]);
            dequantize(signed, codes1, *scale1, &mut m);
            dequantize(unsigned, codes2, *scale2, &mut v);
            let (m, v) = (&mut m[..len], &mut v[..len]);
            update(s, numbers, &mut p[..len], &g[..len], m, v);
            convert(s, &p[..len], parameter);
            *scale1 = quantize(s, signed, m, codes1);
            *scale2 = quantize(s, unsigned, v, codes2);
        }
    }
}

#[inline(always)]
fn dequantize(book: &CodeBook, codes: &[u8], scale: f32, values: &mut [f32; BLOCK]) {
    for (value, &code) in values.iter_mut().zip(codes) {
        *value = book.codes[usize::from(code)] * scale;
    }
}

/// Writes the codes of up to a block of values, and returns their scale: the largest absolute value.
#[inline(always)]
fn quantize<S: Simd>(s: S, book: &CodeBook, values: &[f32], codes: &mut [u8]) -> f32 {
    let scale = largest(values);
    // Below, the inverse would be infinite.
    let inverse = if scale >= f32::MIN_POSITIVE {
        1.0 / scale
    } else {
        0.0
    };
    s.nearest_256(&book.nearest, values, inverse, codes);
    scale
}

/// Returns the largest absolute value, in as many lanes as any vector unit has. NaN is passed over.
#[inline(always)]
fn largest(values: &[f32]) -> f32 {
    const LANES: usize = 16;
    let mut lanes = [0f32; LANES];
    let chunks = values.chunks_exact(LANES);
    let rest = chunks.remainder();
    for chunk in chunks {
        for (most, value) in lanes.iter_mut().zip(chunk) {
            let value = value.abs();
            *most = if value > *most { value } else { *most };
        }
    }
    lanes
        .iter()
        .chain(rest)
        .fold(0f32, |most, value| most.max(value.abs()))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns values over many decades.
    fn numbers(seed: u32) -> [f32; BLOCK] {
        let mut state = seed.wrapping_mul(2_654_435_761).max(1);
        std::array::from_fn(|_| {
            state ^= state << 13;
            state ^= state >> 17;
            state ^= state << 5;
            let decade = (state % 9) as i32 - 8;
            (state as i32 as f32 / i32::MAX as f32) * 10f32.powi(decade)
        })
    }

    vectorized! {
        fn quantize_block<S: Simd>(s: S, book: &CodeBook, values: &[f32], codes: &mut [u8]) -> f32 {
            quantize(s, book, values, codes)
        }
    }

    #[test]
    fn every_instruction_set_finds_the_nearest_codes() {
        for set in InstructionSet::available() {
            for seed in 1..50 {
                let values = numbers(seed);
                for (book, values) in [
                    (CodeBook::signed(), values),
                    (CodeBook::unsigned(), values.map(|v| v * v)),
                ] {
                    for len in [BLOCK, 45] {
                        let (values, mut codes) = (&values[..len], [0u8; BLOCK]);
                        let scale = quantize_block(set, book, values, &mut codes[..len]);
                        assert_eq!(scale, values.iter().fold(0f32, |a, v| a.max(v.abs())));
                        for (value, code) in values.iter().zip(codes) {
                            let expected = book.nearest.nearest(value * (1.0 / scale));
                            assert_eq!(code, expected, "{set:?}: {value}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn an_empty_average_stays_zero() {
        let zeros = [0f32; BLOCK];
        for set in InstructionSet::available() {
            let mut codes = [9u8; BLOCK];
            for (book, expected) in [(CodeBook::signed(), 127), (CodeBook::unsigned(), 0)] {
                assert_eq!(quantize_block(set, book, &zeros, &mut codes), 0.0);
                assert_eq!(codes, [expected; BLOCK], "{set:?}");
            }
        }
    }
}
