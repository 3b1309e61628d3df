//! The transposition of sums, from rows side by side to outputs side by side.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use overdrive_kernels::arch::Avx512;

use crate::kernel::int8_rows::GROUP_ROWS;

/// The number of outputs at a time. Sums must exist for all of them, although they may be meaningless.
pub(super) const OUTPUTS: usize = 16;

/// Transposes the sums of eight rows of 16 outputs: `sums` has those of one output every `stride` integers, and
/// `to` gets those of one row every `to_stride`.
#[inline]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl")]
pub(super) fn transpose(_: Avx512, sums: &[i32], stride: usize, to: &mut [i32], to_stride: usize) {
    assert!(
        sums.len() >= (OUTPUTS - 1) * stride + GROUP_ROWS,
        "the sums of 16 outputs"
    );
    assert!(
        to.len() >= (GROUP_ROWS - 1) * to_stride + OUTPUTS,
        "room for eight rows"
    );
    // SAFETY: asserted, for `output` below 16.
    let load =
        |output: usize| unsafe { _mm256_loadu_si256(sums.as_ptr().add(output * stride).cast()) };
    // Shuffles work within quarters of 128 bits, so rows that belong together are put into the same quarter:
    // outputs 0..4 beside 4..8, then 8..12 beside 12..16.
    let mut a = [_mm512_setzero_si512(); 8];
    for (i, a) in a.iter_mut().enumerate() {
        let output = i / 4 * 8 + i % 4;
        let low = _mm512_castsi256_si512(load(output));
        *a = _mm512_inserti64x4::<1>(low, load(output + 4));
    }
    // Each quarter of four registers is a square matrix, whose columns become rows.
    let mut columns = [[_mm512_setzero_si512(); 4]; 2];
    for (columns, a) in columns.iter_mut().zip(a.as_chunks::<4>().0) {
        let low = [
            _mm512_unpacklo_epi32(a[0], a[1]),
            _mm512_unpacklo_epi32(a[2], a[3]),
        ];
        let high = [
            _mm512_unpackhi_epi32(a[0], a[1]),
            _mm512_unpackhi_epi32(a[2], a[3]),
        ];
        *columns = [
            _mm512_unpacklo_epi64(low[0], low[1]),
            _mm512_unpackhi_epi64(low[0], low[1]),
            _mm512_unpacklo_epi64(high[0], high[1]),
            _mm512_unpackhi_epi64(high[0], high[1]),
        ];
    }
    let mut out = [_mm512_setzero_si512(); GROUP_ROWS];
    for c in 0..4 {
        let (first, second) = (columns[0][c], columns[1][c]);
        out[c] = _mm512_shuffle_i64x2::<0x88>(first, second);
        out[4 + c] = _mm512_shuffle_i64x2::<0xdd>(first, second);
    }
    for (row, out) in out.into_iter().enumerate() {
        // SAFETY: asserted, for `row` below 8.
        unsafe { _mm512_storeu_si512(to.as_mut_ptr().add(row * to_stride).cast(), out) };
    }
}
