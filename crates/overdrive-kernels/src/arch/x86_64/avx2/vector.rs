//! Registers of 256 bits.

use std::arch::x86_64::*;

use super::Avx2;
use crate::vector::{EXP2_F32, EXP2_F64, polynomial};

vector! {
    /// Eight f32.
    F32x8(__m256) of f32, 8, Avx2;
    _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps, _mm256_sub_ps, _mm256_mul_ps,
    _mm256_div_ps, _mm256_max_ps, _mm256_min_ps, _mm256_fmadd_ps, abs_f32x8, select_lt_f32x8, sum_f32x8,
    exp2_f32x8
}

vector! {
    /// Four f64.
    F64x4(__m256d) of f64, 4, Avx2;
    _mm256_set1_pd, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_add_pd, _mm256_sub_pd, _mm256_mul_pd,
    _mm256_div_pd, _mm256_max_pd, _mm256_min_pd, _mm256_fmadd_pd, abs_f64x4, select_lt_f64x4, sum_f64x4,
    exp2_f64x4
}

/// `1.5 · 2^23`: adding it rounds to an integer and leaves that in the low bits.
const MAGIC_F32: f32 = 12_582_912.0;
/// `1.5 · 2^52`.
const MAGIC_F64: f64 = 6_755_399_441_055_744.0;

#[inline]
#[target_feature(enable = "avx2")]
fn abs_f32x8(x: __m256) -> __m256 {
    _mm256_andnot_ps(_mm256_set1_ps(-0.0), x)
}

#[inline]
#[target_feature(enable = "avx2")]
fn abs_f64x4(x: __m256d) -> __m256d {
    _mm256_andnot_pd(_mm256_set1_pd(-0.0), x)
}

#[inline]
#[target_feature(enable = "avx2")]
fn select_lt_f32x8(a: __m256, b: __m256, then: __m256, otherwise: __m256) -> __m256 {
    _mm256_blendv_ps(otherwise, then, _mm256_cmp_ps::<_CMP_LT_OQ>(a, b))
}

#[inline]
#[target_feature(enable = "avx2")]
fn select_lt_f64x4(a: __m256d, b: __m256d, then: __m256d, otherwise: __m256d) -> __m256d {
    _mm256_blendv_pd(otherwise, then, _mm256_cmp_pd::<_CMP_LT_OQ>(a, b))
}

#[inline]
#[target_feature(enable = "avx2")]
fn sum_f32x8(x: __m256) -> f32 {
    let four = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps::<1>(x));
    let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
}

#[inline]
#[target_feature(enable = "avx2")]
fn sum_f64x4(x: __m256d) -> f64 {
    let two = _mm_add_pd(_mm256_castpd256_pd128(x), _mm256_extractf128_pd::<1>(x));
    _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn exp2_f32x8(x: F32x8) -> F32x8 {
    let normal = _mm256_cmp_ps::<_CMP_NLT_UQ>(x.0, _mm256_set1_ps(-126.0));
    let magic = _mm256_set1_ps(MAGIC_F32);
    let shifted = _mm256_add_ps(x.0, magic);
    let fraction = _mm256_sub_ps(x.0, _mm256_sub_ps(shifted, magic));
    let power = polynomial(Avx2(()), F32x8(fraction), &EXP2_F32).0;
    let exponent = _mm256_slli_epi32::<23>(_mm256_castps_si256(shifted));
    let scaled = _mm256_add_epi32(_mm256_castps_si256(power), exponent);
    // A NaN of `x` comes back from the polynomial; adding to its exponent could make it a number.
    let nan = _mm256_cmp_ps::<_CMP_UNORD_Q>(x.0, x.0);
    let scaled = _mm256_or_ps(_mm256_castsi256_ps(scaled), nan);
    F32x8(_mm256_and_ps(scaled, normal))
}

#[inline]
#[target_feature(enable = "avx2,fma")]
fn exp2_f64x4(x: F64x4) -> F64x4 {
    let normal = _mm256_cmp_pd::<_CMP_NLT_UQ>(x.0, _mm256_set1_pd(-1022.0));
    let magic = _mm256_set1_pd(MAGIC_F64);
    let shifted = _mm256_add_pd(x.0, magic);
    let fraction = _mm256_sub_pd(x.0, _mm256_sub_pd(shifted, magic));
    let power = polynomial(Avx2(()), F64x4(fraction), &EXP2_F64).0;
    let exponent = _mm256_slli_epi64::<52>(_mm256_castpd_si256(shifted));
    let scaled = _mm256_add_epi64(_mm256_castpd_si256(power), exponent);
    let nan = _mm256_cmp_pd::<_CMP_UNORD_Q>(x.0, x.0);
    let scaled = _mm256_or_pd(_mm256_castsi256_pd(scaled), nan);
    F64x4(_mm256_and_pd(scaled, normal))
}
