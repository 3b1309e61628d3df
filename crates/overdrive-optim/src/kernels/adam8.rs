//! AdamW with both averages in 8-bit blocks: dequantize, update and quantize in one pass.

use std::ops::Range;

use overdrive_sys::threads::parallel_for;
use tch::Tensor;

use super::adam::{AdamNumbers, update};
use super::shared::{Real, Shared, read, write};
use crate::Result;
use crate::code_book::{BLOCK, CODES, CodeBook};

/// Blocks that are worth a thread.
const GRAIN: usize = 32;

/// Two averages in 8 bits: codes of the parameter's element count, one scale a block.
#[derive(Debug)]
pub(crate) struct Quantized<'a> {
    pub(crate) exp_avg: &'a Tensor,
    pub(crate) absmax1: &'a Tensor,
    pub(crate) exp_avg_sq: &'a Tensor,
    pub(crate) absmax2: &'a Tensor,
}

/// Updates elements `range` of a contiguous parameter on the CPU. `range` starts at a block.
pub(crate) fn adam8<T: Real>(
    numbers: &AdamNumbers,
    parameter: &Tensor,
    gradient: &Tensor,
    state: &Quantized<'_>,
    range: Range<usize>,
) -> Result<()> {
    debug_assert_eq!(range.start % BLOCK, 0);
    // SAFETY: a tensor of this parameter, taken once; see `shared::write`.
    let gradient: &[T] = &unsafe { read(gradient) }?[range.clone()];
    // SAFETY: a tensor of this parameter, taken once; see `shared::write`.
    let parameter = Shared::new(&mut unsafe { write::<T>(parameter) }?[range.clone()]);
    let blocks = range.start / BLOCK..range.end.div_ceil(BLOCK);
    // SAFETY: a tensor of this parameter, taken once; see `shared::write`.
    let codes1 = Shared::new(&mut unsafe { write::<u8>(state.exp_avg) }?[range.clone()]);
    // SAFETY: a tensor of this parameter, taken once; see `shared::write`.
    let codes2 = Shared::new(&mut unsafe { write::<u8>(state.exp_avg_sq) }?[range]);
    // SAFETY: a tensor of this parameter, taken once; see `shared::write`.
    let scales1 = Shared::new(&mut unsafe { write::<f32>(state.absmax1) }?[blocks.clone()]);
    // SAFETY: a tensor of this parameter, taken once; see `shared::write`.
    let scales2 = Shared::new(&mut unsafe { write::<f32>(state.absmax2) }?[blocks.clone()]);
    parallel_for(blocks.len(), GRAIN, |blocks| {
        let elements = blocks.start * BLOCK..(blocks.end * BLOCK).min(gradient.len());
        // SAFETY: the ranges of one `parallel_for` do not overlap.
        let (parameter, state) = unsafe {
            let state = Blocks {
                codes1: codes1.range(elements.clone()),
                scales1: scales1.range(blocks.clone()),
                codes2: codes2.range(elements.clone()),
                scales2: scales2.range(blocks),
            };
            (parameter.range(elements.clone()), state)
        };
        let gradient = &gradient[elements];
        super::dispatch!(run::<T>, run_avx2, (numbers, parameter, gradient, state));
    });
    Ok(())
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_avx2<T: Real>(
    numbers: &AdamNumbers,
    parameter: &mut [T],
    gradient: &[T],
    state: Blocks<'_>,
) {
    run::<T, true>(numbers, parameter, gradient, state);
}

/// Codes and scales of some blocks of both averages.
struct Blocks<'a> {
    codes1: &'a mut [u8],
    scales1: &'a mut [f32],
    codes2: &'a mut [u8],
    scales2: &'a mut [f32],
}

/// Block by block through buffers that stay in the first-level cache.
#[inline(always)]
fn run<T: Real, const FUSED: bool>(
    numbers: &AdamNumbers,
    parameter: &mut [T],
    gradient: &[T],
    state: Blocks<'_>,
) {
    let (signed, unsigned) = (CodeBook::signed(), CodeBook::unsigned());
    let (mut p, mut g) = ([0f32; BLOCK], [0f32; BLOCK]);
    let (mut m, mut v) = ([0f32; BLOCK], [0f32; BLOCK]);
    let codes = state
        .codes1
        .chunks_mut(BLOCK)
        .zip(state.codes2.chunks_mut(BLOCK));
    let scales = state.scales1.iter_mut().zip(state.scales2);
    let values = parameter.chunks_mut(BLOCK).zip(gradient.chunks(BLOCK));
    for (((codes1, codes2), (scale1, scale2)), (parameter, gradient)) in
        codes.zip(scales).zip(values)
    {
        let len = parameter.len();
        T::widen(parameter, &mut p[..len]);
        T::widen(gradient, &mut g[..len]);
        dequantize(signed, codes1, *scale1, &mut m);
        dequantize(unsigned, codes2, *scale2, &mut v);
        update::<FUSED>(
            numbers,
            &mut p[..len],
            &g[..len],
            &mut m[..len],
            &mut v[..len],
        );
        T::narrow(&p[..len], parameter);
        *scale1 = quantize::<FUSED>(signed, &m[..len], codes1);
        *scale2 = quantize::<FUSED>(unsigned, &v[..len], codes2);
    }
}

#[inline(always)]
fn dequantize(book: &CodeBook, codes: &[u8], scale: f32, values: &mut [f32; BLOCK]) {
    for (value, &code) in values.iter_mut().zip(codes) {
        *value = book.codes[usize::from(code)] * scale;
    }
}

/// The codes of up to a block of numbers, and their scale: the largest absolute value.
#[inline(always)]
fn quantize<const FUSED: bool>(book: &CodeBook, values: &[f32], codes: &mut [u8]) -> f32 {
    let scale = largest(values);
    // Below, the inverse would be infinite.
    let inverse = if scale >= f32::MIN_POSITIVE {
        1.0 / scale
    } else {
        0.0
    };
    #[cfg(target_arch = "x86_64")]
    if FUSED
        && let (Ok(values), Ok(codes)) = (
            <&[f32; BLOCK]>::try_from(values),
            <&mut [u8; BLOCK]>::try_from(&mut *codes),
        )
    {
        // SAFETY: FUSED is true only in what is compiled for AVX2 and runs where it is.
        unsafe { nearest_avx2(book, values, inverse, codes) };
        return scale;
    }
    for (code, &value) in codes.iter_mut().zip(values) {
        *code = book.nearest(value * inverse);
    }
    scale
}

/// The largest absolute value, in as many lanes as any vector unit has. NaN is passed over.
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

/// [`CodeBook::nearest`] of eight numbers at a time.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn nearest_avx2(book: &CodeBook, values: &[f32; BLOCK], inverse: f32, codes: &mut [u8; BLOCK]) {
    use std::arch::x86_64::*;

    assert!(book.start.len() == (1 << 16) + 3 && book.bounds.len() == CODES);
    let inverse = _mm256_set1_ps(inverse);
    let byte = _mm256_set1_epi32(0xFF);
    let eight = |values: &[f32]| {
        assert!(values.len() == 8);
        // SAFETY: eight floats, of any alignment.
        let scaled = _mm256_mul_ps(unsafe { _mm256_loadu_ps(values.as_ptr()) }, inverse);
        let half = _mm256_srli_epi32::<16>(_mm256_castps_si256(scaled));
        // SAFETY: an index has 16 bits, the table 3 bytes more than that many entries.
        let start = unsafe { _mm256_i32gather_epi32::<1>(book.start.as_ptr().cast(), half) };
        let start = _mm256_and_si256(start, byte);
        // SAFETY: an index is a byte, the table has 256 entries.
        let bound = unsafe { _mm256_i32gather_ps::<4>(book.bounds.as_ptr(), start) };
        // All ones where it is above, which is -1.
        let above = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(scaled, bound));
        _mm256_sub_epi32(start, above)
    };
    // Packing works within halves of a register: this puts the quarters back in order.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    for (values, codes) in values.chunks_exact(32).zip(codes.chunks_exact_mut(32)) {
        let low = _mm256_packus_epi32(eight(&values[..8]), eight(&values[8..16]));
        let high = _mm256_packus_epi32(eight(&values[16..24]), eight(&values[24..]));
        let packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        // SAFETY: 32 bytes, of any alignment.
        unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), packed) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Numbers over many decades, without a random generator.
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

    #[test]
    fn both_paths_find_the_same_codes() {
        for seed in 1..50 {
            let values = numbers(seed);
            for (book, values) in [
                (CodeBook::signed(), values),
                (CodeBook::unsigned(), values.map(|v| v * v)),
            ] {
                let (mut portable, mut fast) = ([0u8; BLOCK], [0u8; BLOCK]);
                let scale = quantize::<false>(book, &values, &mut portable);
                #[cfg(target_arch = "x86_64")]
                if super::super::has_avx2() {
                    assert_eq!(quantize::<true>(book, &values, &mut fast), scale);
                    assert_eq!(portable, fast);
                }
                let _ = &mut fast;
                assert_eq!(scale, values.iter().fold(0f32, |a, v| a.max(v.abs())));
            }
        }
    }

    #[test]
    fn an_empty_average_stays_zero() {
        let mut codes = [9u8; BLOCK];
        let zeros = [0f32; BLOCK];
        assert_eq!(
            quantize::<false>(CodeBook::signed(), &zeros, &mut codes),
            0.0
        );
        assert_eq!(codes, [127; BLOCK]);
        assert_eq!(
            quantize::<false>(CodeBook::unsigned(), &zeros, &mut codes),
            0.0
        );
        assert_eq!(codes, [0; BLOCK]);
    }
}
