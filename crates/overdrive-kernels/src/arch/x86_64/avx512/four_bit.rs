//! Kernels of 4-bit codes: look-ups by `vpermw` and `vpshufb`, dot products by `vpdpbusd` and `vpdpwssd`.

use std::arch::x86_64::*;

use super::Avx512;
use super::vector::F32x16;
use crate::{BYTES, FourBit, LANES, WORDS};

impl FourBit for Avx512 {
    type Packed = __m512i;
    type Words = __m512i;
    type WordTable = __m512i;
    type Sums = __m512i;
    type Lanes = __m512i;

    type Bytes = __m512i;

    const WORD_ROWS: usize = 8;

    // `vpdpbusd` takes numbers of a weight without a sign.
    const BOOK_ZERO: i32 = 128;

    const BYTE_ROWS: usize = 8;

    #[inline(always)]
    fn unpack_nibbles<const BOOK: bool>(self, codes: __m512i, table: __m512i) -> [__m512i; 2] {
        intrinsics!({
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
    fn unpack_bytes<const SIGNED: bool>(self, codes: __m512i) -> __m512i {
        if SIGNED {
            // Adds 128.
            intrinsics!(_mm512_xor_si512(codes, _mm512_set1_epi8(-128)))
        } else {
            codes
        }
    }

    #[inline(always)]
    fn sum_fours(self, sums: [__m512i; 4]) -> __m512i {
        let [a, b, c, d] = sums;
        intrinsics!({
            // Lanes 0 and 2, 1 and 3 of each vector, side by side.
            let ab = _mm512_add_epi32(_mm512_unpacklo_epi32(a, b), _mm512_unpackhi_epi32(a, b));
            let cd = _mm512_add_epi32(_mm512_unpacklo_epi32(c, d), _mm512_unpackhi_epi32(c, d));
            _mm512_add_epi32(_mm512_unpacklo_epi64(ab, cd), _mm512_unpackhi_epi64(ab, cd))
        })
    }

    #[inline(always)]
    fn dot_bytes(self, sums: __m512i, numbers: __m512i, bytes: __m512i) -> __m512i {
        intrinsics!(_mm512_dpbusd_epi32(sums, numbers, bytes))
    }

    #[inline(always)]
    fn dot_pairs(self, sums: __m512i, codes: __m512i, bytes: __m512i) -> __m512i {
        intrinsics!(_mm512_add_epi16(sums, _mm512_maddubs_epi16(codes, bytes)))
    }

    #[inline(always)]
    fn splat_quad(self, from: &[i8; 4]) -> __m512i {
        intrinsics!(_mm512_set1_epi32(i32::from_ne_bytes(
            from.map(i8::cast_unsigned)
        )))
    }

    #[inline(always)]
    fn store_bytes(self, plane: __m512i, to: &mut [i8; BYTES]) {
        intrinsics!(_mm512_storeu_si512(to.as_mut_ptr().cast(), plane));
    }

    #[inline(always)]
    fn splat_sums(self, sum: i32) -> __m512i {
        intrinsics!(_mm512_set1_epi32(sum))
    }

    #[inline(always)]
    fn load_bytes(self, from: &[i8; BYTES]) -> __m512i {
        intrinsics!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn load_sums(self, from: &[i32; LANES]) -> __m512i {
        intrinsics!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn store_sums(self, sums: __m512i, to: &mut [i32; LANES]) {
        intrinsics!(_mm512_storeu_si512(to.as_mut_ptr().cast(), sums));
    }

    #[inline(always)]
    fn byte_table(self, values: &[i8; 16]) -> __m512i {
        intrinsics!({
            let values = _mm_loadu_si128(values.as_ptr().cast());
            // -128 as an addend of 8 bits is 128.
            _mm512_broadcast_i32x4(_mm_add_epi8(values, _mm_set1_epi8(-128)))
        })
    }

    #[inline(always)]
    fn dot_nibbles<const BOOK: bool>(
        self,
        sums: __m512i,
        codes: __m512i,
        table: __m512i,
        low: __m512i,
        high: __m512i,
    ) -> __m512i {
        intrinsics!({
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
    fn load_packed(self, from: &[u8; BYTES]) -> __m512i {
        intrinsics!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn word_table(self, values: &[i16; 16]) -> __m512i {
        intrinsics!(_mm512_broadcast_i64x4(_mm256_loadu_si256(
            values.as_ptr().cast()
        )))
    }

    // `vpermw` looks at five bits of each word; both halves of the table are the same, so that the
    // fifth, which belongs to the next code, does not matter.
    #[inline(always)]
    fn look_up_words(self, codes: __m512i, table: __m512i) -> [__m512i; 4] {
        intrinsics!([
            _mm512_permutexvar_epi16(codes, table),
            _mm512_permutexvar_epi16(_mm512_srli_epi16::<4>(codes), table),
            _mm512_permutexvar_epi16(_mm512_srli_epi16::<8>(codes), table),
            _mm512_permutexvar_epi16(_mm512_srli_epi16::<12>(codes), table),
        ])
    }

    #[inline(always)]
    fn widen_signed(self, codes: __m512i) -> [__m512i; 2] {
        intrinsics!([
            _mm512_srai_epi16::<8>(_mm512_slli_epi16::<8>(codes)),
            _mm512_srai_epi16::<8>(codes),
        ])
    }

    #[inline(always)]
    fn widen_unsigned(self, codes: __m512i) -> [__m512i; 2] {
        intrinsics!([
            _mm512_and_si512(codes, _mm512_set1_epi16(0xff)),
            _mm512_srli_epi16::<8>(codes),
        ])
    }

    // Four passes that exchange blocks of 4, 8, 16 and 32 bytes.
    #[inline(always)]
    fn transpose_packed(self, rows: [__m512i; LANES]) -> [__m512i; LANES] {
        let mut a = rows;
        let mut b = rows;
        intrinsics!({
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
    fn transpose_floats(self, rows: [F32x16; LANES]) -> [F32x16; LANES] {
        let mut bits = [self.zero_sums(); LANES];
        for (bits, row) in bits.iter_mut().zip(rows) {
            *bits = intrinsics!(_mm512_castps_si512(row.0));
        }
        let mut out = rows;
        for (out, bits) in out.iter_mut().zip(self.transpose_packed(bits)) {
            *out = F32x16(intrinsics!(_mm512_castsi512_ps(bits)));
        }
        out
    }

    #[inline(always)]
    fn transpose_square(self, rows: &mut [F32x16; LANES]) {
        *rows = self.transpose_floats(*rows);
    }

    #[inline(always)]
    fn load_words(self, from: &[i16; WORDS]) -> __m512i {
        intrinsics!(_mm512_loadu_si512(from.as_ptr().cast()))
    }

    #[inline(always)]
    fn store_words(self, words: __m512i, to: &mut [i16; WORDS]) {
        intrinsics!(_mm512_storeu_si512(to.as_mut_ptr().cast(), words));
    }

    #[inline(always)]
    fn splat_pair(self, from: &[i16; 2]) -> __m512i {
        intrinsics!(_mm512_set1_epi32(
            from.as_ptr().cast::<i32>().read_unaligned()
        ))
    }

    #[inline(always)]
    fn zero_sums(self) -> __m512i {
        intrinsics!(_mm512_setzero_si512())
    }

    #[inline(always)]
    fn dot_words(self, sums: __m512i, a: __m512i, b: __m512i) -> __m512i {
        intrinsics!(_mm512_dpwssd_epi32(sums, a, b))
    }

    #[inline(always)]
    fn merge_sums(self, a: __m512i, b: __m512i) -> __m512i {
        intrinsics!(_mm512_add_epi32(a, b))
    }

    #[inline(always)]
    fn sums_to_f32(self, sums: __m512i) -> F32x16 {
        F32x16(intrinsics!(_mm512_cvtepi32_ps(sums)))
    }

    #[inline(always)]
    fn lane_indices(self, lanes: &[u32; LANES]) -> __m512i {
        intrinsics!(_mm512_loadu_si512(lanes.as_ptr().cast()))
    }

    #[inline(always)]
    fn permute(self, from: &[f32; LANES], lanes: __m512i) -> F32x16 {
        F32x16(intrinsics!(_mm512_permutexvar_ps(
            lanes,
            _mm512_loadu_ps(from.as_ptr())
        )))
    }

    #[inline(always)]
    fn decode_nibbles(self, codes: &[u8; 8], values: &[f32; 16], high_first: bool) -> F32x16 {
        intrinsics!({
            let packed = _mm_loadl_epi64(codes.as_ptr().cast());
            let mask = _mm_set1_epi8(15);
            let low = _mm_and_si128(packed, mask);
            let high = _mm_and_si128(_mm_srli_epi16::<4>(packed), mask);
            let each = if high_first {
                _mm_unpacklo_epi8(high, low)
            } else {
                _mm_unpacklo_epi8(low, high)
            };
            let values = _mm512_loadu_ps(values.as_ptr());
            F32x16(_mm512_permutexvar_ps(_mm512_cvtepu8_epi32(each), values))
        })
    }
}
