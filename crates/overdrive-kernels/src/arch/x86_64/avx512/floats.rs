//! Vectors of 16 floats in one register.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::super::avx2::{e4m3_as_f16, reduce_each};
use super::Avx512;
use super::vector::{F32x16, F64x8};
use crate::{Floats, LANES};

impl Floats for Avx512 {
    type F = F32x16;
    type F32 = F32x16;
    type F64 = F64x8;

    const TILE: usize = 4;

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> F32x16 {
        intrinsics!({
            let bits = _mm512_cvtepu16_epi32(_mm256_loadu_si256(from.as_ptr().cast()));
            F32x16(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(bits)))
        })
    }

    #[inline(always)]
    fn store_bf16(self, x: F32x16, to: &mut [bf16; LANES]) {
        intrinsics!({
            // By hand, because `vcvtneps2bf16` takes denormals for zero and came with AVX-512-BF16 only.
            let bits = _mm512_castps_si512(x.0);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x.0, x.0);
            let rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(rounded));
        })
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> F32x16 {
        F32x16(intrinsics!(_mm512_cvtph_ps(_mm256_loadu_si256(
            from.as_ptr().cast()
        ))))
    }

    #[inline(always)]
    fn store_f16(self, x: F32x16, to: &mut [f16; LANES]) {
        intrinsics!({
            let bits = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x.0);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), bits);
        })
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> F32x16 {
        intrinsics!({
            let codes = _mm_loadu_si128(from.as_ptr().cast());
            F32x16(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes)))
        })
    }

    #[inline(always)]
    fn load_e4m3(self, from: &[u8; LANES]) -> F32x16 {
        intrinsics!({
            let codes = _mm_loadu_si128(from.as_ptr().cast());
            F32x16(_mm512_cvtph_ps(e4m3_as_f16(codes)))
        })
    }

    #[inline(always)]
    fn round(self, x: F32x16) -> F32x16 {
        F32x16(intrinsics!(_mm512_roundscale_ps::<
            { _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC },
        >(x.0)))
    }

    #[inline(always)]
    fn scale(self, x: F32x16, n: F32x16) -> F32x16 {
        F32x16(intrinsics!(_mm512_scalef_ps(x.0, n.0)))
    }

    #[inline(always)]
    fn swap_pairs(self, x: F32x16) -> F32x16 {
        F32x16(intrinsics!(_mm512_permute_ps::<0b10_11_00_01>(x.0)))
    }

    #[inline(always)]
    fn reduce_max(self, x: F32x16) -> f32 {
        intrinsics!(_mm512_reduce_max_ps(x.0))
    }

    #[inline(always)]
    fn reduce_add_each(self, x: [F32x16; 4]) -> [f32; 4] {
        let [a, b, c, d] = x;
        intrinsics!(reduce_each([fold(a.0), fold(b.0), fold(c.0), fold(d.0)]))
    }

    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        intrinsics!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }

    #[inline(always)]
    fn prefetch_near(self, address: *const u8) {
        intrinsics!(_mm_prefetch::<_MM_HINT_T1>(address.cast()));
    }
}

/// Returns the sum of both halves.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn fold(x: __m512) -> __m256 {
    _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x))
}
