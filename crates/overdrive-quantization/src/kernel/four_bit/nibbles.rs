//! Codes of 4 bits with one to three rows of activations in bytes.
//!
//! A vector of 64 bytes has the codes of 128 neighbouring inputs: its low halves are multiplied with one
//! plane of activations, its high halves with another, and a lane sums the products of 8 inputs.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ops::Range;

use super::along::at;
use super::byte_rows::{ByteRows, GROUP, UNIT};
use super::lines::Lines;
use super::map::{ByteTable, CodedMap};
use super::part::Results;
use super::prepare::{Raw, ScaleRows, groups_of};
use super::scales::Scales;
use super::words::{PACKED, Words, Work};
use crate::kernel::simd::LANES;

/// Rows of the weight at a time: their sums are reduced together.
const TILE: usize = 4;

/// Rows of the weight whose scales are made at a time.
const BATCH: usize = 8;

/// Bytes of codes that are asked for before they are needed.
const AHEAD: usize = 8192;

/// Rows of the weight whose scales are asked for before they are needed.
const SCALES_AHEAD: usize = BATCH + TILE;

/// Numbers of a unit that have a scale each.
const GROUPS: usize = UNIT / GROUP;

/// Some outputs of one map.
pub(super) struct Nibbles<'a> {
    pub(super) x: &'a ByteRows,
    pub(super) map: &'a CodedMap<'a>,
    pub(super) outputs: Range<usize>,
    pub(super) results: &'a dyn Results,
}

/// What a thread needs for a batch; kept from call to call.
#[derive(Default)]
struct Scratch {
    /// Scales as they are read.
    raw: Raw,
    /// Scales times those of activations, `(rows of activations, batch, stride)`.
    products: Lines<f32>,
    /// What offsets add, in parts whose sum it is, `(rows of activations, batch, 16)`.
    added: Lines<f32>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

/// Scales and offsets that memory is asked for before they are needed: evenly, since many requests at once
/// would hold up those for codes.
struct Ahead<'a> {
    rows: &'a ScaleRows,
    scales: &'a Scales<'a>,
    offsets: &'a Scales<'a>,
    /// Bytes of a tile's scales for each unit, at most a line.
    step: usize,
}

impl<'a> Ahead<'a> {
    /// Where there are no offsets, nobody asks for them.
    #[inline(always)]
    fn new(map: &'a CodedMap<'a>, rows: &'a ScaleRows) -> Self {
        let scales = &map.scales;
        let of_tile = rows.place(scales, TILE).addr() - rows.place(scales, 0).addr();
        Ahead {
            rows,
            scales,
            offsets: map.offsets.as_ref().unwrap_or(scales),
            step: of_tile.div_ceil(map.inputs / UNIT),
        }
    }

    /// Those of the tile of outputs from `output` on, which need not be there.
    #[inline(always)]
    fn of_tile(&self, output: usize) -> [*const u8; 2] {
        [self.scales, self.offsets].map(
            #[inline(always)]
            |scales| self.rows.place(scales, output),
        )
    }

    /// Asks for those of the first outputs, for which it is late.
    #[inline(always)]
    fn begin<S: Words>(&self, s: S, output: usize) {
        let (first, end) = (self.of_tile(output), self.of_tile(output + SCALES_AHEAD));
        for (first, end) in first.into_iter().zip(end) {
            for byte in (0..end.addr() - first.addr()).step_by(PACKED) {
                s.prefetch_near(first.wrapping_add(byte));
            }
        }
    }
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
        let rows = ScaleRows::new(map.inputs, GROUP);
        let bytes = map.row_bytes();
        let places = s.places(&groups_of(GROUP / 8));
        assert!(
            bytes == x.of_row * PACKED && x.stride >= x.of_row * GROUPS,
            "the sizes that `ByteRows` and `CodedMap::byte_table` see to"
        );
        // What the loops below ask for too late.
        let codes = &map.codes[self.outputs.start * bytes..self.outputs.end * bytes];
        for line in codes[..AHEAD.min(codes.len())].chunks(PACKED) {
            s.prefetch_near(line.as_ptr());
        }
        let ahead = Ahead::new(map, &rows);
        ahead.begin(s, self.outputs.start);
        let mut first = self.outputs.start;
        while first < self.outputs.end {
            let count = BATCH.min(self.outputs.end - first);
            self.prepare::<S, OFFSETS>(s, &rows, first, count, &mut scratch);
            let all = &map.codes[first * bytes..(first + count) * bytes];
            let (products, added) = (&*scratch.products, &*scratch.added);
            assert!(
                products.len() >= x.rows * BATCH * x.stride
                    && (!OFFSETS || added.len() >= x.rows * BATCH * LANES),
                "the sizes that `prepare` gives"
            );
            for index in (0..count).step_by(TILE) {
                let held = TILE.min(count - index);
                // The last row stands for those that are missing.
                let mut rows = [index; TILE];
                for (r, row) in rows.iter_mut().enumerate() {
                    *row += r.min(held - 1);
                }
                let next = ahead.of_tile(first + index + SCALES_AHEAD);
                // The second row of activations finds the codes in the first cache.
                for n in 0..x.rows {
                    let mut sums = [s.splat(0.0); TILE];
                    if OFFSETS {
                        for (sum, row) in sums.iter_mut().zip(rows) {
                            // SAFETY: `n < x.rows` and `row < count <= BATCH`; asserted.
                            *sum = s.load_f32(unsafe { at(added, (n * BATCH + row) * LANES) });
                        }
                    }
                    let of_row = n * BATCH * x.stride;
                    for (index, unit) in x.units(n).iter().enumerate() {
                        let (low, high) = (s.load_plane(&unit.low), s.load_plane(&unit.high));
                        let start = s.load_sums(&unit.starts);
                        for place in &next[..if OFFSETS { 2 } else { 1 }] {
                            s.prefetch_near(place.wrapping_add(index * ahead.step));
                        }
                        for (r, sum) in sums.iter_mut().enumerate() {
                            let from = rows[r] * bytes + index * PACKED;
                            s.prefetch_near(all.as_ptr().wrapping_add(from + AHEAD));
                            // SAFETY: `rows[r] < count` and `index < of_row`: a vector of a row of `all`.
                            let packed = s.load_packed(unsafe { at(all, from) });
                            let total = s.add_nibbles::<BOOK>(start, packed, table, low, high);
                            let from = of_row + rows[r] * x.stride + index * GROUPS;
                            // SAFETY: `rows[r] < BATCH`, and the groups of a unit are whole in `stride`.
                            let scales = s.spread_four(unsafe { at(products, from) }, places);
                            *sum = s.mul_add(s.floats(total), scales, *sum);
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

    /// Scales of `count` rows of the weight, times those of the activations; and what offsets add.
    #[inline(always)]
    fn prepare<S: Words, const OFFSETS: bool>(
        &self,
        s: S,
        rows: &ScaleRows,
        first: usize,
        count: usize,
        scratch: &mut Scratch,
    ) {
        let (x, map) = (self.x, self.map);
        scratch.products.grow(x.rows * BATCH * x.stride);
        if let Some(offsets) = map.offsets.as_ref().filter(|_| OFFSETS) {
            scratch.added.grow(x.rows * BATCH * LANES);
            let made = rows.make(s, offsets, first, count, &mut scratch.raw);
            let (added, _) = scratch.added.as_chunks_mut::<LANES>();
            for n in 0..x.rows {
                let (sums, _) = x.sums[n * x.stride..(n + 1) * x.stride].as_chunks::<LANES>();
                for index in 0..count {
                    let mut sum = s.splat(0.0);
                    made.each(
                        s,
                        index,
                        sums.iter(),
                        #[inline(always)]
                        |offset, sums| sum = s.mul_add(offset, s.load_f32(sums), sum),
                    );
                    s.store_f32(sum, &mut added[n * BATCH + index]);
                }
            }
        }
        let made = rows.make(s, &map.scales, first, count, &mut scratch.raw);
        let (products, _) = scratch.products.as_chunks_mut::<LANES>();
        let (scales, _) = x.scales.as_chunks::<LANES>();
        let vectors = x.stride / LANES;
        let of_rows = scales.chunks_exact(vectors);
        for (products, scales) in products.chunks_exact_mut(BATCH * vectors).zip(of_rows) {
            let outputs = products.chunks_exact_mut(vectors).take(count);
            for (index, out) in outputs.enumerate() {
                made.each(
                    s,
                    index,
                    out.iter_mut().zip(scales),
                    #[inline(always)]
                    |scale, (out, of_row)| s.store_f32(s.mul(scale, s.load_f32(of_row)), out),
                );
            }
        }
    }
}
