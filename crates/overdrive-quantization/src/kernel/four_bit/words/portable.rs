//! Arrays, in loops that a compiler turns into the vectors of its target (NEON on aarch64).

use super::{PACKED, WORDS, Words};
use crate::kernel::simd::LANES;
use crate::kernel::simd::portable::Portable;

/// A word made of two bytes of codes.
#[inline(always)]
fn each_word(codes: [u8; PACKED], f: impl Fn(u16) -> i16) -> [i16; WORDS] {
    let mut out = [0; WORDS];
    for (word, out) in out.iter_mut().enumerate() {
        *out = f(u16::from_le_bytes([codes[2 * word], codes[2 * word + 1]]));
    }
    out
}

impl Words for Portable {
    type Packed = [u8; PACKED];
    type I = [i16; WORDS];
    type Table = [i16; 16];
    type Sums = [i32; LANES];
    type Places = [u32; LANES];

    type Plane = [i8; PACKED];

    const ROWS: usize = 4;

    #[inline(always)]
    fn nibbles<const BOOK: bool>(
        self,
        codes: [u8; PACKED],
        table: [i8; PACKED],
    ) -> [[i8; PACKED]; 2] {
        let mut out = [[0; PACKED]; 2];
        for at in 0..PACKED {
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
    fn add_bytes(
        self,
        sums: [i32; LANES],
        numbers: [i8; PACKED],
        bytes: [i8; PACKED],
    ) -> [i32; LANES] {
        let mut words = [0_i16; PACKED / 2];
        for (at, word) in words.iter_mut().enumerate() {
            let product = |at: usize| i16::from(numbers[at]) * i16::from(bytes[at]);
            // Two products of numbers of at most 127 fit 16 bits.
            *word = product(2 * at) + product(2 * at + 1);
        }
        let mut out = sums;
        for (lane, out) in out.iter_mut().enumerate() {
            *out += i32::from(words[2 * lane]) + i32::from(words[2 * lane + 1]);
        }
        out
    }

    #[inline(always)]
    fn quad(self, from: &[i8; 4]) -> [i8; PACKED] {
        let mut out = [0; PACKED];
        for at in 0..PACKED {
            out[at] = from[at % 4];
        }
        out
    }

    #[inline(always)]
    fn store_plane(self, plane: [i8; PACKED], to: &mut [i8; PACKED]) {
        *to = plane;
    }

    #[inline(always)]
    fn splat_sums(self, sum: i32) -> [i32; LANES] {
        [sum; LANES]
    }

    #[inline(always)]
    fn load_plane(self, from: &[i8; PACKED]) -> [i8; PACKED] {
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
    fn byte_table(self, values: &[i8; 16]) -> [i8; PACKED] {
        std::array::from_fn(
            #[inline(always)]
            |at| values[at % 16],
        )
    }

    #[inline(always)]
    fn add_nibbles<const BOOK: bool>(
        self,
        sums: [i32; LANES],
        codes: [u8; PACKED],
        table: [i8; PACKED],
        low: [i8; PACKED],
        high: [i8; PACKED],
    ) -> [i32; LANES] {
        let mut words = [0_i16; PACKED];
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
    fn load_packed(self, from: &[u8; PACKED]) -> [u8; PACKED] {
        *from
    }

    #[inline(always)]
    fn table(self, values: &[i16; 16]) -> [i16; 16] {
        *values
    }

    #[inline(always)]
    fn look_up(self, codes: [u8; PACKED], table: [i16; 16]) -> [[i16; WORDS]; 4] {
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
    fn signed(self, codes: [u8; PACKED]) -> [[i16; WORDS]; 2] {
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
    fn unsigned(self, codes: [u8; PACKED]) -> [[i16; WORDS]; 2] {
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
    fn transpose(self, rows: [[u8; PACKED]; LANES]) -> [[u8; PACKED]; LANES] {
        let mut out = rows;
        for (i, row) in rows.iter().enumerate() {
            for (j, out) in out.iter_mut().enumerate() {
                out[4 * i..4 * i + 4].copy_from_slice(&row[4 * j..4 * j + 4]);
            }
        }
        out
    }

    #[inline(always)]
    fn transpose_floats(self, rows: [[f32; LANES]; LANES]) -> [[f32; LANES]; LANES] {
        let mut out = rows;
        for (i, row) in rows.iter().enumerate() {
            for (j, out) in out.iter_mut().enumerate() {
                out[i] = row[j];
            }
        }
        out
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
    fn pair(self, from: &[i16; 2]) -> [i16; WORDS] {
        let mut out = [from[0]; WORDS];
        for odd in out.iter_mut().skip(1).step_by(2) {
            *odd = from[1];
        }
        out
    }

    #[inline(always)]
    fn no_sums(self) -> [i32; LANES] {
        [0; LANES]
    }

    #[inline(always)]
    fn multiply(self, sums: [i32; LANES], a: [i16; WORDS], b: [i16; WORDS]) -> [i32; LANES] {
        let mut sums = sums;
        for (lane, sum) in sums.iter_mut().enumerate() {
            *sum += i32::from(a[2 * lane]) * i32::from(b[2 * lane]);
            *sum += i32::from(a[2 * lane + 1]) * i32::from(b[2 * lane + 1]);
        }
        sums
    }

    #[inline(always)]
    fn plus(self, a: [i32; LANES], b: [i32; LANES]) -> [i32; LANES] {
        let mut out = a;
        for (out, b) in out.iter_mut().zip(b) {
            *out += b;
        }
        out
    }

    #[inline(always)]
    fn floats(self, sums: [i32; LANES]) -> [f32; LANES] {
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
        out
    }

    #[inline(always)]
    fn places(self, lanes: &[u32; LANES]) -> [u32; LANES] {
        *lanes
    }

    #[inline(always)]
    fn spread(self, from: &[f32; LANES], places: [u32; LANES]) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for (out, place) in out.iter_mut().zip(places) {
            *out = from[place as usize % LANES];
        }
        out
    }

    #[inline(always)]
    fn spread_four(self, from: &[f32; 4], places: [u32; LANES]) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for (out, place) in out.iter_mut().zip(places) {
            *out = from[place as usize % 4];
        }
        out
    }

    #[inline(always)]
    fn values(self, codes: &[u8; 8], values: &[f32; 16], high_first: bool) -> [f32; LANES] {
        let mut out = [0.0; LANES];
        for (pair, &code) in out.chunks_exact_mut(2).zip(codes) {
            pair[usize::from(high_first)] = values[usize::from(code & 15)];
            pair[usize::from(!high_first)] = values[usize::from(code >> 4)];
        }
        out
    }
}
