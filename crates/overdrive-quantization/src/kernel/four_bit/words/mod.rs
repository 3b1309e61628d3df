//! Vectors of packed codes and of 16-bit words, for each instruction set.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod portable;

use crate::kernel::simd::{InstructionSet, LANES, Simd};

/// Bytes of packed codes in a vector.
pub(crate) const PACKED: usize = 64;

/// Words of 16 bits in a vector.
pub(crate) const WORDS: usize = 32;

/// What products of packed codes need beside the floats of [`Simd`].
///
/// A vector of packed codes has 16 lanes of four bytes. Codes become words of 16 bits, two in each
/// lane, and stay in their lane: a lane's sum belongs to 8 neighbouring weights of 4 bits, or to 4 of 8.
pub(crate) trait Words: Simd {
    /// [`PACKED`] bytes of codes.
    type Packed: Copy;
    /// [`WORDS`] words.
    type I: Copy;
    /// 16 words, to look up.
    type Table: Copy;
    /// 16 sums of 32 bits.
    type Sums: Copy;
    /// Which of 16 floats goes to which lane.
    type Places: Copy;
    /// [`PACKED`] signed bytes.
    type Plane: Copy;

    /// Rows of activations whose sums fit the registers: 8 or 4.
    const ROWS: usize;

    /// What [`add_nibbles`](Self::add_nibbles) adds to each number of a table: its sums are too large by
    /// this times the sum of the activations.
    const BOOK_ZERO: i32 = 0;

    /// Rows of activations whose sums of bytes fit the registers, for each of [`BYTE_VECTORS`].
    ///
    /// [`BYTE_VECTORS`]: Self::BYTE_VECTORS
    const BYTE_ROWS: usize = 4;

    /// Vectors of outputs whose sums of bytes fit the registers: 1 or 2.
    const BYTE_VECTORS: usize = 1;

    /// Low and high halves of bytes as [`add_nibbles`](Self::add_nibbles) multiplies them.
    fn nibbles<const BOOK: bool>(self, codes: Self::Packed, table: Self::Plane)
    -> [Self::Plane; 2];
    /// Adds the four products of each lane, of numbers that [`nibbles`](Self::nibbles) made and of bytes in
    /// `-127..=127`.
    fn add_bytes(self, sums: Self::Sums, numbers: Self::Plane, bytes: Self::Plane) -> Self::Sums;
    /// Four bytes in every lane.
    fn quad(self, from: &[i8; 4]) -> Self::Plane;
    fn store_plane(self, plane: Self::Plane, to: &mut [i8; PACKED]);
    fn splat_sums(self, sum: i32) -> Self::Sums;

    fn load_plane(self, from: &[i8; PACKED]) -> Self::Plane;
    fn load_sums(self, from: &[i32; LANES]) -> Self::Sums;
    fn store_sums(self, sums: Self::Sums, to: &mut [i32; LANES]);
    /// 16 numbers in `-127..=127`, to look up.
    fn byte_table(self, values: &[i8; 16]) -> Self::Plane;
    /// Adds the products of the low halves of bytes with `low` and of the high halves with `high`, eight
    /// to a lane: of the codes themselves, or where `BOOK` of the numbers that they choose from `table`,
    /// plus [`BOOK_ZERO`](Self::BOOK_ZERO).
    fn add_nibbles<const BOOK: bool>(
        self,
        sums: Self::Sums,
        codes: Self::Packed,
        table: Self::Plane,
        low: Self::Plane,
        high: Self::Plane,
    ) -> Self::Sums;

    fn load_packed(self, from: &[u8; PACKED]) -> Self::Packed;
    fn table(self, values: &[i16; 16]) -> Self::Table;
    /// The words that the lowest, second, third and highest 4 bits of each 16 stand for.
    fn look_up(self, codes: Self::Packed, table: Self::Table) -> [Self::I; 4];
    /// The lower and the higher byte of each 16 bits, signed.
    fn signed(self, codes: Self::Packed) -> [Self::I; 2];
    /// The lower and the higher byte of each 16 bits.
    fn unsigned(self, codes: Self::Packed) -> [Self::I; 2];
    /// Lane `j` of vector `i` becomes lane `i` of vector `j`.
    fn transpose(self, rows: [Self::Packed; LANES]) -> [Self::Packed; LANES];

    fn transpose_floats(self, rows: [Self::F; LANES]) -> [Self::F; LANES];

    fn load_words(self, from: &[i16; WORDS]) -> Self::I;
    fn store_words(self, words: Self::I, to: &mut [i16; WORDS]);
    /// Two words in every lane.
    fn pair(self, from: &[i16; 2]) -> Self::I;
    fn no_sums(self) -> Self::Sums;
    /// Adds the two products of each lane. The caller sees to it that sums fit 32 bits.
    fn multiply(self, sums: Self::Sums, a: Self::I, b: Self::I) -> Self::Sums;
    fn plus(self, a: Self::Sums, b: Self::Sums) -> Self::Sums;
    fn floats(self, sums: Self::Sums) -> Self::F;

    /// `lanes` rise, from 0.
    fn places(self, lanes: &[u32; LANES]) -> Self::Places;
    fn spread(self, from: &[f32; LANES], places: Self::Places) -> Self::F;
    /// The same, for places within the first four.
    fn spread_four(self, from: &[f32; 4], places: Self::Places) -> Self::F;
    /// What 16 codes of 4 bits stand for, in order; the low half of a byte is first unless `high_first`.
    fn values(self, codes: &[u8; 8], values: &[f32; 16], high_first: bool) -> Self::F;
}

/// Work that is compiled for each instruction set.
pub(crate) trait Work {
    type Output;
    /// Implementations are `#[inline(always)]`.
    fn run<S: Words>(self, simd: S) -> Self::Output;
}

/// Runs `work` compiled for `set`.
#[inline]
pub(crate) fn run_on<W: Work>(set: InstructionSet, work: W) -> W::Output {
    match set {
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx512(simd) => avx512::run(simd, work),
        #[cfg(target_arch = "x86_64")]
        InstructionSet::Avx2(simd) => avx2::run(simd, work),
        InstructionSet::Portable => work.run(crate::kernel::simd::portable::Portable),
    }
}
