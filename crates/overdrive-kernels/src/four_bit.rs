//! The operations of kernels on 4-bit codes.

use crate::{BYTES, Floats, LANES};

/// The number of 16-bit words in a vector.
pub const WORDS: usize = 32;

/// The operations on packed codes of 4 and 8 bits, and on the 16-bit words and bytes that they are unpacked to.
///
/// A vector of packed codes has 16 lanes of four bytes. Codes are unpacked to 16-bit words, two in each lane, and
/// stay in their lane: the sum of a lane is that of 8 neighbouring codes of 4 bits, or of 4 codes of 8 bits.
///
/// A value of an implementing type is a proof that the machine has the instructions.
pub trait FourBit: Floats {
    /// [`BYTES`] bytes of packed codes.
    type Packed: Copy;
    /// [`WORDS`] words.
    type Words: Copy;
    /// A table of 16 words.
    type WordTable: Copy;
    /// 16 sums of 32 bits.
    type Sums: Copy;
    /// The index of a float for each of 16 lanes. Only [`lane_indices`](Self::lane_indices) creates them: with others,
    /// [`permute`](Self::permute) could read beyond its floats.
    ///
    /// ```compile_fail
    /// use overdrive_kernels::{FourBit, arch::Avx2};
    ///
    /// fn beyond(set: Avx2, from: &[f32; 16]) {
    ///     let lanes = set.lane_indices(&[0; 16]);
    ///     set.permute(from, ([1 << 20; 2], lanes.1));
    /// }
    /// ```
    type Lanes: Copy;
    /// [`BYTES`] signed bytes.
    type Bytes: Copy;

    /// The number of rows of activations whose sums of words fit the registers: 8 or 4.
    const WORD_ROWS: usize;
    /// The offset that kernels add to each value of a table and to each signed 8-bit code: their sums are too large
    /// by this times the sum of the activations.
    const BOOK_ZERO: i32 = 0;
    /// The number of rows of activations whose sums of bytes fit the registers: 4, or 8 if the sums of all groups fit
    /// beside those of one.
    const BYTE_ROWS: usize = 4;
    /// If `true`, [`dot_pairs`](Self::dot_pairs) is faster than [`dot_bytes`](Self::dot_bytes) for sums of products of
    /// codes.
    const PAIRS: bool = false;

    /// Reads packed codes.
    fn load_packed(self, from: &[u8; BYTES]) -> Self::Packed;
    /// Transposes the matrix of lanes: lane `j` of vector `i` becomes lane `i` of vector `j`.
    fn transpose_packed(self, rows: [Self::Packed; LANES]) -> [Self::Packed; LANES];
    /// Transposes a matrix of floats.
    fn transpose_floats(self, rows: [Self::F; LANES]) -> [Self::F; LANES];
    /// Transposes the square matrix of the first registers, as many as a register has lanes.
    fn transpose_square(self, rows: &mut [Self::F32; LANES]);

    /// Reads a table of 16 words.
    fn word_table(self, values: &[i16; 16]) -> Self::WordTable;
    /// Returns the words of the lowest, second, third and highest 4 bits of each 16.
    fn look_up_words(self, codes: Self::Packed, table: Self::WordTable) -> [Self::Words; 4];
    /// Returns the lower and the higher byte of each 16 bits as signed words.
    fn widen_signed(self, codes: Self::Packed) -> [Self::Words; 2];
    /// Returns the lower and the higher byte of each 16 bits as unsigned words.
    fn widen_unsigned(self, codes: Self::Packed) -> [Self::Words; 2];
    /// Reads words.
    fn load_words(self, from: &[i16; WORDS]) -> Self::Words;
    /// Writes words.
    fn store_words(self, words: Self::Words, to: &mut [i16; WORDS]);
    /// Returns two words in every lane.
    fn splat_pair(self, from: &[i16; 2]) -> Self::Words;

    /// Reads a table of 16 numbers in `-127..=127`.
    fn byte_table(self, values: &[i8; 16]) -> Self::Bytes;
    /// Returns the low and the high halves of bytes as numbers: the codes themselves, or where `BOOK` the
    /// numbers of `table`, as [`dot_nibbles`](Self::dot_nibbles) multiplies them.
    fn unpack_nibbles<const BOOK: bool>(
        self,
        codes: Self::Packed,
        table: Self::Bytes,
    ) -> [Self::Bytes; 2];
    /// Returns 8-bit codes as [`dot_bytes`](Self::dot_bytes) multiplies them: signed codes plus
    /// [`BOOK_ZERO`](Self::BOOK_ZERO), unsigned codes plus `BOOK_ZERO - 128`.
    fn unpack_bytes<const SIGNED: bool>(self, codes: Self::Packed) -> Self::Bytes;
    /// Reads bytes.
    fn load_bytes(self, from: &[i8; BYTES]) -> Self::Bytes;
    /// Writes bytes.
    fn store_bytes(self, bytes: Self::Bytes, to: &mut [i8; BYTES]);
    /// Returns four bytes in every lane.
    fn splat_quad(self, from: &[i8; 4]) -> Self::Bytes;

    /// Returns sums of zero.
    fn zero_sums(self) -> Self::Sums;
    /// Returns equal sums.
    fn splat_sums(self, sum: i32) -> Self::Sums;
    /// Reads sums.
    fn load_sums(self, from: &[i32; LANES]) -> Self::Sums;
    /// Writes sums.
    fn store_sums(self, sums: Self::Sums, to: &mut [i32; LANES]);
    /// Returns the sums of four lanes each: lane `4 q + r` is that of the lanes `4 q ..` of vector `r`.
    fn sum_fours(self, sums: [Self::Sums; 4]) -> Self::Sums;
    /// Returns `a + b`.
    fn merge_sums(self, a: Self::Sums, b: Self::Sums) -> Self::Sums;
    /// Converts sums to floats, rounded to nearest.
    fn sums_to_f32(self, sums: Self::Sums) -> Self::F;
    /// Adds the two products of words of each lane. The caller ensures that sums fit 32 bits.
    fn dot_words(self, sums: Self::Sums, a: Self::Words, b: Self::Words) -> Self::Sums;
    /// Adds the four products of each lane, of numbers that [`unpack_nibbles`](Self::unpack_nibbles) or
    /// [`unpack_bytes`](Self::unpack_bytes) returned and of bytes in `-127..=127`.
    fn dot_bytes(self, sums: Self::Sums, numbers: Self::Bytes, bytes: Self::Bytes) -> Self::Sums;
    /// Adds the products of each two neighbouring codes of 4 bits, not of a table, to a word. At most 8 calls fit the
    /// words: `8 · 2 · 15 · 127 < 2¹⁵`.
    fn dot_pairs(self, sums: Self::Words, codes: Self::Bytes, bytes: Self::Bytes) -> Self::Words;
    /// Adds the products of the low halves of bytes with `low` and of the high halves with `high`, eight in
    /// each lane: of the codes themselves, or where `BOOK` of the numbers that they choose from `table`, plus
    /// [`BOOK_ZERO`](Self::BOOK_ZERO).
    fn dot_nibbles<const BOOK: bool>(
        self,
        sums: Self::Sums,
        codes: Self::Packed,
        table: Self::Bytes,
        low: Self::Bytes,
        high: Self::Bytes,
    ) -> Self::Sums;

    /// Reads the indices of [`permute`](Self::permute), which do not decrease and begin at 0.
    fn lane_indices(self, lanes: &[u32; LANES]) -> Self::Lanes;
    /// Returns the float of each lane's index.
    fn permute(self, from: &[f32; LANES], lanes: Self::Lanes) -> Self::F;
    /// Returns the numbers of 16 codes of 4 bits, in order; the low half of a byte is first unless
    /// `high_first`.
    fn decode_nibbles(self, codes: &[u8; 8], values: &[f32; 16], high_first: bool) -> Self::F;
}
