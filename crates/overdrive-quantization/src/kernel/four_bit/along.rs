//! One to three rows of activations: lanes are neighbouring weights of a row of the weight.
//!
//! Codes become words in registers and are forgotten.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ops::Range;

use super::activations::WordRows;
use super::coding::{ByCoding, Decode, by_coding};
use super::lines::Lines;
use super::map::CodedMap;
use super::part::Results;
use super::prepare::{Raw, ScaleRows, groups_of};
use super::words::{PACKED, WORDS, Words, Work};
use crate::kernel::simd::LANES;

/// Most rows of activations.
pub(super) const MOST: usize = 3;

/// Rows of the weight at a time: their sums are reduced together.
const TILE: usize = 4;

/// Rows of the weight whose scales are made at a time.
const BATCH: usize = 8;

/// Some outputs of one map.
pub(super) struct Along<'a> {
    pub(super) x: &'a WordRows,
    pub(super) map: &'a CodedMap<'a>,
    pub(super) outputs: Range<usize>,
    pub(super) results: &'a dyn Results,
}

/// What a thread needs for a batch; kept from call to call.
#[derive(Default)]
struct Scratch {
    /// Scales as they are read.
    raw: Raw,
    /// Scales times the scales of activations, `(batch, rows, stride)`.
    products: Lines<f32>,
    /// What offsets add, `(batch, rows)`.
    added: Vec<f32>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

impl Work for Along<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Words>(self, s: S) {
        by_coding(s, &self.map.coding, &self);
    }
}

impl ByCoding for &Along<'_> {
    #[inline(always)]
    fn run<S: Words, D: Decode<S>>(self, s: S, decode: D) {
        // Scales of a unit.
        let step = LANES * D::PER_LANE / self.x.granule;
        if step <= 4 {
            self.rows::<S, D, true>(s, decode);
        } else {
            self.rows::<S, D, false>(s, decode);
        }
    }
}

impl Along<'_> {
    /// `F` where a unit has at most four scales.
    #[inline(always)]
    fn rows<S: Words, D: Decode<S>, const F: bool>(&self, s: S, decode: D) {
        let mut scratch = SCRATCH.take();
        let rows = ScaleRows::new(self.map.inputs, self.x.granule);
        let lanes_granule = self.x.granule / D::PER_LANE;
        let shape = Shape {
            stride: rows.stride,
            step: LANES / lanes_granule,
            places: s.places(&groups_of(lanes_granule)),
        };
        let mut output = self.outputs.start;
        while output < self.outputs.end {
            let count = BATCH.min(self.outputs.end - output);
            self.prepare(s, &rows, output, count, &mut scratch);
            let mut index = 0;
            while index < count {
                let held = TILE.min(count - index);
                // The second row of activations finds the codes in the first cache.
                for n in 0..self.x.rows {
                    self.tile::<S, D, F>(s, decode, output, (index, held), n, &shape, &scratch);
                }
                index += TILE;
            }
            output += count;
        }
        SCRATCH.set(scratch);
    }

    /// Scales of `count` rows of the weight, times those of the activations; and what offsets add.
    #[inline(always)]
    fn prepare<S: Words>(
        &self,
        s: S,
        rows: &ScaleRows,
        output: usize,
        count: usize,
        scratch: &mut Scratch,
    ) {
        let (x, map, rows_of_x) = (self.x, self.map, self.x.rows);
        scratch.products.grow(BATCH * rows_of_x * rows.stride);
        scratch.added.resize(BATCH * rows_of_x, 0.0);
        let each = x.stride;
        // Memory works on while scales are made.
        let bytes = map.row_bytes();
        for index in 0..count {
            let row = map.codes.as_ptr().wrapping_add((output + index) * bytes);
            for line in 0..bytes / PACKED / 4 {
                s.prefetch_near(row.wrapping_add(line * PACKED));
            }
        }
        if let Some(offsets) = &map.offsets {
            let made = rows.make(s, offsets, output, count, &mut scratch.raw);
            for index in 0..count {
                for n in 0..rows_of_x {
                    let mut sum = s.splat(0.0);
                    for vector in 0..each / LANES {
                        let of_row = &x.sums[n * each + vector * LANES..];
                        if let Some(of_row) = of_row.first_chunk() {
                            let offset = made.vector(s, index, vector);
                            sum = s.mul_add(offset, s.load_f32(of_row), sum);
                        }
                    }
                    scratch.added[index * rows_of_x + n] = s.reduce_add(sum);
                }
            }
        }
        let made = rows.make(s, &map.scales, output, count, &mut scratch.raw);
        for index in 0..count {
            for vector in 0..each / LANES {
                let scale = made.vector(s, index, vector);
                self.store(s, scale, index, vector, rows.stride, &mut scratch.products);
            }
            // The last unit may look beyond the granules, where another row's scale times zero need not
            // be zero.
            for n in 0..rows_of_x {
                let of_row = (index * rows_of_x + n) * rows.stride;
                scratch.products[of_row + x.granules..of_row + each].fill(0.0);
            }
        }
    }

    /// Writes 16 scales of a row of the weight times those of each row of activations.
    #[inline(always)]
    fn store<S: Words>(
        &self,
        s: S,
        scale: S::F,
        index: usize,
        vector: usize,
        stride: usize,
        products: &mut [f32],
    ) {
        let rows_of_x = self.x.rows;
        for n in 0..rows_of_x {
            let of_row = &self.x.scales[n * self.x.stride + vector * LANES..];
            let out = &mut products[(index * rows_of_x + n) * stride + vector * LANES..];
            if let (Some(of_row), Some(out)) = (of_row.first_chunk(), out.first_chunk_mut()) {
                s.store_f32(s.mul(scale, s.load_f32(of_row)), out);
            }
        }
    }

    /// Some outputs, at most [`TILE`], from the batch's `index` on, of row `n` of the activations; the last
    /// stands for those that are missing.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "the batch, and the place in it")]
    fn tile<S: Words, D: Decode<S>, const F: bool>(
        &self,
        s: S,
        decode: D,
        batch: usize,
        (index, held): (usize, usize),
        n: usize,
        shape: &Shape<S>,
        scratch: &Scratch,
    ) {
        let (map, x) = (self.map, self.x);
        let output = batch + index;
        let mut sums = [s.splat(0.0); TILE];
        let bytes = map.row_bytes();
        let codes = &map.codes[output * bytes..(output + held) * bytes];
        let stride = shape.stride;
        let tile = Tile {
            words: &x.words,
            scales: &scratch.products[index * x.rows * stride..(index + TILE) * x.rows * stride],
            shape: *shape,
            rows: x.rows,
            row: n,
        };
        let whole = bytes / PACKED;
        assert!(
            n < x.rows
                && x.words.len() == x.units * x.rows * D::PARTS * WORDS
                && x.units == bytes.div_ceil(PACKED)
                && x.units * shape.step + LANES <= stride + shape.step,
            "the sizes that `WordRows` and `ScaleRows` have"
        );
        let mut packed = [s.load_packed(&[0; PACKED]); TILE];
        for unit in 0..whole {
            for (r, packed) in packed.iter_mut().enumerate() {
                let from = r.min(held - 1) * bytes + unit * PACKED;
                s.prefetch_near(codes.as_ptr().wrapping_add(from + AHEAD));
                // SAFETY: `unit < bytes / PACKED`, so whole in a row of `codes`.
                *packed = s.load_packed(unsafe { at(codes, from) });
            }
            // SAFETY: `unit < x.units`; sizes as above.
            unsafe { tile.add::<D, F>(s, decode, &mut sums, unit, packed) };
        }
        if whole < x.units {
            for (r, packed) in packed.iter_mut().enumerate() {
                let mut last = [0; PACKED];
                let row = r.min(held - 1);
                let rest = &codes[row * bytes + whole * PACKED..(row + 1) * bytes];
                last[..rest.len()].copy_from_slice(rest);
                *packed = s.load_packed(&last);
            }
            // SAFETY: as above.
            unsafe { tile.add::<D, F>(s, decode, &mut sums, whole, packed) };
        }
        let mut totals = s.reduce_add_each(sums);
        if map.offsets.is_some() {
            for (r, total) in totals.iter_mut().enumerate() {
                *total += scratch.added[(index + r) * x.rows + n];
            }
        }
        self.results.put(n, output, &totals[..held]);
    }
}

/// Bytes of codes that are asked for before they are needed.
const AHEAD: usize = 8192;

/// What the units of some rows of the weight have in common.
struct Tile<'a, S: Words> {
    /// `(units, rows, parts, 32)`
    words: &'a [i16],
    /// `(TILE, rows, stride)`
    scales: &'a [f32],
    shape: Shape<S>,
    /// Rows of activations, and the one that is multiplied.
    rows: usize,
    row: usize,
}

/// How the scales of a row lie.
#[derive(Clone, Copy)]
struct Shape<S: Words> {
    stride: usize,
    /// Scales of a unit.
    step: usize,
    /// Which of them belongs to which lane.
    places: S::Places,
}

impl<S: Words> Tile<'_, S> {
    /// Adds the products of unit `unit`.
    ///
    /// # Safety
    /// `words` has that unit, and `scales` 16 numbers from `unit · step` on in each of `TILE · rows` rows.
    #[inline(always)]
    unsafe fn add<D: Decode<S>, const F: bool>(
        &self,
        s: S,
        decode: D,
        sums: &mut [S::F; TILE],
        unit: usize,
        packed: [S::Packed; TILE],
    ) {
        for (r, sum) in sums.iter_mut().enumerate() {
            let weights = decode.words(s, packed[r]);
            let mut total = s.no_sums();
            for (part, weights) in weights.into_iter().enumerate().take(D::PARTS) {
                let from = ((unit * self.rows + self.row) * D::PARTS + part) * WORDS;
                // SAFETY: `row < rows` and `part < PARTS`, and the caller's promise.
                let words = s.load_words(unsafe { at(self.words, from) });
                total = s.multiply(total, weights, words);
            }
            let from = (r * self.rows + self.row) * self.shape.stride + unit * self.shape.step;
            let scales = if F {
                // Four at once seldom lie in two lines of the cache.
                // SAFETY: the caller's promise.
                s.spread_four(unsafe { at(self.scales, from) }, self.shape.places)
            } else {
                // SAFETY: the caller's promise.
                s.spread(unsafe { at(self.scales, from) }, self.shape.places)
            };
            *sum = s.mul_add(s.floats(total), scales, *sum);
        }
    }
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
