//! Codes of 4 bits with many rows of activations in bytes: lanes are outputs.
//!
//! Some rows of the weight are transposed, four bytes a lane, and become bytes once for all rows of
//! activations, in the first cache; a lane's sum is converted once for 32 inputs.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ops::Range;

use super::along::at;
use super::byte_rows::GROUP;
use super::byte_units::{ByteUnits, GROUPS};
use super::lines::Lines;
use super::map::{ByteTable, CodedMap};
use super::part::Results;
use super::prepare::{Raw, ScaleRows};
use super::tiles::codes;
use super::words::{PACKED, Words, Work};
use crate::kernel::simd::LANES;

/// Vectors of bytes that a unit of 16 outputs becomes: low and high halves of each lane of codes.
const HELD: usize = 2 * LANES;

/// Vectors of bytes that share a scale of activations.
const HELD_GROUP: usize = HELD / GROUPS;

/// Outputs whose bytes are held at once, in vectors: activations come from the second cache or further,
/// and serve as many at a visit.
const VECTORS: usize = 4;

/// Some outputs of one map.
pub(super) struct ByteTiles<'a> {
    pub(super) x: &'a ByteUnits,
    pub(super) map: &'a CodedMap<'a>,
    pub(super) outputs: Range<usize>,
    pub(super) results: &'a dyn Results,
}

/// What a thread needs for some vectors of outputs; kept from call to call.
#[derive(Default)]
struct Scratch {
    raw: Raw,
    /// `(vectors, groups in whole vectors, 16)`
    scales: Lines<f32>,
    /// The same, where there are offsets.
    offsets: Lines<f32>,
    /// `(vectors, rows, 16)`
    sums: Lines<f32>,
    /// Of one unit, `(vectors, 32, 64)`.
    bytes: Lines<i8>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

impl Work for ByteTiles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Words>(self, s: S) {
        // Maps that have bytes of activations have a table.
        let Some((table, _)) = self.map.byte_table() else {
            return;
        };
        let mut scratch = SCRATCH.take();
        let mut output = self.outputs.start;
        while output < self.outputs.end {
            let vectors = (self.outputs.end - output).div_ceil(LANES).min(VECTORS);
            self.vectors(s, &table, output, vectors, &mut scratch);
            output += vectors * LANES;
        }
        SCRATCH.set(scratch);
    }
}

impl ByteTiles<'_> {
    /// `vectors` vectors of outputs from `output` on.
    #[inline(always)]
    fn vectors<S: Words>(
        &self,
        s: S,
        table: &ByteTable,
        output: usize,
        vectors: usize,
        scratch: &mut Scratch,
    ) {
        let (x, map) = (self.x, self.map);
        let shape = ScaleRows::new(map.inputs, GROUP);
        let each = (x.units * GROUPS).next_multiple_of(LANES) * LANES;
        let rows = x.rows * LANES;
        scratch.scales.grow(vectors * each);
        scratch.sums.grow(vectors * rows);
        scratch.sums[..vectors * rows].fill(0.0);
        scratch.bytes.grow(vectors * HELD * PACKED);
        for vector in 0..vectors {
            let first = output + vector * LANES;
            let count = LANES.min(map.outputs - first);
            let place = vector * each..(vector + 1) * each;
            let raw = &mut scratch.raw;
            let out = &mut scratch.scales[place.clone()];
            shape.columns(s, &map.scales, first, count, raw, out);
            if let Some(offsets) = &map.offsets {
                scratch.offsets.grow(vectors * each);
                let out = &mut scratch.offsets[place];
                shape.columns(s, offsets, first, count, raw, out);
            }
        }
        for unit in 0..x.units {
            for vector in 0..vectors {
                let columns = codes(s, map, output + vector * LANES, unit);
                let held = &mut scratch.bytes[vector * HELD * PACKED..(vector + 1) * HELD * PACKED];
                hold(s, table, &columns, held);
            }
            let mut vector = 0;
            while vector < vectors {
                let count = S::BYTE_VECTORS.min(vectors - vector);
                let mut block = Block {
                    x,
                    unit,
                    row: 0,
                    each,
                    // Hidden: a loop whose length is known is unrolled, and then has all its operands
                    // loaded first, for which there are no registers.
                    steps: std::hint::black_box(HELD_GROUP),
                    bytes: &scratch.bytes[vector * HELD * PACKED..],
                    scales: &scratch.scales[vector * each..vectors * each],
                    offsets: match &map.offsets {
                        Some(_) => &scratch.offsets[vector * each..vectors * each],
                        None => &[],
                    },
                    sums: &mut scratch.sums[vector * rows..vectors * rows],
                };
                match count {
                    2 => block.all_rows::<S, 2>(s),
                    _ => block.all_rows::<S, 1>(s),
                }
                vector += count;
            }
        }
        for vector in 0..vectors {
            let first = output + vector * LANES;
            let count = LANES.min(self.outputs.end - first);
            for row in 0..x.rows {
                let sums = &scratch.sums[vector * rows + row * LANES..][..count];
                self.results.put(row, first, sums);
            }
        }
    }
}

/// Writes the bytes of one unit of 16 outputs, `(16 lanes of codes, low and high halves, 64)`.
#[inline(always)]
fn hold<S: Words>(s: S, table: &ByteTable, columns: &[S::Packed; LANES], out: &mut [i8]) {
    let numbers = s.byte_table(&table.values);
    let (out, _) = out.as_chunks_mut::<PACKED>();
    for (packed, out) in columns.iter().zip(out.chunks_exact_mut(2)) {
        let halves = match table.zero {
            Some(_) => s.nibbles::<false>(*packed, numbers),
            None => s.nibbles::<true>(*packed, numbers),
        };
        for (half, out) in halves.into_iter().zip(out) {
            s.store_plane(half, out);
        }
    }
}

/// One unit of inputs and one or two vectors of outputs.
struct Block<'a> {
    x: &'a ByteUnits,
    unit: usize,
    row: usize,
    /// Numbers of the scales of a vector.
    each: usize,
    /// [`HELD_GROUP`].
    steps: usize,
    bytes: &'a [i8],
    scales: &'a [f32],
    /// Empty where there are none.
    offsets: &'a [f32],
    /// `(vectors, rows, 16)`
    sums: &'a mut [f32],
}

impl Block<'_> {
    /// All rows, in blocks of which no two differ by more than one row.
    #[inline(always)]
    fn all_rows<S: Words, const V: usize>(&mut self, s: S) {
        let rows = self.x.rows;
        let blocks = rows.div_ceil(S::BYTE_ROWS);
        for block in 0..blocks {
            self.row = block * rows / blocks;
            match (block + 1) * rows / blocks - self.row {
                6 if S::BYTE_ROWS > 5 => self.add::<S, V, 6>(s),
                5 if S::BYTE_ROWS > 4 => self.add::<S, V, 5>(s),
                4 => self.add::<S, V, 4>(s),
                3 => self.add::<S, V, 3>(s),
                2 => self.add::<S, V, 2>(s),
                _ => self.add::<S, V, 1>(s),
            }
        }
    }

    /// `N` rows with `V` vectors of outputs.
    #[inline(always)]
    fn add<S: Words, const V: usize, const N: usize>(&mut self, s: S) {
        let rows = self.x.rows;
        let units = &self.x.of_unit(self.unit)[self.row..self.row + N];
        let group = self.unit * GROUPS;
        assert!(
            self.steps <= HELD_GROUP
                && self.bytes.len() >= V * HELD * PACKED
                && self.sums.len() >= V * rows * LANES
                && self.scales.len() >= V * self.each
                && (group + GROUPS) * LANES <= self.each,
            "the sizes that the caller gave"
        );
        let mut sums = [[s.splat(0.0); V]; N];
        for (n, sums) in sums.iter_mut().enumerate() {
            for (v, sum) in sums.iter_mut().enumerate() {
                // SAFETY: asserted: `row + n < rows`, of each of `V` vectors.
                *sum = s.load_f32(unsafe { at(self.sums, (v * rows + self.row + n) * LANES) });
            }
        }
        for g in 0..GROUPS {
            let mut totals = [[s.no_sums(); V]; N];
            for (totals, unit) in totals.iter_mut().zip(units) {
                *totals = [s.splat_sums(unit.starts[g]); V];
            }
            for step in 0..self.steps {
                let held = g * HELD_GROUP + step;
                let mut w = [s.load_plane(&[0; PACKED]); V];
                for (v, w) in w.iter_mut().enumerate() {
                    // SAFETY: asserted: `held < HELD`, of each of `V` vectors.
                    *w = s.load_plane(unsafe { at(self.bytes, (v * HELD + held) * PACKED) });
                }
                for (totals, unit) in totals.iter_mut().zip(units) {
                    // SAFETY: `held < HELD`, of which there are as many quads.
                    let x = s.quad(unsafe { unit.quads.get_unchecked(held) });
                    for (total, w) in totals.iter_mut().zip(w) {
                        *total = s.add_bytes(*total, w, x);
                    }
                }
            }
            for v in 0..V {
                let place = v * self.each + (group + g) * LANES;
                // SAFETY: asserted.
                let scale = s.load_f32(unsafe { at(self.scales, place) });
                for (n, unit) in units.iter().enumerate() {
                    let scale = s.mul(scale, s.splat(unit.scales[g]));
                    sums[n][v] = s.mul_add(s.floats(totals[n][v]), scale, sums[n][v]);
                }
                let offsets = self.offsets.get(place..);
                if let Some(offset) = offsets.and_then(<[f32]>::first_chunk) {
                    let offset = s.load_f32(offset);
                    for (n, unit) in units.iter().enumerate() {
                        sums[n][v] = s.mul_add(offset, s.splat(unit.sums[g]), sums[n][v]);
                    }
                }
            }
        }
        let (out, _) = self.sums.as_chunks_mut::<LANES>();
        for (n, sums) in sums.into_iter().enumerate() {
            for (v, sum) in sums.into_iter().enumerate() {
                s.store_f32(sum, &mut out[v * rows + self.row + n]);
            }
        }
    }
}
