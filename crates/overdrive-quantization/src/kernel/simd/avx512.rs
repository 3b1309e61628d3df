//! AVX-512 with VNNI: one register a vector.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use half::f16;

use super::{BYTES, Book256, Kernel, LANES, Simd, look_up};

/// A proof that the machine has AVX-512 F, BW, DQ, VL and VNNI.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Avx512(());

impl Avx512 {
    pub(crate) fn detect() -> Option<Self> {
        let has = is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx512vnni")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c");
        has.then_some(Self(()))
    }

    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
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
    type W = __m512i;
    type X = __m512i;
    type A = __m512i;

    const TILE: usize = 4;
    /// The first factor of `vpdpbusd` is unsigned: codes of weights are, shifted by 128.
    const OFFSET: i32 = 128;

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
    fn load_i8(self, from: &[i8; LANES]) -> __m512 {
        avx512!({
            let codes = _mm_loadu_si128(from.as_ptr().cast());
            _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(codes))
        })
    }

    #[inline(always)]
    fn load_e4m3(self, from: &[u8; LANES]) -> __m512 {
        avx512!({
            let codes = _mm_loadu_si128(from.as_ptr().cast());
            // As f16 these are the sign, the exponent and the fraction of the number, but for the bias of
            // the exponent; that conversion is exact for the smallest, too.
            let wide = _mm256_cvtepi8_epi16(codes);
            let magnitude =
                _mm256_and_si256(_mm256_slli_epi16::<7>(wide), _mm256_set1_epi16(0x3f80));
            let sign = _mm256_and_si256(wide, _mm256_set1_epi16(i16::MIN));
            _mm512_cvtph_ps(_mm256_or_si256(magnitude, sign))
        })
    }

    #[inline(always)]
    fn look_up_256(self, book: &Book256, codes: &[u8], bits: &mut [u32]) {
        if is_x86_feature_detected!("avx512vbmi") {
            // SAFETY: just asked, and a value of `Avx512` proves the others.
            unsafe { look_up_256(book, codes, bits) }
        } else {
            look_up(&book.numbers, codes, bits);
        }
    }

    #[inline(always)]
    fn load_f16(self, from: &[f16; LANES]) -> __m512 {
        avx512!(_mm512_cvtph_ps(_mm256_loadu_si256(from.as_ptr().cast())))
    }

    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_add_ps(a, b))
    }

    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_mul_ps(a, b))
    }

    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        avx512!(_mm512_fmadd_ps(a, b, c))
    }

    #[inline(always)]
    fn reduce_add(self, x: __m512) -> f32 {
        avx512!(_mm512_reduce_add_ps(x))
    }

    #[inline(always)]
    fn reduce_add_each(self, x: [__m512; 4]) -> [f32; 4] {
        avx512!({
            let halves = [fold_ps(x[0]), fold_ps(x[1]), fold_ps(x[2]), fold_ps(x[3])];
            let ab = _mm256_hadd_ps(halves[0], halves[1]);
            let cd = _mm256_hadd_ps(halves[2], halves[3]);
            let all = _mm256_hadd_ps(ab, cd);
            let sums = _mm_add_ps(_mm256_castps256_ps128(all), _mm256_extractf128_ps::<1>(all));
            let mut out = [0.0; 4];
            _mm_storeu_ps(out.as_mut_ptr(), sums);
            out
        })
    }

    #[inline(always)]
    fn zero(self) -> __m512i {
        avx512!(_mm512_setzero_si512())
    }

    #[inline(always)]
    fn load_codes(self, from: &[i8; BYTES]) -> __m512i {
        avx512!(_mm512_xor_si512(
            _mm512_loadu_si512(from.as_ptr().cast()),
            _mm512_set1_epi8(i8::MIN)
        ))
    }

    #[inline(always)]
    fn load_activations(self, from: &[i8; BYTES]) -> __m512i {
        avx512!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn dot(self, sums: __m512i, w: __m512i, x: __m512i) -> __m512i {
        avx512!(_mm512_dpbusd_epi32(sums, w, x))
    }

    #[inline(always)]
    fn add_sums(self, a: __m512i, b: __m512i) -> __m512i {
        avx512!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn total(self, sums: __m512i) -> i32 {
        avx512!(_mm512_reduce_add_epi32(sums))
    }

    #[inline(always)]
    fn total_each(self, sums: [__m512i; 4]) -> [i32; 4] {
        avx512!({
            let halves = [
                fold_epi32(sums[0]),
                fold_epi32(sums[1]),
                fold_epi32(sums[2]),
                fold_epi32(sums[3]),
            ];
            super::avx2::total_each(halves)
        })
    }

    #[inline(always)]
    fn prefetch<T>(self, address: *const T) {
        avx512!(_mm_prefetch::<_MM_HINT_T0>(address.cast()));
    }

    #[inline(always)]
    fn prefetch_near(self, address: *const u8) {
        avx512!(_mm_prefetch::<_MM_HINT_T1>(address.cast()));
    }
}

/// The sum of both halves.
///
/// # Safety
/// The machine has AVX-512 F and DQ.
#[inline(always)]
unsafe fn fold_ps(x: __m512) -> __m256 {
    // SAFETY: the caller's promise.
    unsafe { _mm256_add_ps(_mm512_castps512_ps256(x), _mm512_extractf32x8_ps::<1>(x)) }
}

/// The sum of both halves.
///
/// # Safety
/// The machine has AVX-512 F.
#[inline(always)]
unsafe fn fold_epi32(x: __m512i) -> __m256i {
    // SAFETY: the caller's promise.
    unsafe { _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64::<1>(x)) }
}

/// 64 codes at a time, byte by byte of their numbers.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn look_up_256(book: &Book256, codes: &[u8], bits: &mut [u32]) {
    const EACH: usize = 64;
    // What unpacking makes neighbours comes from the quarters of a vector.
    let quarters = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let count = codes.len().min(bits.len());
    for from in (0..count).step_by(EACH) {
        let there = EACH.min(count - from);
        let mask = u64::MAX >> (EACH - there);
        // SAFETY: the first `there` bytes are in `codes`, and no others are read.
        let codes = unsafe { _mm512_maskz_loadu_epi8(mask, codes.as_ptr().add(from).cast()) };
        let codes = _mm512_permutexvar_epi32(quarters, codes);
        let upper = _mm512_movepi8_mask(codes);
        let [a, b, c, d] = book.planes.each_ref().map(|plane| {
            let part = |at: usize| {
                // SAFETY: `at` is 0 to 3, and a plane has four times 64 bytes.
                unsafe { _mm512_loadu_si512(plane.as_ptr().add(at * EACH).cast()) }
            };
            // The codes' lower seven bits choose among 128 bytes.
            let low = _mm512_permutex2var_epi8(part(0), codes, part(1));
            let high = _mm512_permutex2var_epi8(part(2), codes, part(3));
            _mm512_mask_blend_epi8(upper, low, high)
        });
        let (ab_low, ab_high) = (_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b));
        let (cd_low, cd_high) = (_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d));
        let numbers = [
            _mm512_unpacklo_epi16(ab_low, cd_low),
            _mm512_unpackhi_epi16(ab_low, cd_low),
            _mm512_unpacklo_epi16(ab_high, cd_high),
            _mm512_unpackhi_epi16(ab_high, cd_high),
        ];
        for (index, numbers) in numbers.into_iter().enumerate() {
            let Some(left) = there.checked_sub(index * LANES).filter(|left| *left > 0) else {
                break;
            };
            let mask = u16::MAX >> (LANES - left.min(LANES));
            // SAFETY: the first `left` numbers from there on are in `bits`, and no others are written.
            unsafe {
                let to = bits.as_mut_ptr().add(from + index * LANES);
                _mm512_mask_storeu_epi32(to.cast(), mask, numbers);
            }
        }
    }
}
