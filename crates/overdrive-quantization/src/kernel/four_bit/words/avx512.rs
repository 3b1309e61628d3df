//! AVX-512 with VNNI: one register a vector.
#![allow(unsafe_code)]

use std::arch::x86_64::*;

use super::{PACKED, WORDS, Words, Work};
use crate::kernel::simd::LANES;
use crate::kernel::simd::avx512::Avx512;

#[inline]
pub(super) fn run<W: Work>(simd: Avx512, work: W) -> W::Output {
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma,f16c")]
    fn compiled<W: Work>(simd: Avx512, work: W) -> W::Output {
        work.run(simd)
    }
    // SAFETY: a value of `Avx512` exists only where all these features were found.
    unsafe { compiled(simd, work) }
}

/// Calls an intrinsic.
macro_rules! avx512 {
    ($call:expr) => {
        // SAFETY: a value of `Avx512` proves that the machine has the instruction; loads and stores
        // go through references to arrays of exactly the size that they access.
        unsafe { $call }
    };
}

impl Words for Avx512 {
    type Packed = __m512i;
    type I = __m512i;
    type Table = __m512i;
    type Sums = __m512i;
    type Places = __m512i;

    type Plane = __m512i;

    const ROWS: usize = 8;

    /// `vpdpbusd` takes numbers of a weight without a sign.
    const BOOK_ZERO: i32 = 128;

    const BYTE_ROWS: usize = 6;
    const BYTE_VECTORS: usize = 2;

    #[inline(always)]
    fn nibbles<const BOOK: bool>(self, codes: __m512i, table: __m512i) -> [__m512i; 2] {
        avx512!({
            let mask = _mm512_set1_epi8(15);
            let low = _mm512_and_si512(codes, mask);
            let high = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), mask);
            if BOOK {
                [
                    _mm512_shuffle_epi8(table, low),
                    _mm512_shuffle_epi8(table, high),
                ]
            } else {
                [low, high]
            }
        })
    }

    #[inline(always)]
    fn add_bytes(self, sums: __m512i, numbers: __m512i, bytes: __m512i) -> __m512i {
        avx512!(_mm512_dpbusd_epi32(sums, numbers, bytes))
    }

    #[inline(always)]
    fn quad(self, from: &[i8; 4]) -> __m512i {
        avx512!(_mm512_set1_epi32(i32::from_ne_bytes(
            from.map(i8::cast_unsigned)
        )))
    }

    #[inline(always)]
    fn store_plane(self, plane: __m512i, to: &mut [i8; PACKED]) {
        avx512!(_mm512_storeu_si512(to.as_mut_ptr().cast(), plane));
    }

    #[inline(always)]
    fn splat_sums(self, sum: i32) -> __m512i {
        avx512!(_mm512_set1_epi32(sum))
    }

    #[inline(always)]
    fn load_plane(self, from: &[i8; PACKED]) -> __m512i {
        avx512!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn load_sums(self, from: &[i32; LANES]) -> __m512i {
        avx512!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn store_sums(self, sums: __m512i, to: &mut [i32; LANES]) {
        avx512!(_mm512_storeu_si512(to.as_mut_ptr().cast(), sums));
    }

    #[inline(always)]
    fn byte_table(self, values: &[i8; 16]) -> __m512i {
        avx512!({
            let values = _mm_loadu_si128(values.as_ptr().cast());
            // -128 as an addend of 8 bits is 128.
            _mm512_broadcast_i32x4(_mm_add_epi8(values, _mm_set1_epi8(-128)))
        })
    }

    #[inline(always)]
    fn add_nibbles<const BOOK: bool>(
        self,
        sums: __m512i,
        codes: __m512i,
        table: __m512i,
        low: __m512i,
        high: __m512i,
    ) -> __m512i {
        avx512!({
            let mask = _mm512_set1_epi8(15);
            let mut first = _mm512_and_si512(codes, mask);
            let mut second = _mm512_and_si512(_mm512_srli_epi16::<4>(codes), mask);
            if BOOK {
                first = _mm512_shuffle_epi8(table, first);
                second = _mm512_shuffle_epi8(table, second);
            }
            _mm512_dpbusd_epi32(_mm512_dpbusd_epi32(sums, first, low), second, high)
        })
    }

    #[inline(always)]
    fn load_packed(self, from: &[u8; PACKED]) -> __m512i {
        avx512!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn table(self, values: &[i16; 16]) -> __m512i {
        avx512!(_mm512_broadcast_i64x4(_mm256_loadu_si256(
            values.as_ptr().cast()
        )))
    }

    /// `vpermw` looks at five bits of each word; both halves of the table are the same, so that the
    /// fifth, which belongs to the next code, does not matter.
    #[inline(always)]
    fn look_up(self, codes: __m512i, table: __m512i) -> [__m512i; 4] {
        avx512!([
            _mm512_permutexvar_epi16(codes, table),
            _mm512_permutexvar_epi16(_mm512_srli_epi16::<4>(codes), table),
            _mm512_permutexvar_epi16(_mm512_srli_epi16::<8>(codes), table),
            _mm512_permutexvar_epi16(_mm512_srli_epi16::<12>(codes), table),
        ])
    }

    #[inline(always)]
    fn signed(self, codes: __m512i) -> [__m512i; 2] {
        avx512!([
            _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(codes)),
            _mm512_srai_epi16::<8>(codes),
        ])
    }

    #[inline(always)]
    fn unsigned(self, codes: __m512i) -> [__m512i; 2] {
        avx512!([
            _mm512_and_si512(codes, _mm512_set1_epi16(0xff)),
            _mm512_srli_epi16::<8>(codes),
        ])
    }

    /// Four passes that exchange pieces of 4, 8, 16 and 32 bytes.
    #[inline(always)]
    fn transpose(self, rows: [__m512i; LANES]) -> [__m512i; LANES] {
        let mut a = rows;
        let mut b = rows;
        avx512!({
            for i in 0..8 {
                b[2 * i] = _mm512_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
                b[2 * i + 1] = _mm512_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
            }
            for i in 0..4 {
                let at = 4 * i;
                a[at] = _mm512_unpacklo_epi64(b[at], b[at + 2]);
                a[at + 1] = _mm512_unpackhi_epi64(b[at], b[at + 2]);
                a[at + 2] = _mm512_unpacklo_epi64(b[at + 1], b[at + 3]);
                a[at + 3] = _mm512_unpackhi_epi64(b[at + 1], b[at + 3]);
            }
            // `a[4 i + c]` has column `4 q + c` of rows `4 i ..` in its quarter `q`.
            for c in 0..4 {
                let low = _mm512_shuffle_i32x4::<0x88>(a[c], a[4 + c]);
                let high = _mm512_shuffle_i32x4::<0xdd>(a[c], a[4 + c]);
                let low2 = _mm512_shuffle_i32x4::<0x88>(a[8 + c], a[12 + c]);
                let high2 = _mm512_shuffle_i32x4::<0xdd>(a[8 + c], a[12 + c]);
                b[c] = _mm512_shuffle_i32x4::<0x88>(low, low2);
                b[8 + c] = _mm512_shuffle_i32x4::<0xdd>(low, low2);
                b[4 + c] = _mm512_shuffle_i32x4::<0x88>(high, high2);
                b[12 + c] = _mm512_shuffle_i32x4::<0xdd>(high, high2);
            }
        });
        b
    }

    #[inline(always)]
    fn transpose_floats(self, rows: [__m512; LANES]) -> [__m512; LANES] {
        let mut bits = [self.no_sums(); LANES];
        for (bits, row) in bits.iter_mut().zip(rows) {
            *bits = avx512!(_mm512_castps_si512(row));
        }
        let mut out = rows;
        for (out, bits) in out.iter_mut().zip(self.transpose(bits)) {
            *out = avx512!(_mm512_castsi512_ps(bits));
        }
        out
    }

    #[inline(always)]
    fn load_words(self, from: &[i16; WORDS]) -> __m512i {
        avx512!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn store_words(self, words: __m512i, to: &mut [i16; WORDS]) {
        avx512!(_mm512_storeu_si512(to.as_mut_ptr().cast(), words));
    }

    #[inline(always)]
    fn pair(self, from: &[i16; 2]) -> __m512i {
        avx512!(_mm512_set1_epi32(
            from.as_ptr().cast::<i32>().read_unaligned()
        ))
    }

    #[inline(always)]
    fn no_sums(self) -> __m512i {
        avx512!(_mm512_setzero_si512())
    }

    #[inline(always)]
    fn multiply(self, sums: __m512i, a: __m512i, b: __m512i) -> __m512i {
        avx512!(_mm512_dpwssd_epi32(sums, a, b))
    }

    #[inline(always)]
    fn plus(self, a: __m512i, b: __m512i) -> __m512i {
        avx512!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn floats(self, sums: __m512i) -> __m512 {
        avx512!(_mm512_cvtepi32_ps(sums))
    }

    #[inline(always)]
    fn places(self, lanes: &[u32; LANES]) -> __m512i {
        avx512!(_mm512_loadu_si512(lanes.as_ptr().cast()))
    }

    #[inline(always)]
    fn spread(self, from: &[f32; LANES], places: __m512i) -> __m512 {
        avx512!(_mm512_permutexvar_ps(
            places,
            _mm512_loadu_ps(from.as_ptr())
        ))
    }

    #[inline(always)]
    fn spread_four(self, from: &[f32; 4], places: __m512i) -> __m512 {
        avx512!({
            let from = _mm512_castps128_ps512(_mm_loadu_ps(from.as_ptr()));
            _mm512_permutexvar_ps(places, from)
        })
    }

    #[inline(always)]
    fn values(self, codes: &[u8; 8], values: &[f32; 16], high_first: bool) -> __m512 {
        avx512!({
            let packed = _mm_loadl_epi64(codes.as_ptr().cast());
            let mask = _mm_set1_epi8(15);
            let low = _mm_and_si128(packed, mask);
            let high = _mm_and_si128(_mm_srli_epi16::<4>(packed), mask);
            let each = if high_first {
                _mm_unpacklo_epi8(high, low)
            } else {
                _mm_unpacklo_epi8(low, high)
            };
            _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(each), _mm512_loadu_ps(values.as_ptr()))
        })
    }
}
