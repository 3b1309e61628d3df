//! Dot products of bytes by `vpmaddubsw`.

use std::arch::x86_64::*;

use super::Avx2;
use crate::{BYTES, Int8};

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
