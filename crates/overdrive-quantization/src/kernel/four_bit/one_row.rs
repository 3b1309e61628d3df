//! One row of activations: lanes are neighbouring weights of a row of the weight.
#![allow(unsafe_code)]

use std::ops::Range;

use super::activations::WordRows;
use super::coding::{ByCoding, Decode, by_coding};
use super::map::CodedMap;
use super::words::{PACKED, WORDS, Words, Work};
use crate::kernel::element::Element;
use crate::kernel::simd::LANES;
use crate::kernel::threads::Target;

/// Rows of the weight at a time: their sums are reduced together.
const TILE: usize = 4;

/// Some outputs of one map.
pub(super) struct OneRow<'a, T> {
    pub(super) x: &'a WordRows,
    pub(super) map: &'a CodedMap<'a>,
    pub(super) bias: Option<&'a [T]>,
    pub(super) outputs: Range<usize>,
    /// The column of the map's first output.
    pub(super) column: usize,
    pub(super) target: &'a Target<'a, T>,
}

impl<T: Element> Work for OneRow<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Words>(self, s: S) {
        by_coding(s, &self.map.coding, &self);
    }
}

impl<T: Element> ByCoding for &OneRow<'_, T> {
    #[inline(always)]
    fn run<S: Words, D: Decode<S>>(self, s: S, decode: D) {
        let padded = self.x.granules.next_multiple_of(LANES) + LANES;
        let mut scales = vec![0.0; padded * TILE];
        let mut output = self.outputs.start;
        while output + TILE <= self.outputs.end {
            self.tile::<S, D, TILE>(s, decode, output, &mut scales, padded);
            output += TILE;
        }
        while output < self.outputs.end {
            self.tile::<S, D, 1>(s, decode, output, &mut scales, padded);
            output += 1;
        }
    }
}

impl<T: Element> OneRow<'_, T> {
    /// `R` outputs.
    #[inline(always)]
    fn tile<S: Words, D: Decode<S>, const R: usize>(
        &self,
        s: S,
        decode: D,
        output: usize,
        scales: &mut [f32],
        padded: usize,
    ) {
        let (map, x) = (self.map, self.x);
        let mut sums = [s.splat(0.0); R];
        for (r, sum) in sums.iter_mut().enumerate() {
            let scales = &mut scales[r * padded..(r + 1) * padded];
            if let Some(offsets) = &map.offsets {
                let of_row = &mut scales[..x.granules];
                offsets.row(output + r, map.inputs, x.granule, of_row);
                *sum = dot(s, of_row, &x.sums);
            }
            let of_row = &mut scales[..x.granules];
            map.scales.row(output + r, map.inputs, x.granule, of_row);
            for (scale, x) in of_row.iter_mut().zip(&x.scales) {
                *scale *= x;
            }
        }
        let bytes = map.row_bytes();
        let codes = &map.codes[output * bytes..(output + R) * bytes];
        let lanes_granule = x.granule / D::PER_LANE;
        let places = s.places(&std::array::from_fn(
            #[inline(always)]
            |lane| u32::try_from(lane / lanes_granule).unwrap_or(0),
        ));
        let step = LANES / lanes_granule;
        let whole = bytes / PACKED;
        assert!(
            x.words.len() == x.units * D::PARTS * WORDS
                && x.units == bytes.div_ceil(PACKED)
                && scales.len() >= R * padded
                && x.units * step + LANES <= padded + LANES,
            "the sizes that `WordRows::new` and the caller gave"
        );
        let tile = Tile {
            words: &x.words,
            scales,
            padded,
            step,
            places,
        };
        for index in 0..whole {
            let packed = std::array::from_fn(
                #[inline(always)]
                |r| {
                    let from = r * bytes + index * PACKED;
                    // The same place of the next rows: several short streams at once are more than
                    // the machine foresees by itself.
                    s.prefetch(codes.as_ptr().wrapping_add(R * bytes + from));
                    // SAFETY: `index < bytes / PACKED`, so whole in row `r < R` of `codes`.
                    s.load_packed(unsafe { at(codes, from) })
                },
            );
            // SAFETY: `index < x.units`; sizes as above.
            unsafe { tile.add(s, decode, &mut sums, index, packed) };
        }
        if whole < x.units {
            let packed = std::array::from_fn(
                #[inline(always)]
                |r| {
                    let mut last = [0; PACKED];
                    let rest = &codes[r * bytes + whole * PACKED..(r + 1) * bytes];
                    last[..rest.len()].copy_from_slice(rest);
                    s.load_packed(&last)
                },
            );
            // SAFETY: as above.
            unsafe { tile.add(s, decode, &mut sums, whole, packed) };
        }
        let totals = match R {
            TILE => s.reduce_add_each([sums[0], sums[1 % R], sums[2 % R], sums[3 % R]]),
            _ => [s.reduce_add(sums[0]); 4],
        };
        for (r, total) in totals.into_iter().take(R).enumerate() {
            let bias = self.bias.map_or(0.0, |bias| bias[output + r].to_f32());
            let column = self.column + output + r;
            self.target.set(0, column, T::from_f32(total + bias));
        }
    }
}

/// What rows of the weight have in common.
struct Tile<'a, S: Words> {
    /// `(units, parts, 32)`
    words: &'a [i16],
    /// `(rows, padded)`
    scales: &'a [f32],
    padded: usize,
    /// Scales of a unit.
    step: usize,
    places: S::Places,
}

impl<S: Words> Tile<'_, S> {
    /// Adds the products of unit `unit`.
    ///
    /// # Safety
    /// `words` has that unit, and `scales` 16 numbers from `unit · step` on in each of `R` rows.
    #[inline(always)]
    unsafe fn add<D: Decode<S>, const R: usize>(
        &self,
        s: S,
        decode: D,
        sums: &mut [S::F; R],
        unit: usize,
        packed: [S::Packed; R],
    ) {
        let words: [S::I; 4] = std::array::from_fn(
            #[inline(always)]
            |part| {
                let part = part % D::PARTS;
                // SAFETY: `part < PARTS`, and the caller's promise.
                s.load_words(unsafe { at(self.words, (unit * D::PARTS + part) * WORDS) })
            },
        );
        for (r, sum) in sums.iter_mut().enumerate() {
            let weights = decode.words(s, packed[r]);
            let mut total = s.no_sums();
            for part in 0..D::PARTS {
                total = s.multiply(total, weights[part], words[part]);
            }
            // SAFETY: the caller's promise.
            let scales = unsafe { at(self.scales, r * self.padded + unit * self.step) };
            *sum = s.mul_add(s.floats(total), s.spread(scales, self.places), *sum);
        }
    }
}

/// `Σ a · b`, in the lanes of a vector.
#[inline(always)]
fn dot<S: Words>(s: S, a: &[f32], b: &[f32]) -> S::F {
    let mut sum = s.splat(0.0);
    let (a, rest_a) = a.as_chunks::<LANES>();
    let (b, rest_b) = b.as_chunks::<LANES>();
    for (a, b) in a.iter().zip(b) {
        sum = s.mul_add(s.load_f32(a), s.load_f32(b), sum);
    }
    let mut last = [[0.0; LANES]; 2];
    last[0][..rest_a.len()].copy_from_slice(rest_a);
    let rest_b = if b.len() > a.len() { &b[a.len()][..] } else { rest_b };
    let count = rest_a.len().min(rest_b.len());
    last[1][..count].copy_from_slice(&rest_b[..count]);
    s.mul_add(s.load_f32(&last[0]), s.load_f32(&last[1]), sum)
}

/// `N` elements from `first` on.
///
/// # Safety
/// `first + N <= all.len()`.
#[inline(always)]
pub(super) unsafe fn at<E, const N: usize>(all: &[E], first: usize) -> &[E; N] {
    debug_assert!(first + N <= all.len(), "the caller's promise");
    // SAFETY: the caller's promise; an array has the alignment of its elements.
    unsafe { &*all.as_ptr().add(first).cast() }
}
