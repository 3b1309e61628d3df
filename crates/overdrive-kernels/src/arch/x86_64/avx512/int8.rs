//! Dot products of bytes by `vpdpbusd`, and look-ups by VBMI.

use std::arch::x86_64::*;

use super::super::avx2::{nearest_256, total_each};
use super::Avx512;
use crate::{BYTES, Int8, LANES, Nearest256, Table256};

impl Int8 for Avx512 {
    type W = __m512i;
    type X = __m512i;
    type A = __m512i;

    // The first factor of `vpdpbusd` is unsigned: codes of weights are, shifted by 128.
    const OFFSET: i32 = 128;

    #[inline(always)]
    fn zero(self) -> __m512i {
        intrinsics!(_mm512_setzero_si512())
    }

    #[inline(always)]
    fn load_codes(self, from: &[i8; BYTES]) -> __m512i {
        intrinsics!(_mm512_xor_si512(
            _mm512_loadu_si512(from.as_ptr().cast()),
            _mm512_set1_epi8(i8::MIN)
        ))
    }

    #[inline(always)]
    fn load_activations(self, from: &[i8; BYTES]) -> __m512i {
        intrinsics!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn dot(self, sums: __m512i, w: __m512i, x: __m512i) -> __m512i {
        intrinsics!(_mm512_dpbusd_epi32(sums, w, x))
    }

    #[inline(always)]
    fn add_sums(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsics!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn total(self, sums: __m512i) -> i32 {
        intrinsics!(_mm512_reduce_add_epi32(sums))
    }

    #[inline(always)]
    fn total_each(self, sums: [__m512i; 4]) -> [i32; 4] {
        let [a, b, c, d] = sums;
        intrinsics!(total_each([fold(a), fold(b), fold(c), fold(d)]))
    }

    #[inline(always)]
    fn look_up_256(self, table: &Table256, codes: &[u8], bits: &mut [u32]) {
        // Cascade Lake has VNNI without VBMI.
        if is_x86_feature_detected!("avx512vbmi") {
            intrinsics!(look_up_256(table, codes, bits));
        } else {
            table.look_up(codes, bits);
        }
    }

    #[inline(always)]
    fn nearest_256(self, table: &Nearest256, values: &[f32], factor: f32, codes: &mut [u8]) {
        // The gathers take the time, and wide ones are no faster.
        intrinsics!(nearest_256(table, values, factor, codes));
    }
}

/// Returns the sum of both halves.
#[inline]
#[target_feature(enable = "avx512f,avx512dq")]
fn fold(x: __m512i) -> __m256i {
    _mm256_add_epi32(_mm512_castsi512_si256(x), _mm512_extracti64x4_epi64::<1>(x))
}

/// Looks up 64 codes at a time, byte by byte of their floats.
#[target_feature(enable = "avx512f,avx512bw,avx512vbmi")]
fn look_up_256(table: &Table256, codes: &[u8], bits: &mut [u32]) {
    const EACH: usize = 64;
    // The interleaving below makes neighbours of bytes from the quarters of a vector.
    let quarters = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    let count = codes.len().min(bits.len());
    for from in (0..count).step_by(EACH) {
        let left = EACH.min(count - from);
        let mask = u64::MAX >> (EACH - left);
        // SAFETY: the first `left` bytes are in `codes`, and no others are read.
        let codes = unsafe { _mm512_maskz_loadu_epi8(mask, codes.as_ptr().add(from).cast()) };
        let codes = _mm512_permutexvar_epi32(quarters, codes);
        let upper = _mm512_movepi8_mask(codes);
        let [a, b, c, d] = table.planes.each_ref().map(|plane| {
            let quarter = |index: usize| {
                // SAFETY: `index` is 0 to 3, and a plane has four times 64 bytes.
                unsafe { _mm512_loadu_si512(plane.as_ptr().add(index * EACH).cast()) }
            };
            // The codes' lower seven bits choose among 128 bytes.
            let low = _mm512_permutex2var_epi8(quarter(0), codes, quarter(1));
            let high = _mm512_permutex2var_epi8(quarter(2), codes, quarter(3));
            _mm512_mask_blend_epi8(upper, low, high)
        });
        let (ab_low, ab_high) = (_mm512_unpacklo_epi8(a, b), _mm512_unpackhi_epi8(a, b));
        let (cd_low, cd_high) = (_mm512_unpacklo_epi8(c, d), _mm512_unpackhi_epi8(c, d));
        let floats = [
            _mm512_unpacklo_epi16(ab_low, cd_low),
            _mm512_unpackhi_epi16(ab_low, cd_low),
            _mm512_unpacklo_epi16(ab_high, cd_high),
            _mm512_unpackhi_epi16(ab_high, cd_high),
        ];
        for (index, floats) in floats.into_iter().enumerate() {
            let Some(left) = left.checked_sub(index * LANES).filter(|left| *left > 0) else {
                break;
            };
            let mask = u16::MAX >> (LANES - left.min(LANES));
            // SAFETY: the first `left` elements from there on are in `bits`, and no others are written.
            unsafe {
                let to = bits.as_mut_ptr().add(from + index * LANES);
                _mm512_mask_storeu_epi32(to.cast(), mask, floats);
            }
        }
    }
}
