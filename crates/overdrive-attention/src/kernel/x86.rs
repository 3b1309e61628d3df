//! Vectors of AVX-512 and of AVX2 with FMA.
//!
//! The types are made only where their instruction set was detected (see [`Lanes`]), which is the
//! reason why every intrinsic here may be called.

use std::arch::x86_64::*;

use super::lanes::{EXP2_F32, EXP2_F64, Lanes, polynomial};

macro_rules! lanes {
    (
        $(#[$doc:meta])* $name:ident, $scalar:ty, $vector:ty, $len:expr, $wide:expr,
        $set1:ident, $loadu:ident, $storeu:ident, $add:ident, $sub:ident, $mul:ident, $div:ident,
        $max:ident, $min:ident, $fmadd:ident, abs: $abs:expr, le: $le:expr, sum: $sum:expr,
        exp2: $exp2:expr
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy)]
        pub(crate) struct $name($vector);

        impl Lanes for $name {
            type Scalar = $scalar;
            const LEN: usize = $len;
            const WIDE: usize = $wide;

            #[inline(always)]
            unsafe fn splat(value: $scalar) -> Self {
                // SAFETY: the caller vouches for the instruction set.
                $name(unsafe { $set1(value) })
            }
            #[inline(always)]
            unsafe fn load(from: *const $scalar) -> Self {
                // SAFETY: the caller vouches for the instruction set and the memory.
                $name(unsafe { $loadu(from) })
            }
            #[inline(always)]
            unsafe fn store(self, to: *mut $scalar) {
                // SAFETY: the caller vouches for the memory, `self` proves the instruction set.
                unsafe { $storeu(to, self.0) }
            }
            #[inline(always)]
            fn add(self, other: Self) -> Self {
                // SAFETY: `self` proves the instruction set.
                $name(unsafe { $add(self.0, other.0) })
            }
            #[inline(always)]
            fn sub(self, other: Self) -> Self {
                // SAFETY: as in `add`.
                $name(unsafe { $sub(self.0, other.0) })
            }
            #[inline(always)]
            fn mul(self, other: Self) -> Self {
                // SAFETY: as in `add`.
                $name(unsafe { $mul(self.0, other.0) })
            }
            #[inline(always)]
            fn div(self, other: Self) -> Self {
                // SAFETY: as in `add`.
                $name(unsafe { $div(self.0, other.0) })
            }
            #[inline(always)]
            fn abs(self) -> Self {
                // SAFETY: as in `add`.
                $name(unsafe { $abs(self.0) })
            }
            #[inline(always)]
            fn max(self, other: Self) -> Self {
                // SAFETY: as in `add`.
                $name(unsafe { $max(self.0, other.0) })
            }
            #[inline(always)]
            fn min(self, other: Self) -> Self {
                // SAFETY: as in `add`.
                $name(unsafe { $min(self.0, other.0) })
            }
            #[inline(always)]
            fn mul_add(self, by: Self, plus: Self) -> Self {
                // SAFETY: as in `add`.
                $name(unsafe { $fmadd(self.0, by.0, plus.0) })
            }
            #[inline(always)]
            fn where_le(self, other: Self, yes: Self, no: Self) -> Self {
                // SAFETY: as in `add`.
                $name(unsafe { $le(self.0, other.0, yes.0, no.0) })
            }
            #[inline(always)]
            fn sum(self) -> $scalar {
                // SAFETY: as in `add`.
                unsafe { $sum(self.0) }
            }
            #[inline(always)]
            fn exp2(self) -> Self {
                // SAFETY: as in `add`.
                unsafe { $exp2(self) }
            }
        }
    };
}

lanes! {
    /// Sixteen f32 in a 512-bit register.
    F32x16, f32, __m512, 16, 4,
    _mm512_set1_ps, _mm512_loadu_ps, _mm512_storeu_ps, _mm512_add_ps, _mm512_sub_ps, _mm512_mul_ps,
    _mm512_div_ps, _mm512_max_ps, _mm512_min_ps, _mm512_fmadd_ps,
    abs: _mm512_abs_ps,
    le: le_f32x16, sum: _mm512_reduce_add_ps, exp2: exp2_f32x16
}

lanes! {
    /// Eight f64 in a 512-bit register.
    F64x8, f64, __m512d, 8, 4,
    _mm512_set1_pd, _mm512_loadu_pd, _mm512_storeu_pd, _mm512_add_pd, _mm512_sub_pd, _mm512_mul_pd,
    _mm512_div_pd, _mm512_max_pd, _mm512_min_pd, _mm512_fmadd_pd,
    abs: _mm512_abs_pd,
    le: le_f64x8, sum: _mm512_reduce_add_pd, exp2: exp2_f64x8
}

lanes! {
    /// Eight f32 in a 256-bit register.
    F32x8, f32, __m256, 8, 2,
    _mm256_set1_ps, _mm256_loadu_ps, _mm256_storeu_ps, _mm256_add_ps, _mm256_sub_ps, _mm256_mul_ps,
    _mm256_div_ps, _mm256_max_ps, _mm256_min_ps, _mm256_fmadd_ps,
    abs: abs_f32x8, le: le_f32x8, sum: sum_f32x8, exp2: exp2_f32x8
}

lanes! {
    /// Four f64 in a 256-bit register.
    F64x4, f64, __m256d, 4, 2,
    _mm256_set1_pd, _mm256_loadu_pd, _mm256_storeu_pd, _mm256_add_pd, _mm256_sub_pd, _mm256_mul_pd,
    _mm256_div_pd, _mm256_max_pd, _mm256_min_pd, _mm256_fmadd_pd,
    abs: abs_f64x4, le: le_f64x4, sum: sum_f64x4, exp2: exp2_f64x4
}

/// Rounding to the nearest integer without raising a flag.
const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
/// `1.5 · 2^23`: adding it rounds to an integer and leaves that in the low bits.
const MAGIC_F32: f32 = 12_582_912.0;
/// `1.5 · 2^52`.
const MAGIC_F64: f64 = 6_755_399_441_055_744.0;

#[inline]
#[target_feature(enable = "avx512f")]
fn le_f32x16(a: __m512, b: __m512, yes: __m512, no: __m512) -> __m512 {
    _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LE_OQ>(a, b), no, yes)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn le_f64x8(a: __m512d, b: __m512d, yes: __m512d, no: __m512d) -> __m512d {
    _mm512_mask_blend_pd(_mm512_cmp_pd_mask::<_CMP_LE_OQ>(a, b), no, yes)
}

#[inline]
#[target_feature(enable = "avx512f")]
fn exp2_f32x16(x: F32x16) -> F32x16 {
    let normal = _mm512_cmp_ps_mask::<_CMP_NLT_UQ>(x.0, _mm512_set1_ps(-126.0));
    let whole = _mm512_roundscale_ps::<NEAREST>(x.0);
    let power = polynomial(F32x16(_mm512_sub_ps(x.0, whole)), &EXP2_F32);
    F32x16(_mm512_maskz_scalef_ps(normal, power.0, whole))
}

#[inline]
#[target_feature(enable = "avx512f")]
fn exp2_f64x8(x: F64x8) -> F64x8 {
    let normal = _mm512_cmp_pd_mask::<_CMP_NLT_UQ>(x.0, _mm512_set1_pd(-1022.0));
    let whole = _mm512_roundscale_pd::<NEAREST>(x.0);
    let power = polynomial(F64x8(_mm512_sub_pd(x.0, whole)), &EXP2_F64);
    F64x8(_mm512_maskz_scalef_pd(normal, power.0, whole))
}

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
fn le_f32x8(a: __m256, b: __m256, yes: __m256, no: __m256) -> __m256 {
    _mm256_blendv_ps(no, yes, _mm256_cmp_ps::<_CMP_LE_OQ>(a, b))
}

#[inline]
#[target_feature(enable = "avx2")]
fn le_f64x4(a: __m256d, b: __m256d, yes: __m256d, no: __m256d) -> __m256d {
    _mm256_blendv_pd(no, yes, _mm256_cmp_pd::<_CMP_LE_OQ>(a, b))
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
    let power = polynomial(F32x8(fraction), &EXP2_F32).0;
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
    let power = polynomial(F64x4(fraction), &EXP2_F64).0;
    let exponent = _mm256_slli_epi64::<52>(_mm256_castpd_si256(shifted));
    let scaled = _mm256_add_epi64(_mm256_castpd_si256(power), exponent);
    let nan = _mm256_cmp_pd::<_CMP_UNORD_Q>(x.0, x.0);
    let scaled = _mm256_or_pd(_mm256_castsi256_pd(scaled), nan);
    F64x4(_mm256_and_pd(scaled, normal))
}
