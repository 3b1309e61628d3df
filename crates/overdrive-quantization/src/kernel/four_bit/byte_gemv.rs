//! The GEMV of one to three rows of activations in bytes.
//!
//! A vector of 64 bytes has the codes of 128 neighbouring inputs in 4 bits: its low halves are multiplied with one
//! vector of activations, its high halves with another, and a lane sums the products of 8 inputs. Or it has those of
//! 64 inputs in 8 bits, and a lane sums the products of 4. The sums of each four lanes are kept for 16 outputs; then
//! the lanes are outputs, and the sums of groups are scaled and added as [`ByteGemm`](super::byte_gemm::ByteGemm) does
//! it, in the same order, so that both have the same results bit for bit.
#![allow(unsafe_code)]

use std::ops::Range;

use overdrive_kernels::{BYTES, Buffers, InstructionSet, Kept, Kernel, LANES, Simd};

use super::aligned::AlignedVec;
use super::byte_rows::{ByteRows, Unit};
use super::coded_weight::{BOOK, ByteCoding, ByteNumbers, CodedWeight, NIBBLES, SIGNED, UNSIGNED};
use super::scale_rows::{Raw, ScaleRows};
use super::scales::Scales;
use crate::kernel::at;
use crate::kernel::joint_gemm::Results;

/// The number of rows of the weight at a time, whose sums are reduced together, and of lanes that are reduced to one.
const TILE: usize = 4;

/// The sums of a unit that are kept for 16 outputs.
const KEPT: usize = LANES / TILE * LANES;

/// The distance of the prefetch in bytes of codes.
// Two pages: the hardware prefetcher stops at the end of one.
const AHEAD: usize = 8192;

/// The distance of the prefetch of scales in rows of the weight.
const SCALES_AHEAD: usize = LANES + TILE;

/// The GEMV of some outputs.
pub(super) struct ByteGemv<'a> {
    pub(super) x: &'a ByteRows,
    pub(super) weight: &'a CodedWeight<'a>,
    pub(super) outputs: Range<usize>,
    pub(super) results: &'a mut dyn Results,
}

/// The buffers of 16 outputs, kept from call to call.
#[derive(Default)]
struct Scratch {
    /// The buffers of scales while they are read.
    raw: Raw,
    /// The scales, `(groups in whole vectors, 16)`.
    scales: AlignedVec<f32>,
    /// The offsets, likewise.
    offsets: AlignedVec<f32>,
    /// The sums of products, exact integers, `(rows of activations, units, fours of lanes, 16)`.
    totals: AlignedVec<f32>,
    /// The results, `(rows of activations, outputs)`.
    results: AlignedVec<f32>,
}

impl Buffers for Scratch {
    fn bytes(&self) -> usize {
        let aligned = [&self.scales, &self.offsets, &self.totals, &self.results];
        self.raw.bytes() + aligned.map(AlignedVec::bytes).iter().sum::<usize>()
    }
}

thread_local! {
    static SCRATCH: Kept<Scratch> = const { Kept::new() };
}

/// The prefetch of scales and offsets, spread evenly over the codes: many requests at once would delay those
/// for codes.
struct ScalePrefetch<'a> {
    rows: &'a ScaleRows,
    scales: &'a Scales<'a>,
    offsets: &'a Scales<'a>,
    /// The bytes of the scales of a tile for each unit, at most a line of the cache.
    step: usize,
}

impl<'a> ScalePrefetch<'a> {
    /// Without offsets, `offsets` are the scales, which are not prefetched twice.
    #[inline(always)]
    fn new(weight: &'a CodedWeight<'a>, rows: &'a ScaleRows) -> Self {
        let scales = &weight.scales;
        let of_tile = rows.address(scales, TILE).addr() - rows.address(scales, 0).addr();
        ScalePrefetch {
            rows,
            scales,
            offsets: weight.offsets.as_ref().unwrap_or(scales),
            step: of_tile.div_ceil(weight.row_bytes().div_ceil(BYTES)),
        }
    }

    /// Returns the addresses of those of the tile of outputs from `output` on, which need not exist.
    #[inline(always)]
    fn of_tile(&self, output: usize) -> [*const u8; 2] {
        [self.scales, self.offsets].map(
            #[inline(always)]
            |scales| self.rows.address(scales, output),
        )
    }

    /// Prefetches those of the first outputs at once.
    #[inline(always)]
    fn begin<S: Simd>(&self, s: S, output: usize) {
        let (first, end) = (self.of_tile(output), self.of_tile(output + SCALES_AHEAD));
        for (first, end) in first.into_iter().zip(end) {
            for byte in (0..end.addr() - first.addr()).step_by(BYTES) {
                s.prefetch_near(first.wrapping_add(byte));
            }
        }
    }
}

impl ByteGemv<'_> {
    /// Computes the outputs.
    pub(super) fn run(self, set: InstructionSet) {
        // A weight with bytes of activations has one.
        let Some(coding) = self.weight.byte_coding() else {
            return;
        };
        let offsets = self.weight.offsets.is_some();
        match (coding.numbers, offsets) {
            (ByteNumbers::Book(_), _) => set.run(Outputs::<BOOK, false>(self, coding)),
            (ByteNumbers::Integers(_), false) => set.run(Outputs::<NIBBLES, false>(self, coding)),
            (ByteNumbers::Integers(_), true) => set.run(Outputs::<NIBBLES, true>(self, coding)),
            (ByteNumbers::Signed, false) => set.run(Outputs::<SIGNED, false>(self, coding)),
            (ByteNumbers::Signed, true) => set.run(Outputs::<SIGNED, true>(self, coding)),
            (ByteNumbers::Unsigned, false) => set.run(Outputs::<UNSIGNED, false>(self, coding)),
            (ByteNumbers::Unsigned, true) => set.run(Outputs::<UNSIGNED, true>(self, coding)),
        }
    }
}

/// The outputs for one kind of [`ByteNumbers`], with offsets or without.
// A kernel each: compiled as one function, the registers of a loop depended on the others, and the same source took a
// fifth longer in one build than in another.
struct Outputs<'a, const NUMBERS: u8, const OFFSETS: bool>(ByteGemv<'a>, ByteCoding);

impl<const NUMBERS: u8, const OFFSETS: bool> Kernel for Outputs<'_, NUMBERS, OFFSETS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Outputs(mut gemv, coding) = self;
        gemv.outputs::<S, NUMBERS, OFFSETS>(s, &coding);
    }
}

/// Adds the products of a vector of codes.
#[inline(always)]
fn dot<S: Simd, const NUMBERS: u8>(
    s: S,
    sums: S::Sums,
    codes: S::Packed,
    table: S::Bytes,
    unit: &Unit,
) -> S::Sums {
    let low = s.load_bytes(&unit.low);
    match NUMBERS {
        SIGNED => s.dot_bytes(sums, s.unpack_bytes::<true>(codes), low),
        UNSIGNED => s.dot_bytes(sums, s.unpack_bytes::<false>(codes), low),
        BOOK => s.dot_nibbles::<true>(sums, codes, table, low, s.load_bytes(&unit.high)),
        _ => s.dot_nibbles::<false>(sums, codes, table, low, s.load_bytes(&unit.high)),
    }
}

impl ByteGemv<'_> {
    /// Computes all outputs; `OFFSETS` if there are offsets.
    #[inline(always)]
    fn outputs<S: Simd, const NUMBERS: u8, const OFFSETS: bool>(
        &mut self,
        s: S,
        coding: &ByteCoding,
    ) {
        let (weight, x) = (self.weight, self.x);
        let mut scratch = Kept::take(&SCRATCH);
        let rows = ScaleRows::new(weight.inputs, x.group);
        let bytes = weight.row_bytes();
        let outputs = self.outputs.len();
        let (of_scales, of_totals) = (x.groups.next_multiple_of(LANES) * LANES, x.of_row * KEPT);
        scratch.totals.grow(x.rows * of_totals);
        scratch.results.grow(x.rows * outputs);
        // The first codes, which the prefetch of the loops below misses.
        let codes = &weight.codes[self.outputs.start * bytes..self.outputs.end * bytes];
        for line in codes[..AHEAD.min(codes.len())].chunks(BYTES) {
            s.prefetch_near(line.as_ptr());
        }
        let prefetch = ScalePrefetch::new(weight, &rows);
        prefetch.begin(s, self.outputs.start);
        let table = coding.table(s);
        // The inputs of four lanes are one of them.
        let fours = x.group / (TILE * coding.per_lane());
        for first in self.outputs.clone().step_by(LANES) {
            let count = LANES.min(self.outputs.end - first);
            for index in (0..count).step_by(TILE) {
                let output = first + index;
                // The second row of activations finds the codes in the first cache.
                for n in 0..x.rows {
                    let tile = Tile {
                        table,
                        units: x.units(n),
                        // The last unit of a row may reach into the next row.
                        codes: &weight.codes[output * bytes..],
                        bytes,
                        index,
                        last: TILE.min(count - index) - 1,
                        next: prefetch.of_tile(output + SCALES_AHEAD),
                        step: prefetch.step,
                    };
                    let totals = &mut scratch.totals[n * of_totals..(n + 1) * of_totals];
                    match count - index {
                        TILE.. => tile.totals::<NUMBERS, OFFSETS, true>(s, totals),
                        _ => tile.totals::<NUMBERS, OFFSETS, false>(s, totals),
                    }
                }
            }
            let offsets = rows.tiles(
                s,
                weight,
                first,
                1,
                of_scales,
                &mut scratch.raw,
                &mut scratch.scales,
                &mut scratch.offsets,
            );
            for n in 0..x.rows {
                let scaled = Scaled {
                    totals: &scratch.totals[n * of_totals..(n + 1) * of_totals],
                    scales: &scratch.scales[..x.groups * LANES],
                    of_groups: x.scales(n),
                    offsets,
                    sums: x.sums(n),
                };
                let mut sums = [0.0; LANES];
                let sum = match fours {
                    1 => scaled.sum::<S, OFFSETS, 1>(s),
                    2 => scaled.sum::<S, OFFSETS, 2>(s),
                    _ => scaled.sum::<S, OFFSETS, 4>(s),
                };
                s.store_f32(sum, &mut sums);
                let results = &mut scratch.results[n * outputs + first - self.outputs.start..];
                // Of a known length nearly always: a call of `memcpy` takes as long as a part of a short row.
                match results.first_chunk_mut() {
                    Some(results) if count == LANES => *results = sums,
                    _ => results[..count].copy_from_slice(&sums[..count]),
                }
            }
        }
        // At once, since a call for each tile would take longer than short rows.
        for n in 0..x.rows {
            let of_row = &scratch.results[n * outputs..(n + 1) * outputs];
            self.results.put(n, self.outputs.start, of_row);
        }
        Kept::put(&SCRATCH, scratch);
    }
}

/// Up to [`TILE`] rows of the weight and one of activations.
struct Tile<'a, S: Simd> {
    table: S::Bytes,
    /// The activations.
    units: &'a [Unit],
    /// The codes from the first row on.
    codes: &'a [u8],
    /// The number of bytes of a row.
    bytes: usize,
    /// The position of the first row among 16 outputs.
    index: usize,
    /// The last row, which replaces rows that do not exist.
    last: usize,
    /// The addresses of the scales and offsets that are prefetched, [`step`](Self::step) bytes a unit.
    next: [*const u8; 2],
    step: usize,
}

impl<S: Simd> Tile<'_, S> {
    /// Writes the sums of fours of lanes to the columns of the rows in `totals (units, fours, 16)`; `WHOLE` if there
    /// are [`TILE`] rows.
    // The rows follow each other at one distance, so that a few registers hold the addresses of all.
    #[inline(always)]
    #[allow(
        clippy::needless_range_loop,
        reason = "loops over indices are unrolled"
    )]
    fn totals<const NUMBERS: u8, const OFFSETS: bool, const WHOLE: bool>(
        &self,
        s: S,
        totals: &mut [f32],
    ) {
        let (bytes, codes, table) = (self.bytes, self.codes, self.table);
        let whole = bytes / BYTES;
        let row = |r: usize| if WHOLE { r } else { r.min(self.last) };
        assert!(
            self.last < TILE && codes.len() >= (row(TILE - 1) + 1) * bytes,
            "the rows of the tile"
        );
        let (totals, _) = totals.as_chunks_mut::<KEPT>();
        let mut all = self.units.iter().zip(totals);
        for (index, (unit, totals)) in all.by_ref().enumerate().take(whole) {
            for address in &self.next[..if OFFSETS { 2 } else { 1 }] {
                s.prefetch_near(address.wrapping_add(index * self.step));
            }
            let mut sums = [s.load_sums(&unit.starts); TILE];
            for r in 0..TILE {
                let from = row(r) * bytes + index * BYTES;
                s.prefetch_near(codes.as_ptr().wrapping_add(from + AHEAD));
                // SAFETY: `index < whole`, and the row is in `codes`: a whole vector.
                let packed = s.load_packed(unsafe { at(codes, from) });
                sums[r] = dot::<S, NUMBERS>(s, sums[r], packed, table, unit);
            }
            self.put(s, sums, totals);
        }
        if let Some((unit, totals)) = all.next() {
            let mut sums = [s.load_sums(&unit.starts); TILE];
            for r in 0..TILE {
                let packed = last_unit(s, &codes[row(r) * bytes + whole * BYTES..]);
                sums[r] = dot::<S, NUMBERS>(s, sums[r], packed, table, unit);
            }
            self.put(s, sums, totals);
        }
    }

    /// Writes the sums of a unit.
    #[inline(always)]
    fn put(&self, s: S, sums: [S::Sums; TILE], totals: &mut [f32; KEPT]) {
        let mut fours = [0.0; LANES];
        s.store_f32(s.sums_to_f32(s.sum_fours(sums)), &mut fours);
        let (fours, _) = fours.as_chunks::<TILE>();
        let (totals, _) = totals.as_chunks_mut::<LANES>();
        for (four, totals) in fours.iter().zip(totals) {
            if let Some(totals) = totals[self.index..].first_chunk_mut() {
                *totals = *four;
            }
        }
    }
}

/// The sums of 16 outputs and one row of activations, with what scales them.
struct Scaled<'a> {
    /// `(fours, 16)`
    totals: &'a [f32],
    /// The scales of the weight, `(groups, 16)`.
    scales: &'a [f32],
    /// The scales of the activations.
    of_groups: &'a [f32],
    /// The offsets of the weight, `(groups, 16)`.
    offsets: &'a [f32],
    /// The sums of the activations, which offsets are multiplied with.
    sums: &'a [f32],
}

impl Scaled<'_> {
    /// Returns the outputs; a group has the lanes of `FOURS` sums.
    #[inline(always)]
    fn sum<S: Simd, const OFFSETS: bool, const FOURS: usize>(&self, s: S) -> S::F {
        let (totals, _) = self.totals.as_chunks::<LANES>();
        let (scales, _) = self.scales.as_chunks::<LANES>();
        let (offsets, _) = self.offsets.as_chunks::<LANES>();
        let (totals, _) = totals.as_chunks::<FOURS>();
        let mut sum = s.splat(0.0);
        let groups = totals.iter().zip(scales).zip(self.of_groups);
        for (g, ((totals, scale), of_group)) in groups.enumerate() {
            // Exact: integers below 2²⁴.
            let mut total = s.load_f32(&totals[0]);
            for four in &totals[1..] {
                total = s.add(total, s.load_f32(four));
            }
            let scale = s.mul(s.load_f32(scale), s.splat(*of_group));
            sum = s.mul_add(total, scale, sum);
            if OFFSETS && let (Some(offset), Some(of_group)) = (offsets.get(g), self.sums.get(g)) {
                sum = s.mul_add(s.load_f32(offset), s.splat(*of_group), sum);
            }
        }
        sum
    }
}

/// Loads the codes of the last unit of a row, of which only a part may belong to the row.
#[inline(always)]
fn last_unit<S: Simd>(s: S, rest: &[u8]) -> S::Packed {
    match rest.first_chunk() {
        Some(unit) => s.load_packed(unit),
        // The end of the weight.
        None => {
            let mut unit = [0; BYTES];
            unit[..rest.len()].copy_from_slice(rest);
            s.load_packed(&unit)
        }
    }
}
