//! AVX2 with FMA and F16C: two registers a vector.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::{Kernel, LANES, Simd};

/// A proof that the machine has AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }

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
        // stay within the two halves of references to arrays of 16.
        unsafe { $call }
    };
}

/// Calls an intrinsic on both halves.
macro_rules! both {
    ($f:ident($($x:ident),*)) => {
        avx2!([$f($($x[0]),*), $f($($x[1]),*)])
    };
}

/// The upper 16 bits of each lane, rounded to nearest; lanes of 32 bits.
#[inline(always)]
fn bf16_bits(x: __m256) -> __m256i {
    avx2!({
        let bits = _mm256_castps_si256(x);
        let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
        let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
        let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
        let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
        _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan)
    })
}

/// `x · 2ⁿ` by two factors, so that neither leaves the range of exponents.
#[inline(always)]
fn scale(x: __m256, n: __m256) -> __m256 {
    avx2!({
        let n = _mm256_cvtps_epi32(n);
        let first = _mm256_srai_epi32::<1>(n);
        let second = _mm256_sub_epi32(n, first);
        let bias = _mm256_set1_epi32(127);
        let first = _mm256_slli_epi32::<23>(_mm256_add_epi32(first, bias));
        let second = _mm256_slli_epi32::<23>(_mm256_add_epi32(second, bias));
        _mm256_mul_ps(
            _mm256_mul_ps(x, _mm256_castsi256_ps(first)),
            _mm256_castsi256_ps(second),
        )
    })
}

impl Simd for Avx2 {
    type F = [__m256; 2];

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
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F {
        avx2!({
            let from: *const __m128i = from.as_ptr().cast();
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(1)));
            [
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(low)),
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(high)),
            ]
        })
    }

    #[inline(always)]
    fn store_bf16(self, x: Self::F, to: &mut [bf16; LANES]) {
        let (low, high) = (bf16_bits(x[0]), bf16_bits(x[1]));
        avx2!({
            // Packing works within halves of 128 bits; the permutation puts them in order.
            let packed = _mm256_packus_epi32(low, high);
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), packed);
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
    fn store_f16(self, x: Self::F, to: &mut [f16; LANES]) {
        avx2!({
            let to: *mut __m128i = to.as_mut_ptr().cast();
            _mm_storeu_si128(to, _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[0]));
            _mm_storeu_si128(
                to.add(1),
                _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x[1]),
            );
        })
    }

    #[inline(always)]
    fn add(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_add_ps(a, b))
    }

    #[inline(always)]
    fn sub(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_sub_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_mul_ps(a, b))
    }

    #[inline(always)]
    fn div(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_div_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: Self::F, b: Self::F, c: Self::F) -> Self::F {
        both!(_mm256_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn min(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_min_ps(a, b))
    }

    #[inline(always)]
    fn max(self, a: Self::F, b: Self::F) -> Self::F {
        both!(_mm256_max_ps(a, b))
    }

    #[inline(always)]
    fn select_lt(self, a: Self::F, b: Self::F, then: Self::F, otherwise: Self::F) -> Self::F {
        avx2!([
            _mm256_blendv_ps(
                otherwise[0],
                then[0],
                _mm256_cmp_ps::<_CMP_LT_OQ>(a[0], b[0])
            ),
            _mm256_blendv_ps(
                otherwise[1],
                then[1],
                _mm256_cmp_ps::<_CMP_LT_OQ>(a[1], b[1])
            ),
        ])
    }

    #[inline(always)]
    fn abs(self, x: Self::F) -> Self::F {
        let sign = self.splat(-0.0);
        both!(_mm256_andnot_ps(sign, x))
    }

    #[inline(always)]
    fn round(self, x: Self::F) -> Self::F {
        avx2!([
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x[0]),
            _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x[1])
        ])
    }

    #[inline(always)]
    fn scale(self, x: Self::F, n: Self::F) -> Self::F {
        [scale(x[0], n[0]), scale(x[1], n[1])]
    }

    #[inline(always)]
    fn swap_pairs(self, x: Self::F) -> Self::F {
        avx2!([
            _mm256_permute_ps::<0b10_11_00_01>(x[0]),
            _mm256_permute_ps::<0b10_11_00_01>(x[1])
        ])
    }

    #[inline(always)]
    fn reduce_add(self, x: Self::F) -> f32 {
        avx2!({
            let eight = _mm256_add_ps(x[0], x[1]);
            let four = _mm_add_ps(
                _mm256_castps256_ps128(eight),
                _mm256_extractf128_ps::<1>(eight),
            );
            let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn reduce_max(self, x: Self::F) -> f32 {
        avx2!({
            let eight = _mm256_max_ps(x[0], x[1]);
            let four = _mm_max_ps(
                _mm256_castps256_ps128(eight),
                _mm256_extractf128_ps::<1>(eight),
            );
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        avx2!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }

    #[inline(always)]
    fn reduce_add_each(self, x: [Self::F; 4]) -> [f32; 4] {
        let [a, b, c, d] = x;
        avx2!(reduce_each([
            _mm256_add_ps(a[0], a[1]),
            _mm256_add_ps(b[0], b[1]),
            _mm256_add_ps(c[0], c[1]),
            _mm256_add_ps(d[0], d[1]),
        ]))
    }
}

/// The sums of four registers: three additions of neighbours, and one of halves.
///
/// # Safety
/// The machine has AVX.
#[inline(always)]
pub(super) unsafe fn reduce_each(x: [__m256; 4]) -> [f32; 4] {
    // SAFETY: the caller's promise; the store fills the array.
    unsafe {
        let ab = _mm256_hadd_ps(x[0], x[1]);
        let cd = _mm256_hadd_ps(x[2], x[3]);
        let abcd = _mm256_hadd_ps(ab, cd);
        let sums = _mm_add_ps(
            _mm256_castps256_ps128(abcd),
            _mm256_extractf128_ps::<1>(abcd),
        );
        let mut out = [0.0; 4];
        _mm_storeu_ps(out.as_mut_ptr(), sums);
        out
    }
}
