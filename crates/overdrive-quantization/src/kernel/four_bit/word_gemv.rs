//! The GEMV of one to three rows of activations in words. The lanes are neighbouring elements of a row of the
//! weight, whose codes are unpacked in registers.
#![allow(unsafe_code)]

use std::ops::Range;

use overdrive_kernels::{BYTES, Buffers, Kept, Kernel, LANES, Simd, WORDS, capacity_bytes};

use super::aligned::AlignedVec;
use super::coded_weight::CodedWeight;
use super::scale_rows::{Raw, ScaleRows, groups_of};
use super::unpack::{ByCoding, Decode, by_coding};
use super::word_rows::WordRows;
use crate::kernel::at;
use crate::kernel::joint_gemm::Results;

/// The largest number of rows of activations.
pub(super) const MAX_ROWS: usize = 3;

/// The number of rows of the weight at a time: their sums are reduced together.
const TILE: usize = 4;

/// The number of rows of the weight whose scales are read at a time.
const BATCH: usize = 8;

/// The GEMV of some outputs.
pub(super) struct WordGemv<'a> {
    pub(super) x: &'a WordRows,
    pub(super) weight: &'a CodedWeight<'a>,
    pub(super) outputs: Range<usize>,
    pub(super) results: &'a mut dyn Results,
}

/// The buffers of a batch, kept from call to call.
#[derive(Default)]
struct Scratch {
    /// The buffers of scales while they are read.
    raw: Raw,
    /// The scales times those of activations, `(batch, rows, stride)`.
    products: AlignedVec<f32>,
    /// The contribution of the offsets, `(batch, rows)`.
    added: Vec<f32>,
}

impl Buffers for Scratch {
    fn bytes(&self) -> usize {
        self.raw.bytes() + self.products.bytes() + capacity_bytes(&self.added)
    }
}

thread_local! {
    static SCRATCH: Kept<Scratch> = const { Kept::new() };
}

impl Kernel for WordGemv<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        by_coding(s, &self.weight.coding, &mut self);
    }
}

impl ByCoding for &mut WordGemv<'_> {
    #[inline(always)]
    fn run<S: Simd, D: Decode<S>>(self, s: S, decode: D) {
        // The number of scales of a unit.
        let step = LANES * D::PER_LANE / self.x.granule;
        if step <= 4 {
            self.rows::<S, D, true>(s, decode);
        } else {
            self.rows::<S, D, false>(s, decode);
        }
    }
}

impl WordGemv<'_> {
    /// Computes all outputs; `F` if a unit has at most four scales.
    #[inline(always)]
    fn rows<S: Simd, D: Decode<S>, const F: bool>(&mut self, s: S, decode: D) {
        let mut scratch = Kept::take(&SCRATCH);
        let rows = ScaleRows::new(self.weight.inputs, self.x.granule);
        let lanes_granule = self.x.granule / D::PER_LANE;
        let shape = Shape {
            stride: rows.stride,
            step: LANES / lanes_granule,
            lanes: s.lane_indices(&groups_of(lanes_granule)),
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
        Kept::put(&SCRATCH, scratch);
    }

    /// Computes the scales of `count` rows of the weight times those of the activations, and the contribution of
    /// the offsets.
    #[inline(always)]
    fn prepare<S: Simd>(
        &self,
        s: S,
        rows: &ScaleRows,
        output: usize,
        count: usize,
        scratch: &mut Scratch,
    ) {
        let (x, weight, rows_of_x) = (self.x, self.weight, self.x.rows);
        scratch.products.grow(BATCH * rows_of_x * rows.stride);
        scratch.added.resize(BATCH * rows_of_x, 0.0);
        let each = x.stride;
        // The codes are loaded while the scales are computed.
        let bytes = weight.row_bytes();
        for index in 0..count {
            let row = weight.codes.as_ptr().wrapping_add((output + index) * bytes);
            for line in 0..bytes / BYTES / 4 {
                s.prefetch_near(row.wrapping_add(line * BYTES));
            }
        }
        if let Some(offsets) = &weight.offsets {
            let made = rows.read(s, offsets, output, count, &mut scratch.raw);
            for index in 0..count {
                for n in 0..rows_of_x {
                    let mut sum = s.splat(0.0);
                    for vector in 0..each / LANES {
                        let of_row = &x.sums[n * each + vector * LANES..];
                        if let Some(of_row) = of_row.first_chunk() {
                            let offset = made.vector(s, index, vector);
                            // Beyond the granules are offsets of other rows, and one that is NaN times zero would
                            // not be zero.
                            let offset = match x.granules - vector * LANES {
                                LANES.. => offset,
                                rest => {
                                    let mut own = [0.0; LANES];
                                    s.store_f32(offset, &mut own);
                                    own[rest..].fill(0.0);
                                    s.load_f32(&own)
                                }
                            };
                            sum = s.mul_add(offset, s.load_f32(of_row), sum);
                        }
                    }
                    scratch.added[index * rows_of_x + n] = s.reduce_add(sum);
                }
            }
        }
        let made = rows.read(s, &weight.scales, output, count, &mut scratch.raw);
        for index in 0..count {
            for vector in 0..each / LANES {
                let scale = made.vector(s, index, vector);
                self.store(s, scale, index, vector, rows.stride, &mut scratch.products);
            }
            // The last unit may read beyond the granules, where the scale of another row times zero may be
            // NaN.
            for n in 0..rows_of_x {
                let of_row = (index * rows_of_x + n) * rows.stride;
                scratch.products[of_row + x.granules..of_row + each].fill(0.0);
            }
        }
    }

    /// Writes 16 scales of a row of the weight times those of each row of activations.
    #[inline(always)]
    fn store<S: Simd>(
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

    /// Computes some outputs, at most [`TILE`], from `index` of the batch on, of row `n` of the activations. The
    /// last output replaces missing ones.
    #[inline(always)]
    #[allow(clippy::too_many_arguments, reason = "the batch, and the index in it")]
    fn tile<S: Simd, D: Decode<S>, const F: bool>(
        &mut self,
        s: S,
        decode: D,
        batch: usize,
        (index, held): (usize, usize),
        n: usize,
        shape: &Shape<S>,
        scratch: &Scratch,
    ) {
        let (weight, x) = (self.weight, self.x);
        let output = batch + index;
        let mut sums = [s.splat(0.0); TILE];
        let bytes = weight.row_bytes();
        let codes = &weight.codes[output * bytes..(output + held) * bytes];
        let stride = shape.stride;
        let tile = Tile {
            words: &x.words,
            scales: &scratch.products[index * x.rows * stride..(index + TILE) * x.rows * stride],
            shape: *shape,
            rows: x.rows,
            row: n,
        };
        let whole = bytes / BYTES;
        assert!(
            n < x.rows
                && x.words.len() == x.units * x.rows * D::PARTS * WORDS
                && x.units == bytes.div_ceil(BYTES)
                && x.units * shape.step + LANES <= stride + shape.step,
            "the sizes that `WordRows` and `ScaleRows` have"
        );
        let mut packed = [s.load_packed(&[0; BYTES]); TILE];
        for unit in 0..whole {
            for (r, packed) in packed.iter_mut().enumerate() {
                let from = r.min(held - 1) * bytes + unit * BYTES;
                s.prefetch_near(codes.as_ptr().wrapping_add(from + AHEAD));
                // SAFETY: `unit < bytes / BYTES`, so whole in a row of `codes`.
                *packed = s.load_packed(unsafe { at(codes, from) });
            }
            // SAFETY: `unit < x.units`; sizes as above.
            unsafe { tile.add::<D, F>(s, decode, &mut sums, unit, packed) };
        }
        if whole < x.units {
            for (r, packed) in packed.iter_mut().enumerate() {
                let mut last = [0; BYTES];
                let row = r.min(held - 1);
                let rest = &codes[row * bytes + whole * BYTES..(row + 1) * bytes];
                last[..rest.len()].copy_from_slice(rest);
                *packed = s.load_packed(&last);
            }
            // SAFETY: as above.
            unsafe { tile.add::<D, F>(s, decode, &mut sums, whole, packed) };
        }
        let mut totals = s.reduce_add_each(sums);
        if weight.offsets.is_some() {
            for (r, total) in totals.iter_mut().enumerate() {
                *total += scratch.added[(index + r) * x.rows + n];
            }
        }
        self.results.put(n, output, &totals[..held]);
    }
}

/// The distance of the prefetch in bytes of codes.
// As in `byte_gemv`: two pages.
const AHEAD: usize = 8192;

/// The data of some rows of the weight.
struct Tile<'a, S: Simd> {
    /// `(units, rows, parts, 32)`
    words: &'a [i16],
    /// `(TILE, rows, stride)`
    scales: &'a [f32],
    shape: Shape<S>,
    /// The number of rows of activations, and the one that is multiplied.
    rows: usize,
    row: usize,
}

/// The layout of the scales of a row.
#[derive(Clone, Copy)]
struct Shape<S: Simd> {
    stride: usize,
    /// The number of scales of a unit.
    step: usize,
    /// The scale of each lane.
    lanes: S::Lanes,
}

impl<S: Simd> Tile<'_, S> {
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
            let mut total = s.zero_sums();
            for (part, weights) in weights.into_iter().enumerate().take(D::PARTS) {
                let from = ((unit * self.rows + self.row) * D::PARTS + part) * WORDS;
                // SAFETY: `row < rows` and `part < PARTS`, and the caller ensures the unit.
                let words = s.load_words(unsafe { at(self.words, from) });
                total = s.dot_words(total, weights, words);
            }
            let from = (r * self.rows + self.row) * self.shape.stride + unit * self.shape.step;
            let scales = if F {
                // Four floats seldom lie in two lines of the cache.
                // SAFETY: the caller ensures the scales.
                s.permute_four(unsafe { at(self.scales, from) }, self.shape.lanes)
            } else {
                // SAFETY: the caller ensures the scales.
                s.permute(unsafe { at(self.scales, from) }, self.shape.lanes)
            };
            *sum = s.mul_add(s.sums_to_f32(total), scales, *sum);
        }
    }
}
