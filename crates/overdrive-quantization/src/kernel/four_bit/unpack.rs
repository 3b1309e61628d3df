//! The unpacking of codes to words, as a type for each coding, for which kernels are compiled.

use overdrive_kernels::Simd;

use super::coded_weight::{Coding, WordTable};

/// A way to unpack codes to words.
pub(super) trait Decode<S: Simd>: Copy {
    /// The number of vectors of words in a vector of codes.
    const PARTS: usize;
    /// The number of codes in a lane.
    const PER_LANE: usize = 2 * Self::PARTS;

    /// Returns the words; only the first `PARTS` vectors are meaningful.
    fn words(self, s: S, packed: S::Packed) -> [S::Words; 4];
}

#[derive(Clone, Copy)]
struct Nibbles<T>(T);

impl<S: Simd> Decode<S> for Nibbles<S::WordTable> {
    const PARTS: usize = 4;

    #[inline(always)]
    fn words(self, s: S, packed: S::Packed) -> [S::Words; 4] {
        s.look_up_words(packed, self.0)
    }
}

#[derive(Clone, Copy)]
struct Signed;

impl<S: Simd> Decode<S> for Signed {
    const PARTS: usize = 2;

    #[inline(always)]
    fn words(self, s: S, packed: S::Packed) -> [S::Words; 4] {
        let [a, b] = s.widen_signed(packed);
        // Repeated to the length that codes of 4 bits need.
        [a, b, a, b]
    }
}

#[derive(Clone, Copy)]
struct Unsigned;

impl<S: Simd> Decode<S> for Unsigned {
    const PARTS: usize = 2;

    #[inline(always)]
    fn words(self, s: S, packed: S::Packed) -> [S::Words; 4] {
        let [a, b] = s.widen_unsigned(packed);
        [a, b, a, b]
    }
}

/// A kernel that is compiled for each coding.
pub(super) trait ByCoding {
    fn run<S: Simd, D: Decode<S>>(self, s: S, decode: D);
}

/// Runs `work` compiled for `coding`.
#[inline(always)]
pub(super) fn by_coding<S: Simd>(s: S, coding: &Coding, work: impl ByCoding) {
    match coding {
        Coding::Nibbles { values, .. } => {
            work.run(s, Nibbles(s.word_table(&WordTable::new(values).words)));
        }
        Coding::Signed => work.run(s, Signed),
        Coding::Unsigned => work.run(s, Unsigned),
    }
}
