//! Registers of 512 bits.

use std::arch::x86_64::*;

use super::Avx512;
use crate::vector::{EXP2_F32, EXP2_F64, polynomial};

vector! {
    /// Sixteen f32.
    F32x16(__m512) of f32, 16, Avx512;
    _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_add_ps, _mm512_sub_ps, _mm512_mul_ps,
    _mm512_div_ps, _mm512_max_ps, _mm512_min_ps, _mm512_fmadd_ps, _mm512_abs_ps, select_lt_f32x16,
    _mm512_reduce_add_ps, exp2_f32x16
}

vector! {
    /// Eight f64.
    F64x8(__m512d) of f64, 8, Avx512;
    _mm512_set1_pd, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_add_pd, _mm512_sub_pd, _mm512_mul_pd,
    _mm512_div_pd, _mm512_max_pd, _mm512_min_pd, _mm512_fmadd_pd, _mm512_abs_pd, select_lt_f64x8,
    _mm512_reduce_add_pd, exp2_f64x8
}

/// Rounding to the nearest integer without raising a flag.
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;

#[inline]
#[target_feature(enable = "avx512f")]
fn select_lt_f32x16(a: __m512, b: __m512, then: __m512, otherwise: __m512) -> __m512 {
    _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(a, b), otherwise, then)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn select_lt_f64x8(a: __m512d, b: __m512d, then: __m512d, otherwise: __m512d) -> __m512d {
    _mm512_mask_blend_pd(_mm512_cmp_pd_mask::<_CMP_LT_OQ>(a, b), otherwise, then)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn exp2_f32x16(x: F32x16) -> F32x16 {
    let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x.0, _mm512_set1_ps(-126.0));
    let whole = _mm512_roundscale_ps::<NEAREST>(x.0);
    let fraction = F32x16(_mm512_sub_ps(x.0, whole));
    let power = polynomial(Avx512(()), fraction, &EXP2_F32);
    F32x16(_mm512_maskz_scalef_ps(normal, power.0, whole))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn exp2_f64x8(x: F64x8) -> F64x8 {
    let normal = _mm512_cmp_pd_mask::<_CMP_NLT_UQ>(x.0, _mm512_set1_pd(-1022.0));
    let whole = _mm512_roundscale_pd::<NEAREST>(x.0);
    let fraction = F64x8(_mm512_sub_pd(x.0, whole));
    let power = polynomial(Avx512(()), fraction, &EXP2_F64);
    F64x8(_mm512_maskz_scalef_pd(normal, power.0, whole))
}
