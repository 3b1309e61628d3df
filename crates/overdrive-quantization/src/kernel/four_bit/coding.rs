//! How packed codes become words, as a type: each product is compiled for each.

use super::map::{Coding, WordTable};
use super::words::Words;

/// Makes words of packed codes.
pub(super) trait Decode<S: Words>: Copy {
    /// Vectors of words that come of one of codes.
    const PARTS: usize;
    /// Weights in a lane.
    const PER_LANE: usize = 2 * Self::PARTS;

    /// Only the first `PARTS` mean anything.
    fn words(self, s: S, packed: S::Packed) -> [S::I; 4];
}

#[derive(Clone, Copy)]
struct Nibbles<T>(T);

impl<S: Words> Decode<S> for Nibbles<S::Table> {
    const PARTS: usize = 4;

    #[inline(always)]
    fn words(self, s: S, packed: S::Packed) -> [S::I; 4] {
        s.look_up(packed, self.0)
    }
}

#[derive(Clone, Copy)]
struct Signed;

impl<S: Words> Decode<S> for Signed {
    const PARTS: usize = 2;

    #[inline(always)]
    fn words(self, s: S, packed: S::Packed) -> [S::I; 4] {
        let [a, b] = s.signed(packed);
        [a, b, a, b]
    }
}

#[derive(Clone, Copy)]
struct Unsigned;

impl<S: Words> Decode<S> for Unsigned {
    const PARTS: usize = 2;

    #[inline(always)]
    fn words(self, s: S, packed: S::Packed) -> [S::I; 4] {
        let [a, b] = s.unsigned(packed);
        [a, b, a, b]
    }
}

/// Work that is compiled for each coding.
pub(super) trait ByCoding {
    fn run<S: Words, D: Decode<S>>(self, s: S, decode: D);
}

#[inline(always)]
pub(super) fn by_coding<S: Words>(s: S, coding: &Coding, work: impl ByCoding) {
    match coding {
        Coding::Nibbles { values, .. } => {
            work.run(s, Nibbles(s.table(&WordTable::new(values).words)));
        }
        Coding::Signed => work.run(s, Signed),
        Coding::Unsigned => work.run(s, Unsigned),
    }
}
