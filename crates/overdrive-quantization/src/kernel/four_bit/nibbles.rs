//! Codes of 4 bits with one to three rows of activations in bytes.
//!
//! A vector of 64 bytes has the codes of 128 neighbouring inputs: its low halves are multiplied with one
//! plane of activations, its high halves with another, and a lane sums the products of 8 inputs.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ops::Range;

use super::along::at;
use super::byte_rows::{ByteRows, UNIT};
use super::lines::Lines;
use super::map::{ByteTable, CodedMap};
use super::part::Results;
use super::prepare::groups_of;
use super::scales::{Floats, Magnitudes, Scales};
use super::words::{PACKED, Words, Work};
use crate::kernel::simd::LANES;

/// Rows of the weight at a time: their sums are reduced together.
const TILE: usize = 4;

/// Rows of the weight whose scales are made at a time.
const BATCH: usize = 8;

/// Bytes of codes that are asked for before they are needed.
const AHEAD: usize = 8192;

/// Some outputs of one map.
pub(super) struct Nibbles<'a> {
    pub(super) x: &'a ByteRows,
    pub(super) map: &'a CodedMap<'a>,
    pub(super) outputs: Range<usize>,
    pub(super) results: &'a dyn Results,
}

/// What a thread needs for a batch; kept from call to call.
#[derive(Debug, Default)]
struct Scratch {
    bits: Vec<u32>,
    scales: Lines<f32>,
    offsets: Lines<f32>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

impl Work for Nibbles<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Words>(self, s: S) {
        // Maps that have bytes of activations have a table.
        let Some((table, _)) = self.map.byte_table() else {
            return;
        };
        match (table.zero.is_none(), self.map.offsets) {
            (true, _) => self.outputs::<S, true, false>(s, &table),
            (false, None) => self.outputs::<S, false, false>(s, &table),
            (false, Some(_)) => self.outputs::<S, false, true>(s, &table),
        }
    }
}

impl Nibbles<'_> {
    /// `BOOK` where codes choose numbers, `OFFSETS` where there are offsets.
    #[inline(always)]
    fn outputs<S: Words, const BOOK: bool, const OFFSETS: bool>(&self, s: S, table: &ByteTable) {
        let (map, x) = (self.map, self.x);
        let mut scratch = SCRATCH.take();
        let table = s.byte_table(&table.values);
        let block = map.scales.block;
        let per_row = map.inputs / block;
        let bytes = map.row_bytes();
        let places = s.places(&groups_of((block / 8).min(LANES)));
        let shift = block.trailing_zeros();
        assert!(
            bytes == x.of_row * PACKED && block == 1 << shift && per_row * block == x.of_row * UNIT,
            "the sizes that `ByteRows` and `CodedMap::byte_table` see to"
        );
        // What the loop below asks for too late.
        let codes = &map.codes[self.outputs.start * bytes..self.outputs.end * bytes];
        for line in codes[..AHEAD.min(codes.len())].chunks(PACKED) {
            s.prefetch_near(line.as_ptr());
        }
        let mut first = self.outputs.start;
        while first < self.outputs.end {
            let count = BATCH.min(self.outputs.end - first);
            let bits = &mut scratch.bits;
            let scales = of_rows(
                s,
                &map.scales,
                first,
                count,
                per_row,
                bits,
                &mut scratch.scales,
            );
            let offsets = match &map.offsets {
                Some(all) if OFFSETS => {
                    of_rows(s, all, first, count, per_row, bits, &mut scratch.offsets)
                }
                _ => &[],
            };
            let all = &map.codes[first * bytes..(first + count) * bytes];
            assert!(
                scales.len() >= count * per_row + SPARE
                    && (!OFFSETS || offsets.len() >= count * per_row + SPARE),
                "the sizes that `of_rows` gives"
            );
            for index in (0..count).step_by(TILE) {
                let held = TILE.min(count - index);
                // The last row stands for those that are missing.
                let mut rows = [index; TILE];
                for (r, row) in rows.iter_mut().enumerate() {
                    *row += r.min(held - 1);
                }
                // The second row of activations finds the codes in the first cache.
                for (n, units) in x.rows().enumerate() {
                    let mut sums = [s.splat(0.0); TILE];
                    for (index, unit) in units.iter().enumerate() {
                        let scale = (index * UNIT) >> shift;
                        let (low, high) = (s.load_plane(&unit.low), s.load_plane(&unit.high));
                        let start = s.load_sums(&unit.starts);
                        let of_lanes = s.load_f32(&unit.scales);
                        for (r, sum) in sums.iter_mut().enumerate() {
                            let from = rows[r] * bytes + index * PACKED;
                            s.prefetch_near(all.as_ptr().wrapping_add(from + AHEAD));
                            // SAFETY: `rows[r] < count` and `index < of_row`: a vector of a row of `all`.
                            let packed = s.load_packed(unsafe { at(all, from) });
                            let total = s.add_nibbles::<BOOK>(start, packed, table, low, high);
                            let from = rows[r] * per_row + scale;
                            // SAFETY: `scale < per_row`, and three more numbers are there in any case.
                            let spread = s.spread_four(unsafe { at(scales, from) }, places);
                            *sum = s.mul_add(s.floats(total), s.mul(spread, of_lanes), *sum);
                            if OFFSETS {
                                // SAFETY: as above.
                                let offset = s.spread_four(unsafe { at(offsets, from) }, places);
                                *sum = s.mul_add(offset, s.load_f32(&unit.sums), *sum);
                            }
                        }
                    }
                    let totals = s.reduce_add_each(sums);
                    self.results.put(n, first + index, &totals[..held]);
                }
            }
            first += count;
        }
        SCRATCH.set(scratch);
    }
}

/// Numbers that may be read after the last that means something.
const SPARE: usize = 3;

/// The scales of `count` rows of a weight from `first` on, `per_row` each, with [`SPARE`] numbers more:
/// where they are, or made in `made`.
#[inline(always)]
fn of_rows<'r, S: Words>(
    s: S,
    scales: &Scales<'r>,
    first: usize,
    count: usize,
    per_row: usize,
    bits: &mut Vec<u32>,
    made: &'r mut Lines<f32>,
) -> &'r [f32] {
    let (from, all) = (first * per_row, count * per_row);
    if let Magnitudes::Full(Floats::F32(numbers)) = scales.magnitudes {
        let next = numbers.as_ptr().wrapping_add(from + all);
        for line in (0..all).step_by(LANES) {
            s.prefetch_near(next.wrapping_add(line + 4 * all).cast());
        }
        if let Some(there) = numbers.get(from..from + all + SPARE) {
            return there;
        }
    }
    if bits.len() < all {
        bits.resize(all, 0);
    }
    made.grow(all + SPARE);
    scales.magnitudes.begin(from, &mut bits[..all]);
    scales
        .magnitudes
        .finish(from, &bits[..all], &mut made[..all]);
    made
}
