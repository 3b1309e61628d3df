//! Kernels of 4-bit codes: look-ups by `vpshufb`, dot products by `vpmaddubsw` and `vpmaddwd`.

use std::arch::x86_64::*;

use super::Avx2;
use super::vector::F32x8;
use crate::vector::Double;
use crate::{BYTES, FourBit, LANES, WORDS};

type Pair = [__m256i; 2];

/// The indices of floats of 16 lanes. Only `lane_indices` makes them, which keeps every read within 16 floats.
#[derive(Debug, Clone, Copy)]
pub struct Lanes {
    /// For each half of the lanes: the index of the first of the 8 floats that it is taken from, at most 8.
    starts: [usize; 2],
    /// The index among those 8 of each lane.
    within: Pair,
}

/// Reads 64 bytes.
#[inline(always)]
fn load<T: Copy, const N: usize>(_: Avx2, from: &[T; N]) -> Pair {
    const { assert!(size_of::<[T; N]>() == BYTES, "two registers") };
    let from: *const __m256i = from.as_ptr().cast();
    intrinsics!([_mm256_loadu_si256(from), _mm256_loadu_si256(from.add(1))])
}

/// Returns a vector of two registers.
#[inline(always)]
fn pair(_: Avx2, low: __m256, high: __m256) -> Double<F32x8> {
    Double(F32x8(low), F32x8(high))
}

/// Transposes 8 vectors of 8 lanes.
#[inline(always)]
fn transpose8(_: Avx2, r: [__m256i; 8]) -> [__m256i; 8] {
    intrinsics!({
        let mut a = r;
        let mut b = r;
        for i in 0..4 {
            b[2 * i] = _mm256_unpacklo_epi32(a[2 * i], a[2 * i + 1]);
            b[2 * i + 1] = _mm256_unpackhi_epi32(a[2 * i], a[2 * i + 1]);
        }
        for i in 0..2 {
            let at = 4 * i;
            a[at] = _mm256_unpacklo_epi64(b[at], b[at + 2]);
            a[at + 1] = _mm256_unpackhi_epi64(b[at], b[at + 2]);
            a[at + 2] = _mm256_unpacklo_epi64(b[at + 1], b[at + 3]);
            a[at + 3] = _mm256_unpackhi_epi64(b[at + 1], b[at + 3]);
        }
        for c in 0..4 {
            b[c] = _mm256_permute2x128_si256::<0x20>(a[c], a[4 + c]);
            b[4 + c] = _mm256_permute2x128_si256::<0x31>(a[c], a[4 + c]);
        }
        b
    })
}

impl FourBit for Avx2 {
    type Packed = Pair;
    type Words = Pair;
    /// Lower bytes and higher bytes of the words, in both halves.
    type WordTable = Pair;
    type Sums = Pair;
    type Lanes = Lanes;

    type Bytes = Pair;

    const WORD_ROWS: usize = 4;
    // Two instructions for 32 products, where signed numbers need four.
    const PAIRS: bool = true;

    #[inline(always)]
    fn unpack_nibbles<const BOOK: bool>(self, codes: Pair, table: Pair) -> [Pair; 2] {
        let mut out = [codes; 2];
        intrinsics!({
            let mask = _mm256_set1_epi8(15);
            for half in 0..2 {
                out[0][half] = _mm256_and_si256(codes[half], mask);
                out[1][half] = _mm256_and_si256(_mm256_srli_epi16::<4>(codes[half]), mask);
                if BOOK {
                    out[0][half] = _mm256_shuffle_epi8(table[half], out[0][half]);
                    out[1][half] = _mm256_shuffle_epi8(table[half], out[1][half]);
                }
            }
        });
        out
    }

    #[inline(always)]
    fn unpack_bytes<const SIGNED: bool>(self, codes: Pair) -> Pair {
        if SIGNED {
            codes
        } else {
            // Subtracts 128.
            intrinsics!({
                let flip = _mm256_set1_epi8(-128);
                [
                    _mm256_xor_si256(codes[0], flip),
                    _mm256_xor_si256(codes[1], flip),
                ]
            })
        }
    }

    #[inline(always)]
    fn sum_fours(self, sums: [Pair; 4]) -> Pair {
        let [a, b, c, d] = sums;
        let mut out = [a[0]; 2];
        intrinsics!({
            for (half, out) in out.iter_mut().enumerate() {
                let (a, b, c, d) = (a[half], b[half], c[half], d[half]);
                // Lanes 0 and 2, 1 and 3 of each vector, side by side. `vphaddd` takes twice as long.
                let ab = _mm256_add_epi32(_mm256_unpacklo_epi32(a, b), _mm256_unpackhi_epi32(a, b));
                let cd = _mm256_add_epi32(_mm256_unpacklo_epi32(c, d), _mm256_unpackhi_epi32(c, d));
                *out =
                    _mm256_add_epi32(_mm256_unpacklo_epi64(ab, cd), _mm256_unpackhi_epi64(ab, cd));
            }
        });
        out
    }

    // The signs of numbers go to the bytes, as in `dot_nibbles`.
    #[inline(always)]
    fn dot_bytes(self, sums: Pair, numbers: Pair, bytes: Pair) -> Pair {
        let mut out = sums;
        intrinsics!({
            let ones = _mm256_set1_epi16(1);
            for half in 0..2 {
                let signed = _mm256_sign_epi8(bytes[half], numbers[half]);
                let words = _mm256_maddubs_epi16(_mm256_abs_epi8(numbers[half]), signed);
                out[half] = _mm256_add_epi32(out[half], _mm256_madd_epi16(words, ones));
            }
        });
        out
    }

    #[inline(always)]
    fn dot_pairs(self, sums: Pair, codes: Pair, bytes: Pair) -> Pair {
        intrinsics!([
            _mm256_add_epi16(sums[0], _mm256_maddubs_epi16(codes[0], bytes[0])),
            _mm256_add_epi16(sums[1], _mm256_maddubs_epi16(codes[1], bytes[1])),
        ])
    }

    #[inline(always)]
    fn splat_quad(self, from: &[i8; 4]) -> Pair {
        intrinsics!([_mm256_set1_epi32(i32::from_ne_bytes(from.map(i8::cast_unsigned))); 2])
    }

    #[inline(always)]
    fn store_bytes(self, plane: Pair, to: &mut [i8; BYTES]) {
        intrinsics!({
            let to: *mut __m256i = to.as_mut_ptr().cast();
            _mm256_storeu_si256(to, plane[0]);
            _mm256_storeu_si256(to.add(1), plane[1]);
        });
    }

    #[inline(always)]
    fn splat_sums(self, sum: i32) -> Pair {
        intrinsics!([_mm256_set1_epi32(sum); 2])
    }

    #[inline(always)]
    fn load_bytes(self, from: &[i8; BYTES]) -> Pair {
        load(self, from)
    }

    #[inline(always)]
    fn load_sums(self, from: &[i32; LANES]) -> Pair {
        load(self, from)
    }

    #[inline(always)]
    fn store_sums(self, sums: Pair, to: &mut [i32; LANES]) {
        intrinsics!({
            let to: *mut __m256i = to.as_mut_ptr().cast();
            _mm256_storeu_si256(to, sums[0]);
            _mm256_storeu_si256(to.add(1), sums[1]);
        });
    }

    #[inline(always)]
    fn byte_table(self, values: &[i8; 16]) -> Pair {
        intrinsics!([_mm256_broadcastsi128_si256(_mm_loadu_si128(values.as_ptr().cast())); 2])
    }

    // Two products of `vpmaddubsw`, a number without a sign times one with, must fit 16 bits: the signs of the bytes go
    // to the numbers of a table. Those of the bytes are the same for several rows of a weight.
    #[inline(always)]
    fn dot_nibbles<const BOOK: bool>(
        self,
        sums: Pair,
        codes: Pair,
        table: Pair,
        low: Pair,
        high: Pair,
    ) -> Pair {
        let mut out = sums;
        intrinsics!({
            let mask = _mm256_set1_epi8(15);
            let ones = _mm256_set1_epi16(1);
            for half in 0..2 {
                let first = _mm256_and_si256(codes[half], mask);
                let second = _mm256_and_si256(_mm256_srli_epi16::<4>(codes[half]), mask);
                if BOOK {
                    for (codes, plane) in [(first, low[half]), (second, high[half])] {
                        let numbers = _mm256_shuffle_epi8(table[half], codes);
                        let signed = _mm256_sign_epi8(numbers, plane);
                        let words = _mm256_maddubs_epi16(_mm256_abs_epi8(plane), signed);
                        out[half] = _mm256_add_epi32(out[half], _mm256_madd_epi16(words, ones));
                    }
                } else {
                    // Four products of codes also fit.
                    let words = _mm256_add_epi16(
                        _mm256_maddubs_epi16(first, low[half]),
                        _mm256_maddubs_epi16(second, high[half]),
                    );
                    out[half] = _mm256_add_epi32(out[half], _mm256_madd_epi16(words, ones));
                }
            }
        });
        out
    }

    #[inline(always)]
    fn load_packed(self, from: &[u8; BYTES]) -> Pair {
        load(self, from)
    }

    #[inline(always)]
    fn word_table(self, values: &[i16; 16]) -> Pair {
        let low = values.map(|value| value.to_le_bytes()[0]);
        let high = values.map(|value| value.to_le_bytes()[1]);
        intrinsics!([
            _mm256_broadcastsi128_si256(_mm_loadu_si128(low.as_ptr().cast())),
            _mm256_broadcastsi128_si256(_mm_loadu_si128(high.as_ptr().cast())),
        ])
    }

    #[inline(always)]
    fn look_up_words(self, codes: Pair, table: Pair) -> [Pair; 4] {
        let mut out = [codes; 4];
        intrinsics!({
            let mask = _mm256_set1_epi8(15);
            let odd = _mm256_set1_epi16(-256);
            for half in 0..2 {
                let code = codes[half];
                let even_codes = _mm256_and_si256(code, mask);
                let odd_codes = _mm256_and_si256(_mm256_srli_epi16::<4>(code), mask);
                for (part, codes) in [even_codes, odd_codes].into_iter().enumerate() {
                    let low = _mm256_shuffle_epi8(table[0], codes);
                    let high = _mm256_shuffle_epi8(table[1], codes);
                    let shifted = _mm256_slli_epi16::<8>(high);
                    out[part][half] = _mm256_blendv_epi8(low, shifted, odd);
                    let shifted = _mm256_srli_epi16::<8>(low);
                    out[part + 2][half] = _mm256_blendv_epi8(shifted, high, odd);
                }
            }
        });
        out
    }

    #[inline(always)]
    fn widen_signed(self, codes: Pair) -> [Pair; 2] {
        let [a, b] = codes;
        intrinsics!([
            [
                _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(a)),
                _mm256_srai_epi16::<8>(_mm256_slli_epi16::<8>(b)),
            ],
            [_mm256_srai_epi16::<8>(a), _mm256_srai_epi16::<8>(b)],
        ])
    }

    #[inline(always)]
    fn widen_unsigned(self, codes: Pair) -> [Pair; 2] {
        let [a, b] = codes;
        intrinsics!({
            let mask = _mm256_set1_epi16(0xff);
            [
                [_mm256_and_si256(a, mask), _mm256_and_si256(b, mask)],
                [_mm256_srli_epi16::<8>(a), _mm256_srli_epi16::<8>(b)],
            ]
        })
    }

    #[inline(always)]
    fn transpose_packed(self, rows: [Pair; LANES]) -> [Pair; LANES] {
        let mut out = rows;
        for from in 0..2 {
            for to in 0..2 {
                let mut block = [rows[0][0]; 8];
                for i in 0..8 {
                    block[i] = rows[8 * to + i][from];
                }
                for (i, row) in transpose8(self, block).into_iter().enumerate() {
                    out[8 * from + i][to] = row;
                }
            }
        }
        out
    }

    #[inline(always)]
    fn transpose_floats(self, rows: [Self::F; LANES]) -> [Self::F; LANES] {
        let mut bits = [self.zero_sums(); LANES];
        for (bits, row) in bits.iter_mut().zip(rows) {
            *bits = intrinsics!([_mm256_castps_si256(row.0.0), _mm256_castps_si256(row.1.0)]);
        }
        let mut out = rows;
        for (out, [a, b]) in out.iter_mut().zip(self.transpose_packed(bits)) {
            *out = intrinsics!(pair(self, _mm256_castsi256_ps(a), _mm256_castsi256_ps(b)));
        }
        out
    }

    #[inline(always)]
    fn transpose_square(self, rows: &mut [F32x8; LANES]) {
        let mut bits = [self.zero_sums()[0]; 8];
        for (bits, row) in bits.iter_mut().zip(rows.iter()) {
            *bits = intrinsics!(_mm256_castps_si256(row.0));
        }
        for (row, bits) in rows.iter_mut().zip(transpose8(self, bits)) {
            *row = F32x8(intrinsics!(_mm256_castsi256_ps(bits)));
        }
    }

    #[inline(always)]
    fn load_words(self, from: &[i16; WORDS]) -> Pair {
        load(self, from)
    }

    #[inline(always)]
    fn store_words(self, words: Pair, to: &mut [i16; WORDS]) {
        intrinsics!({
            let to: *mut __m256i = to.as_mut_ptr().cast();
            _mm256_storeu_si256(to, words[0]);
            _mm256_storeu_si256(to.add(1), words[1]);
        });
    }

    #[inline(always)]
    fn splat_pair(self, from: &[i16; 2]) -> Pair {
        intrinsics!([_mm256_set1_epi32(from.as_ptr().cast::<i32>().read_unaligned()); 2])
    }

    #[inline(always)]
    fn zero_sums(self) -> Pair {
        intrinsics!([_mm256_setzero_si256(); 2])
    }

    #[inline(always)]
    fn dot_words(self, sums: Pair, a: Pair, b: Pair) -> Pair {
        intrinsics!([
            _mm256_add_epi32(sums[0], _mm256_madd_epi16(a[0], b[0])),
            _mm256_add_epi32(sums[1], _mm256_madd_epi16(a[1], b[1])),
        ])
    }

    #[inline(always)]
    fn merge_sums(self, a: Pair, b: Pair) -> Pair {
        intrinsics!([_mm256_add_epi32(a[0], b[0]), _mm256_add_epi32(a[1], b[1])])
    }

    #[inline(always)]
    fn sums_to_f32(self, sums: Pair) -> Self::F {
        intrinsics!(pair(
            self,
            _mm256_cvtepi32_ps(sums[0]),
            _mm256_cvtepi32_ps(sums[1])
        ))
    }

    #[inline(always)]
    fn lane_indices(self, lanes: &[u32; LANES]) -> Lanes {
        let starts = [0, (lanes[8] as usize).min(8)];
        let mut from = *lanes;
        for lane in &mut from[8..] {
            #[allow(clippy::cast_possible_truncation, reason = "at most 8")]
            {
                *lane -= starts[1] as u32;
            }
        }
        Lanes {
            starts,
            within: load(self, &from),
        }
    }

    #[inline(always)]
    fn permute(self, from: &[f32; LANES], lanes: Lanes) -> Self::F {
        let Lanes {
            starts: [low, high],
            within: lanes,
        } = lanes;
        // Both begin at 0..=8, so that 8 floats are there.
        intrinsics!(pair(
            self,
            _mm256_permutevar8x32_ps(_mm256_loadu_ps(from.as_ptr().add(low)), lanes[0]),
            _mm256_permutevar8x32_ps(_mm256_loadu_ps(from.as_ptr().add(high)), lanes[1]),
        ))
    }

    #[inline(always)]
    fn decode_nibbles(self, codes: &[u8; 8], values: &[f32; 16], high_first: bool) -> Self::F {
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
            let first = _mm256_loadu_ps(values.as_ptr());
            let second = _mm256_loadu_ps(values.as_ptr().add(8));
            let low = choose(each, first, second);
            let high = choose(_mm_unpackhi_epi64(each, each), first, second);
            pair(self, low, high)
        })
    }
}

/// Returns the floats of eight codes below 16: of `first`, or for 8 and more of `second`.
#[inline]
#[target_feature(enable = "avx2")]
fn choose(codes: __m128i, first: __m256, second: __m256) -> __m256 {
    let codes = _mm256_cvtepu8_epi32(codes);
    // The fourth bit of the code, which chooses the half, as a sign.
    let half = _mm256_castsi256_ps(_mm256_slli_epi32::<28>(codes));
    _mm256_blendv_ps(
        _mm256_permutevar8x32_ps(first, codes),
        _mm256_permutevar8x32_ps(second, codes),
        half,
    )
}
