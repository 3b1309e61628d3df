//! Vectors of 16 floats in two registers.

use std::arch::x86_64::*;

use half::{bf16, f16};

use super::Avx2;
use super::vector::{F32x8, F64x4};
use crate::vector::Double;
use crate::{Floats, LANES, Vector};

impl Floats for Avx2 {
    type F = Double<F32x8>;
    type F32 = F32x8;
    type F64 = F64x4;

    #[inline(always)]
    fn load_bf16(self, from: &[bf16; LANES]) -> Self::F {
        intrinsics!({
            // A bf16 is the upper half of the f32.
            let from: *const __m128i = from.as_ptr().cast();
            let low = _mm256_cvtepu16_epi32(_mm_loadu_si128(from));
            let high = _mm256_cvtepu16_epi32(_mm_loadu_si128(from.add(1)));
            Double(
                F32x8(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(low))),
                F32x8(_mm256_castsi256_ps(_mm256_slli_epi32::<16>(high))),
            )
        })
    }

    #[inline(always)]
    fn store_bf16(self, x: Self::F, to: &mut [bf16; LANES]) {
        intrinsics!({
            // Packing works within halves of 128 bits; the permutation puts them in order.
            let packed = _mm256_packus_epi32(bf16_bits(x.0.0), bf16_bits(x.1.0));
            let packed = _mm256_permute4x64_epi64::<0b11_01_10_00>(packed);
            _mm256_storeu_si256(to.as_mut_ptr().cast(), packed);
        })
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> Self::F {
        intrinsics!({
            let from: *const __m128i = from.as_ptr().cast();
            Double(
                F32x8(_mm256_cvtph_ps(_mm_loadu_si128(from))),
                F32x8(_mm256_cvtph_ps(_mm_loadu_si128(from.add(1)))),
            )
        })
    }

    #[inline(always)]
    fn store_f16(self, x: Self::F, to: &mut [f16; LANES]) {
        intrinsics!({
            let to: *mut __m128i = to.as_mut_ptr().cast();
            let low = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.0.0);
            let high = _mm256_cvtps_ph::<_MM_FROUND_TO_NEAREST_INT>(x.1.0);
            _mm_storeu_si128(to, low);
            _mm_storeu_si128(to.add(1), high);
        })
    }

    #[inline(always)]
    fn load_i8(self, from: &[i8; LANES]) -> Self::F {
        intrinsics!({
            let codes = _mm_loadu_si128(from.as_ptr().cast());
            let high = _mm_unpackhi_epi64(codes, codes);
            Double(
                F32x8(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(codes))),
                F32x8(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(high))),
            )
        })
    }

    #[inline(always)]
    fn load_e4m3(self, from: &[u8; LANES]) -> Self::F {
        intrinsics!({
            let codes = _mm_loadu_si128(from.as_ptr().cast());
            let halves = e4m3_as_f16(codes);
            Double(
                F32x8(_mm256_cvtph_ps(_mm256_castsi256_si128(halves))),
                F32x8(_mm256_cvtph_ps(_mm256_extracti128_si256::<1>(halves))),
            )
        })
    }

    #[inline(always)]
    fn round(self, x: Self::F) -> Self::F {
        intrinsics!(Double(F32x8(round(x.0.0)), F32x8(round(x.1.0))))
    }

    #[inline(always)]
    fn scale(self, x: Self::F, n: Self::F) -> Self::F {
        intrinsics!(Double(
            F32x8(scale(x.0.0, n.0.0)),
            F32x8(scale(x.1.0, n.1.0))
        ))
    }

    #[inline(always)]
    fn swap_pairs(self, x: Self::F) -> Self::F {
        intrinsics!(Double(
            F32x8(_mm256_permute_ps::<0b10_11_00_01>(x.0.0)),
            F32x8(_mm256_permute_ps::<0b10_11_00_01>(x.1.0))
        ))
    }

    #[inline(always)]
    fn reduce_max(self, x: Self::F) -> f32 {
        let eight = x.0.max(x.1).0;
        intrinsics!({
            let four = _mm_max_ps(
                _mm256_castps256_ps128(eight),
                _mm256_extractf128_ps::<1>(eight),
            );
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        })
    }

    #[inline(always)]
    fn reduce_add_each(self, x: [Self::F; 4]) -> [f32; 4] {
        let [a, b, c, d] = x;
        let sums = [
            a.0.add(a.1).0,
            b.0.add(b.1).0,
            c.0.add(c.1).0,
            d.0.add(d.1).0,
        ];
        intrinsics!(reduce_each(sums))
    }

    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        // A prefetch of an address that is not mapped does nothing.
        intrinsics!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }

    #[inline(always)]
    fn prefetch_near(self, address: *const u8) {
        intrinsics!(_mm_prefetch::<_MM_HINT_T1>(address.cast()));
    }
}

/// Returns the upper 16 bits of each lane, rounded to nearest, in lanes of 32 bits.
#[inline]
#[target_feature(enable = "avx2")]
fn bf16_bits(x: __m256) -> __m256i {
    let bits = _mm256_castps_si256(x);
    // Half of the dropped bits, less one if the last bit that stays is even: ties go to even.
    let odd = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
    let half = _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff));
    let rounded = _mm256_srli_epi32::<16>(_mm256_add_epi32(bits, half));
    let nan = _mm256_castps_si256(_mm256_cmp_ps::<_CMP_UNORD_Q>(x, x));
    _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan)
}

/// Returns e4m3 divided by 256 as f16: the two formats differ in the bias of the exponent, and the conversion to
/// f32 is exact for the smallest of f16, too.
#[inline]
#[target_feature(enable = "avx2")]
pub(in super::super) fn e4m3_as_f16(codes: __m128i) -> __m256i {
    let wide = _mm256_cvtepi8_epi16(codes);
    let magnitude = _mm256_and_si256(_mm256_slli_epi16::<7>(wide), _mm256_set1_epi16(0x3f80));
    let sign = _mm256_and_si256(wide, _mm256_set1_epi16(i16::MIN));
    _mm256_or_si256(magnitude, sign)
}

#[inline]
#[target_feature(enable = "avx2")]
fn round(x: __m256) -> __m256 {
    _mm256_round_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(x)
}

/// Returns `x · 2ⁿ` by two factors, so that neither leaves the range of exponents.
#[inline]
#[target_feature(enable = "avx2")]
fn scale(x: __m256, n: __m256) -> __m256 {
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
}

/// Returns the sums of four registers: three additions of neighbours, and one of halves.
#[inline]
#[target_feature(enable = "avx2")]
pub(in super::super) fn reduce_each(x: [__m256; 4]) -> [f32; 4] {
    // `vhaddps` adds neighbours of two registers, so three of them join four sums.
    let ab = _mm256_hadd_ps(x[0], x[1]);
    let cd = _mm256_hadd_ps(x[2], x[3]);
    let abcd = _mm256_hadd_ps(ab, cd);
    let sums = _mm_add_ps(
        _mm256_castps256_ps128(abcd),
        _mm256_extractf128_ps::<1>(abcd),
    );
    let mut out = [0.0; 4];
    // SAFETY: the store fills the array.
    unsafe { _mm_storeu_ps(out.as_mut_ptr(), sums) };
    out
}
