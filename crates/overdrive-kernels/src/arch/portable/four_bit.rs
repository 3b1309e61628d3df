//! Kernels of 4-bit codes in loops over arrays.

use super::Portable;
use super::vector::Array;
use crate::{BYTES, FourBit, LANES, WORDS};

/// Makes each word from two bytes of codes.
#[inline(always)]
fn each_word(codes: [u8; BYTES], f: impl Fn(u16) -> i16) -> [i16; WORDS] {
    let mut out = [0; WORDS];
    for (word, out) in out.iter_mut().enumerate() {
        *out = f(u16::from_le_bytes([codes[2 * word], codes[2 * word + 1]]));
    }
    out
}

impl FourBit for Portable {
    type Packed = [u8; BYTES];
    type Words = [i16; WORDS];
    type WordTable = [i16; 16];
    type Sums = [i32; LANES];
    type Lanes = [u32; LANES];

    type Bytes = [i8; BYTES];

    const WORD_ROWS: usize = 4;

    #[inline(always)]
    fn unpack_nibbles<const BOOK: bool>(
        self,
        codes: [u8; BYTES],
        table: [i8; BYTES],
    ) -> [[i8; BYTES]; 2] {
        let mut out = [[0; BYTES]; 2];
        for at in 0..BYTES {
            for (half, code) in [codes[at] & 15, codes[at] >> 4].into_iter().enumerate() {
                out[half][at] = if BOOK {
                    table[usize::from(code)]
                } else {
                    code.cast_signed()
                };
            }
        }
        out
    }

    #[inline(always)]
    fn unpack_bytes<const SIGNED: bool>(self, codes: [u8; BYTES]) -> [i8; BYTES] {
        let flip = if SIGNED { 0 } else { 128 };
        codes.map(
            #[inline(always)]
            |code| (code ^ flip).cast_signed(),
        )
    }

    #[inline(always)]
    fn sum_fours(self, sums: [[i32; LANES]; 4]) -> [i32; LANES] {
        let mut out = [0; LANES];
        for (at, out) in out.iter_mut().enumerate() {
            *out = sums[at % 4][at / 4 * 4..][..4].iter().sum();
        }
        out
    }

    #[inline(always)]
    fn dot_bytes(
        self,
        sums: [i32; LANES],
        numbers: [i8; BYTES],
        bytes: [i8; BYTES],
    ) -> [i32; LANES] {
        let mut words = [0_i16; BYTES / 2];
        for (at, word) in words.iter_mut().enumerate() {
            let product = |at: usize| i16::from(numbers[at]) * i16::from(bytes[at]);
            // Two products of -128 and 127 fit 16 bits.
            *word = product(2 * at) + product(2 * at + 1);
        }
        let mut out = sums;
        for (lane, out) in out.iter_mut().enumerate() {
            *out += i32::from(words[2 * lane]) + i32::from(words[2 * lane + 1]);
        }
        out
    }

    #[inline(always)]
    fn dot_pairs(self, sums: [i16; WORDS], codes: [i8; BYTES], bytes: [i8; BYTES]) -> [i16; WORDS] {
        let mut out = sums;
        for (at, out) in out.iter_mut().enumerate() {
            let product = |at: usize| i16::from(codes[at]) * i16::from(bytes[at]);
            *out += product(2 * at) + product(2 * at + 1);
        }
        out
    }

    #[inline(always)]
    fn splat_quad(self, from: &[i8; 4]) -> [i8; BYTES] {
        let mut out = [0; BYTES];
        for at in 0..BYTES {
            out[at] = from[at % 4];
        }
        out
    }

    #[inline(always)]
    fn store_bytes(self, plane: [i8; BYTES], to: &mut [i8; BYTES]) {
        *to = plane;
    }

    #[inline(always)]
    fn splat_sums(self, sum: i32) -> [i32; LANES] {
        [sum; LANES]
    }

    #[inline(always)]
    fn load_bytes(self, from: &[i8; BYTES]) -> [i8; BYTES] {
        *from
    }

    #[inline(always)]
    fn load_sums(self, from: &[i32; LANES]) -> [i32; LANES] {
        *from
    }

    #[inline(always)]
    fn store_sums(self, sums: [i32; LANES], to: &mut [i32; LANES]) {
        *to = sums;
    }

    #[inline(always)]
    fn byte_table(self, values: &[i8; 16]) -> [i8; BYTES] {
        std::array::from_fn(
            #[inline(always)]
            |at| values[at % 16],
        )
    }

    #[inline(always)]
    fn dot_nibbles<const BOOK: bool>(
        self,
        sums: [i32; LANES],
        codes: [u8; BYTES],
        table: [i8; BYTES],
        low: [i8; BYTES],
        high: [i8; BYTES],
    ) -> [i32; LANES] {
        let mut words = [0_i16; BYTES];
        for (at, word) in words.iter_mut().enumerate() {
            let (first, second) = (codes[at] & 15, codes[at] >> 4);
            // Two products of numbers of 8 bits with a sign, the largest 127, fit 16 bits.
            *word = if BOOK {
                let first = i16::from(table[usize::from(first)]);
                let second = i16::from(table[usize::from(second)]);
                first * i16::from(low[at]) + second * i16::from(high[at])
            } else {
                i16::from(first) * i16::from(low[at]) + i16::from(second) * i16::from(high[at])
            };
        }
        let mut out = sums;
        for (lane, out) in out.iter_mut().enumerate() {
            for at in 0..4 {
                *out += i32::from(words[4 * lane + at]);
            }
        }
        out
    }

    #[inline(always)]
    fn load_packed(self, from: &[u8; BYTES]) -> [u8; BYTES] {
        *from
    }

    #[inline(always)]
    fn word_table(self, values: &[i16; 16]) -> [i16; 16] {
        *values
    }

    #[inline(always)]
    fn look_up_words(self, codes: [u8; BYTES], table: [i16; 16]) -> [[i16; WORDS]; 4] {
        [0, 4, 8, 12].map(
            #[inline(always)]
            |shift| {
                each_word(
                    codes,
                    #[inline(always)]
                    |word| table[usize::from((word >> shift) & 15)],
                )
            },
        )
    }

    #[inline(always)]
    fn widen_signed(self, codes: [u8; BYTES]) -> [[i16; WORDS]; 2] {
        [0, 1].map(
            #[inline(always)]
            |byte| {
                each_word(
                    codes,
                    #[inline(always)]
                    |word| i16::from(i8::from_le_bytes([word.to_le_bytes()[byte]])),
                )
            },
        )
    }

    #[inline(always)]
    fn widen_unsigned(self, codes: [u8; BYTES]) -> [[i16; WORDS]; 2] {
        [0, 1].map(
            #[inline(always)]
            |byte| {
                each_word(
                    codes,
                    #[inline(always)]
                    |word| i16::from(word.to_le_bytes()[byte]),
                )
            },
        )
    }

    #[inline(always)]
    fn transpose_packed(self, rows: [[u8; BYTES]; LANES]) -> [[u8; BYTES]; LANES] {
        let mut out = rows;
        for (i, row) in rows.iter().enumerate() {
            for (j, out) in out.iter_mut().enumerate() {
                out[4 * i..4 * i + 4].copy_from_slice(&row[4 * j..4 * j + 4]);
            }
        }
        out
    }

    #[inline(always)]
    fn transpose_floats(self, rows: [Self::F; LANES]) -> [Self::F; LANES] {
        let mut out = rows;
        for (i, row) in rows.iter().enumerate() {
            for (j, out) in out.iter_mut().enumerate() {
                out.0[i] = row.0[j];
            }
        }
        out
    }

    #[inline(always)]
    fn transpose_square(self, rows: &mut [Self::F32; LANES]) {
        let from = *rows;
        for (i, row) in from
            .iter()
            .enumerate()
            .take(<Self::F32 as crate::Vector>::LEN)
        {
            for (j, number) in row.0.iter().enumerate() {
                rows[j].0[i] = *number;
            }
        }
    }

    #[inline(always)]
    fn load_words(self, from: &[i16; WORDS]) -> [i16; WORDS] {
        *from
    }

    #[inline(always)]
    fn store_words(self, words: [i16; WORDS], to: &mut [i16; WORDS]) {
        *to = words;
    }

    #[inline(always)]
    fn splat_pair(self, from: &[i16; 2]) -> [i16; WORDS] {
        let mut out = [from[0]; WORDS];
        for odd in out.iter_mut().skip(1).step_by(2) {
            *odd = from[1];
        }
        out
    }

    #[inline(always)]
    fn zero_sums(self) -> [i32; LANES] {
        [0; LANES]
    }

    #[inline(always)]
    fn dot_words(self, sums: [i32; LANES], a: [i16; WORDS], b: [i16; WORDS]) -> [i32; LANES] {
        let mut sums = sums;
        for (lane, sum) in sums.iter_mut().enumerate() {
            *sum += i32::from(a[2 * lane]) * i32::from(b[2 * lane]);
            *sum += i32::from(a[2 * lane + 1]) * i32::from(b[2 * lane + 1]);
        }
        sums
    }

    #[inline(always)]
    fn merge_sums(self, a: [i32; LANES], b: [i32; LANES]) -> [i32; LANES] {
        let mut out = a;
        for (out, b) in out.iter_mut().zip(b) {
            *out += b;
        }
        out
    }

    #[inline(always)]
    fn sums_to_f32(self, sums: [i32; LANES]) -> Self::F {
        let mut out = [0.0; LANES];
        for (out, sum) in out.iter_mut().zip(sums) {
            #[allow(
                clippy::cast_precision_loss,
                reason = "rounds, as a product of floats does"
            )]
            {
                *out = sum as f32;
            }
        }
        Array(out)
    }

    #[inline(always)]
    fn lane_indices(self, lanes: &[u32; LANES]) -> [u32; LANES] {
        *lanes
    }

    #[inline(always)]
    fn permute(self, from: &[f32; LANES], lanes: [u32; LANES]) -> Self::F {
        let mut out = [0.0; LANES];
        for (out, lane) in out.iter_mut().zip(lanes) {
            *out = from[lane as usize % LANES];
        }
        Array(out)
    }

    #[inline(always)]
    fn decode_nibbles(self, codes: &[u8; 8], values: &[f32; 16], high_first: bool) -> Self::F {
        let mut out = [0.0; LANES];
        for (pair, &code) in out.chunks_exact_mut(2).zip(codes) {
            pair[usize::from(high_first)] = values[usize::from(code & 15)];
            pair[usize::from(!high_first)] = values[usize::from(code >> 4)];
        }
        Array(out)
    }
}
