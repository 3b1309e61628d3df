//! AVX2 with FMA and F16C: two registers a vector.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use half::f16;

use super::{BYTES, Kernel, LANES, Simd};

/// A proof that the machine has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(crate) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx2,fma,f16c")]
        fn compiled<K: Kernel>(simd: Avx2, kernel: K) -> K::Output {
            kernel.run(simd)
        }
        // SAFETY: `self` exists only where `detect` found these features.
        unsafe { compiled(self, kernel) }
    }
}

/// Calls an intrinsic.
macro_rules! avx2 {
    ($call:expr) => {
        // SAFETY: a value of `Avx2` proves that the machine has the instruction; loads and stores
        // stay within the two halves of references to arrays of 16 floats or 64 bytes.
        unsafe { $call }
    };
}

/// Calls an intrinsic on both halves.
macro_rules! both {
    ($f:ident($($x:ident),*)) => {
        avx2!([$f($($x[0]),*), $f($($x[1]),*)])
    };
}

impl Simd for Avx2 {
    type F = [__m256; 2];
    type W = [__m256i; 2];
    type X = [__m256i; 2];
    type A = __m256i;

    #[inline(always)]
    fn splat(self, x: f32) -> Self::F {
        avx2!([_mm256_set1_ps(x); 2])
    }

    #[inline(always)]
    fn load_f32(self, from: &[f32; LANES]) -> Self::F {
        avx2!([
            _mm256_loadu_ps(from.as_ptr()),
            _mm256_loadu_ps(from.as_ptr().add(8))
        ])
    }

    #[inline(always)]
    fn store_f32(self, x: Self::F, to: &mut [f32; LANES]) {
        avx2!({
            _mm256_storeu_ps(to.as_mut_ptr(), x[0]);
            _mm256_storeu_ps(to.as_mut_ptr().add(8), x[1]);
        })
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F {
        avx2!({
            let codes = _mm_loadu_si128(from.as_ptr().cast());
            [
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes)),
                _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64(codes, codes))),
            ]
        })
    }

    #[inline(always)]
    fn load_e4m3(self, from: &[u8; LANES]) -> Self::F {
        avx2!({
            let codes = _mm_loadu_si128(from.as_ptr().cast());
            // As in AVX-512: f16 with another bias.
            let wide = _mm256_cvtepi8_epi16(codes);
            let magnitude =
                _mm256_and_si256(_mm256_slli_epi16::<7>(wide), _mm256_set1_epi16(0x3f80));
            let sign = _mm256_and_si256(wide, _mm256_set1_epi16(i16::MIN));
            let halves = _mm256_or_si256(magnitude, sign);
            [
                _mm256_cvtph_ps(_mm256_castsi256_si128(halves)),
                _mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves)),
            ]
        })
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        avx2!({
            let from: *const __m128i = from.as_ptr().cast();
            [
                _mm256_cvtph_ps(_mm_loadu_si128(from)),
                _mm256_cvtph_ps(_mm_loadu_si128(from.add(1))),
            ]
        })
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn reduce_add(self, x: Self::F) -> f32 {
        avx2!({
            let sum = _mm256_add_ps(x[0], x[1]);
            let sum = _mm_add_ps(_mm256_castps256_ps128(sum), _mm256_extractf128_ps::<1>(sum));
            let sum = _mm_add_ps(sum, _mm_movehl_ps(sum, sum));
            let sum = _mm_add_ss(sum, _mm_shuffle_ps::<1>(sum, sum));
            _mm_cvtss_f32(sum)
        })
    }

    #[inline(always)]
    fn zero(self) -> __m256i {
        avx2!(_mm256_setzero_si256())
    }

    #[inline(always)]
    fn load_codes(self, from: &[i8; BYTES]) -> Self::W {
        avx2!([
            _mm256_loadu_si256(from.as_ptr().cast()),
            _mm256_loadu_si256(from.as_ptr().add(32).cast())
        ])
    }

    #[inline(always)]
    fn load_activations(self, from: &[i8; BYTES]) -> Self::X {
        self.load_codes(from)
    }

    /// `vpmaddubsw` saturates at 16 bits, so its unsigned factor is the weight without its sign, at most
    /// 128, and the sign goes to the activation: two products are at most 2 · 128 · 127 < 2¹⁵.
    #[inline(always)]
    fn dot(self, sums: __m256i, w: Self::W, x: Self::X) -> __m256i {
        avx2!({
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
        avx2!(_mm256_add_epi32(a, b))
    }

    #[inline(always)]
    fn total(self, sums: __m256i) -> i32 {
        avx2!({
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
        avx2!(total_each(sums))
    }

    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        avx2!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }

    #[inline(always)]
    fn prefetch_near(self, address: *const u8) {
        avx2!(_mm_prefetch::<_MM_HINT_T1>(address.cast()));
    }
}

/// The totals of four registers.
///
/// # Safety
/// The machine has AVX2.
#[inline(always)]
pub(super) unsafe fn total_each(sums: [__m256i; 4]) -> [i32; 4] {
    // SAFETY: the caller's promise; the store is of the array's size.
    unsafe {
        let ab = _mm256_hadd_epi32(sums[0], sums[1]);
        let cd = _mm256_hadd_epi32(sums[2], sums[3]);
        let all = _mm256_hadd_epi32(ab, cd);
        let totals = _mm_add_epi32(
            _mm256_castsi256_si128(all),
            _mm256_extracti128_si256::<1>(all),
        );
        let mut out = [0; 4];
        _mm_storeu_si128(out.as_mut_ptr().cast(), totals);
        out
    }
}
