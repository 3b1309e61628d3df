//! AVX-512: one register a vector.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::avx2::reduce_each;
use super::{Kernel, LANES, Simd};

/// A proof that the machine has AVX-512 F, BW, DQ and VL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(super) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma");
        has.then_some(Self(()))
    }

    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
        fn compiled<K: Kernel>(simd: Avx512, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` exists only where `detect` found these features.
        unsafe { compiled(self, kernel) }
    }
}

/// Calls an intrinsic.
macro_rules! avx512 {
    ($call:expr) => {
        // SAFETY: a value of `Avx512` proves that the machine has the instruction; loads and stores
        // go through references to arrays of exactly the size that they access.
        unsafe { $call }
    };
}

impl Simd for Avx512 {
    type F = __m512;

    const TILE: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        avx512!(_mm512_set1_ps(x))
    }

    #[inline(always)]
    fn load_f32(self, from: &[f32; LANES]) -> __m512 {
        avx512!(_mm512_loadu_ps(from.as_ptr()))
    }

    #[inline(always)]
    fn store_f32(self, x: __m512, to: &mut [f32; LANES]) {
        avx512!(_mm512_storeu_ps(to.as_mut_ptr(), x))
    }

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> __m512 {
        avx512!({
            let bits = _mm256_loadu_si256(from.as_ptr().cast());
            _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bits)))
        })
    }

    #[inline(always)]
    fn store_bf16(self, x: __m512, to: &mut [bf16; LANES]) {
        avx512!({
            let bits = _mm512_castps_si512(x);
            let odd = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let half = _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_srli_epi32::<16>(_mm512_add_epi32(bits, half));
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(x, x);
            let rounded = _mm512_mask_mov_epi32(rounded, nan, _mm512_set1_epi32(0x7fc0));
            _mm256_storeu_si256(to.as_mut_ptr().cast(), _mm512_cvtepi32_epi16(rounded));
        })
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> __m512 {
        avx512!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn store_f16(self, x: __m512, to: &mut [f16; LANES]) {
        avx512!({
            let bits = _mm512_cvtps_ph::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), bits);
        })
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        avx512!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_min_ps(a, b))
    }

    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_max_ps(a, b))
    }

    #[inline(always)]
    fn select_lt(self, a: __m512, b: __m512, then: __m512, otherwise: __m512) -> __m512 {
        avx512!(_mm512_mask_blend_ps(
            _mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b),
            otherwise,
            then
        ))
    }

    #[inline(always)]
    fn abs(self, x: __m512) -> __m512 {
        avx512!(_mm512_abs_ps(x))
    }

    #[inline(always)]
    fn round(self, x: __m512) -> __m512 {
        avx512!(_mm512_roundscale_ps::<
            { _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC },
        >(x))
    }

    #[inline(always)]
    fn scale(self, x: __m512, n: __m512) -> __m512 {
        avx512!(_mm512_scalef_ps(x, n))
    }

    #[inline(always)]
    fn swap_pairs(self, x: __m512) -> __m512 {
        avx512!(_mm512_permute_ps::<0b10_11_00_01>(x))
    }

    #[inline(always)]
    fn reduce_add(self, x: __m512) -> f32 {
        avx512!(_mm512_reduce_add_ps(x))
    }

    #[inline(always)]
    fn reduce_max(self, x: __m512) -> f32 {
        avx512!(_mm512_reduce_max_ps(x))
    }

    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        avx512!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }

    #[inline(always)]
    fn reduce_add_each(self, x: [__m512; 4]) -> [f32; 4] {
        let mut halves = [avx512!(_mm256_setzero_ps()); 4];
        for (half, x) in halves.iter_mut().zip(x) {
            *half = avx512!(_mm256_add_ps(
                _mm512_castps512_ps256(x),
                _mm512_extractf32x8_ps::<1>(x)
            ));
        }
        avx512!(reduce_each(halves))
    }
}
