//! Dot products of bytes by `vpmaddubsw`.

use std::arch::x86_64::*;

use super::Avx2;
use crate::{BYTES, Int8, Nearest256};

impl Int8 for Avx2 {
    type W = [__m256i; 2];
    type X = [__m256i; 2];
    type A = __m256i;

    #[inline(always)]
    fn zero(self) -> __m256i {
        intrinsics!(_mm256_setzero_si256())
    }

    #[inline(always)]
    fn load_codes(self, from: &[i8; BYTES]) -> Self::W {
        intrinsics!([
            _mm256_loadu_si256(from.as_ptr().cast()),
            _mm256_loadu_si256(from.as_ptr().add(32).cast())
        ])
    }

    #[inline(always)]
    fn load_activations(self, from: &[i8; BYTES]) -> Self::X {
        self.load_codes(from)
    }

    #[inline(always)]
    fn dot(self, sums: __m256i, w: Self::W, x: Self::X) -> __m256i {
        // `vpmaddubsw` saturates at 16 bits, so its unsigned factor is the weight without its sign, at most
        // 128, and the sign goes to the activation: two products are at most 2 · 128 · 127 < 2¹⁵.
        intrinsics!({
            let ones = _mm256_set1_epi16(1);
            let low = _mm256_maddubs_epi16(_mm256_abs_epi8(w[0]), _mm256_sign_epi8(x[0], w[0]));
            let high = _mm256_maddubs_epi16(_mm256_abs_epi8(w[1]), _mm256_sign_epi8(x[1], w[1]));
            let low = _mm256_madd_epi16(low, ones);
            let high = _mm256_madd_epi16(high, ones);
            _mm256_add_epi32(sums, _mm256_add_epi32(low, high))
        })
    }

    #[inline(always)]
    fn add_sums(self, a: __m256i, b: __m256i) -> __m256i {
        intrinsics!(_mm256_add_epi32(a, b))
    }

    #[inline(always)]
    fn total(self, sums: __m256i) -> i32 {
        intrinsics!({
            let sums = _mm_add_epi32(
                _mm256_castsi256_si128(sums),
                _mm256_extracti128_si256::<1>(sums),
            );
            let sums = _mm_add_epi32(sums, _mm_shuffle_epi32::<0b01_00_11_10>(sums));
            let sums = _mm_add_epi32(sums, _mm_shuffle_epi32::<0b10_11_00_01>(sums));
            _mm_cvtsi128_si32(sums)
        })
    }

    #[inline(always)]
    fn total_each(self, sums: [__m256i; 4]) -> [i32; 4] {
        intrinsics!(total_each(sums))
    }

    #[inline(always)]
    fn nearest_256(self, table: &Nearest256, values: &[f32], factor: f32, codes: &mut [u8]) {
        intrinsics!(nearest_256(table, values, factor, codes));
    }
}

/// Finds the nearest codes of 32 values at a time, by two gathers for each eight.
#[inline]
#[target_feature(enable = "avx2")]
pub(in super::super) fn nearest_256(
    table: &Nearest256,
    values: &[f32],
    factor: f32,
    codes: &mut [u8],
) {
    let scale = _mm256_set1_ps(factor);
    let byte = _mm256_set1_epi32(0xFF);
    let eight = |values: &[f32; 8]| {
        // SAFETY: eight floats, of any alignment.
        let scaled = _mm256_mul_ps(unsafe { _mm256_loadu_ps(values.as_ptr()) }, scale);
        let half = _mm256_srli_epi32::<16>(_mm256_castps_si256(scaled));
        // SAFETY: an index has 16 bits, the table 3 bytes more than that many entries.
        let start = unsafe { _mm256_i32gather_epi32::<1>(table.start.as_ptr().cast(), half) };
        let start = _mm256_and_si256(start, byte);
        // SAFETY: an index is a byte, the table has 256 entries.
        let bound = unsafe { _mm256_i32gather_ps::<4>(table.bounds.as_ptr(), start) };
        // All ones where it is above, which is -1.
        let above = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_GT_OQ>(scaled, bound));
        _mm256_sub_epi32(start, above)
    };
    // Packing works within halves of a register: this puts the quarters back in order.
    let order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);
    let (values, values_rest) = values.as_chunks::<32>();
    let (codes, codes_rest) = codes.as_chunks_mut::<32>();
    for (values, codes) in values.iter().zip(codes) {
        let (eights, _) = values.as_chunks::<8>();
        let low = _mm256_packus_epi32(eight(&eights[0]), eight(&eights[1]));
        let high = _mm256_packus_epi32(eight(&eights[2]), eight(&eights[3]));
        let packed = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        // SAFETY: 32 bytes, of any alignment.
        unsafe { _mm256_storeu_si256(codes.as_mut_ptr().cast(), packed) };
    }
    for (code, value) in codes_rest.iter_mut().zip(values_rest) {
        *code = table.nearest(value * factor);
    }
}

/// Returns the totals of four registers.
#[inline]
#[target_feature(enable = "avx2")]
pub(in super::super) fn total_each(sums: [__m256i; 4]) -> [i32; 4] {
    let ab = _mm256_hadd_epi32(sums[0], sums[1]);
    let cd = _mm256_hadd_epi32(sums[2], sums[3]);
    let all = _mm256_hadd_epi32(ab, cd);
    let totals = _mm_add_epi32(
        _mm256_castsi256_si128(all),
        _mm256_extracti128_si256::<1>(all),
    );
    let mut out = [0; 4];
    // SAFETY: the store fills the array.
    unsafe { _mm_storeu_si128(out.as_mut_ptr().cast(), totals) };
    out
}
