//! The GEMV of one to three rows of activations in bytes.
//!
//! A vector of 64 bytes has the codes of 128 neighbouring inputs in 4 bits: its low halves are multiplied with one
//! vector of activations, its high halves with another, and a lane sums the products of 8 inputs. Or it has those of
//! 64 inputs in 8 bits, and a lane sums the products of 4.
#![allow(unsafe_code)]

use std::ops::Range;

use overdrive_kernels::{BYTES, Buffers, InstructionSet, Kept, Kernel, LANES, Simd};

use super::aligned::AlignedVec;
use super::byte_rows::{BATCH, ByteRows, Unit};
use super::coded_weight::{BOOK, ByteCoding, ByteNumbers, CodedWeight, NIBBLES, SIGNED, UNSIGNED};
use super::scale_rows::{Raw, ScaleRows, groups_of};
use super::scales::Scales;
use crate::kernel::at;
use crate::kernel::joint_gemm::Results;

/// The number of rows of the weight at a time: their sums are reduced together.
const TILE: usize = 4;

/// The distance of the prefetch in bytes of codes.
// Two pages: the hardware prefetcher stops at the end of one.
const AHEAD: usize = 8192;

/// The distance of the prefetch of scales in rows of the weight.
const SCALES_AHEAD: usize = BATCH + TILE;

/// The GEMV of some outputs.
pub(super) struct ByteGemv<'a> {
    pub(super) x: &'a ByteRows,
    pub(super) weight: &'a CodedWeight<'a>,
    pub(super) outputs: Range<usize>,
    pub(super) results: &'a mut dyn Results,
}

/// The buffers of a batch, kept from call to call.
#[derive(Default)]
struct Scratch {
    /// The buffers of scales while they are read.
    raw: Raw,
    /// The scales times those of activations, `(rows of activations, batch · groups)`.
    products: AlignedVec<f32>,
    /// The offsets, `(batch · groups)`.
    offsets: AlignedVec<f32>,
    /// The results, `(rows of activations, outputs)`.
    results: AlignedVec<f32>,
}

impl Buffers for Scratch {
    fn bytes(&self) -> usize {
        self.raw.bytes() + self.products.bytes() + self.offsets.bytes() + self.results.bytes()
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
        let Some(coding) = self.weight.few_rows_byte_coding() else {
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
        scratch.results.grow(x.rows * outputs);
        // The first codes, which the prefetch of the loops below misses.
        let codes = &weight.codes[self.outputs.start * bytes..self.outputs.end * bytes];
        for line in codes[..AHEAD.min(codes.len())].chunks(BYTES) {
            s.prefetch_near(line.as_ptr());
        }
        let prefetch = ScalePrefetch::new(weight, &rows);
        prefetch.begin(s, self.outputs.start);
        let unit = UnitLayout::new(s, coding, x, weight.inputs);
        let mut first = self.outputs.start;
        while first < self.outputs.end {
            let count = BATCH.min(self.outputs.end - first);
            self.prepare::<S, OFFSETS>(s, &rows, first, count, &mut scratch);
            for index in (0..count).step_by(TILE) {
                let output = first + index;
                // The second row of activations finds the codes in the first cache.
                for n in 0..x.rows {
                    let tile = Tile {
                        unit: &unit,
                        units: x.units(n),
                        // The last unit of a row may reach into the next row.
                        codes: &weight.codes[output * bytes..],
                        bytes,
                        scales: &scratch.products[n * x.repeated + index * x.groups..],
                        groups: x.groups,
                        offsets: &scratch.offsets[if OFFSETS { index * x.groups } else { 0 }..],
                        of_groups: x.sums_of(n),
                        next: prefetch.of_tile(output + SCALES_AHEAD),
                        step: prefetch.step,
                    };
                    let held = TILE.min(count - index);
                    let totals = match held {
                        TILE => s.reduce_add_each(tile.sums::<NUMBERS, OFFSETS, TILE>(s, 0)),
                        _ => {
                            let mut sums = [s.splat(0.0); TILE];
                            for (r, sum) in sums.iter_mut().enumerate().take(held) {
                                [*sum] = tile.sums::<NUMBERS, OFFSETS, 1>(s, r);
                            }
                            s.reduce_add_each(sums)
                        }
                    };
                    let to = n * outputs + output - self.outputs.start;
                    let results = &mut scratch.results[to..to + held];
                    // Of a known length nearly always: a call of `memcpy` takes as long as a part of a short row.
                    match results.first_chunk_mut() {
                        Some(tile) => *tile = totals,
                        None => results.copy_from_slice(&totals[..held]),
                    }
                }
            }
            first += count;
        }
        // At once, since a call for each tile would take longer than short rows.
        for n in 0..x.rows {
            let of_row = &scratch.results[n * outputs..(n + 1) * outputs];
            self.results.put(n, self.outputs.start, of_row);
        }
        Kept::put(&SCRATCH, scratch);
    }

    /// Computes the scales of `count` rows of the weight times those of the activations, and reads the offsets.
    #[inline(always)]
    fn prepare<S: Simd, const OFFSETS: bool>(
        &self,
        s: S,
        rows: &ScaleRows,
        first: usize,
        count: usize,
        scratch: &mut Scratch,
    ) {
        let (x, weight) = (self.x, self.weight);
        // Those of all rows at once, which follow one another: a row is rarely a multiple of a vector.
        let vectors = (count * x.groups).div_ceil(LANES);
        if let Some(offsets) = weight.offsets.as_ref().filter(|_| OFFSETS) {
            // The last vector of a row reads more offsets than it has.
            scratch.offsets.grow(x.repeated + LANES);
            let made = rows.read(s, offsets, first, count, &mut scratch.raw);
            let (out, _) = scratch.offsets.as_chunks_mut::<LANES>();
            made.each(
                s,
                0,
                out.iter_mut().take(vectors),
                #[inline(always)]
                |offset, out| s.store_f32(offset, out),
            );
        }
        // The last unit reads more scales than it has.
        scratch.products.grow(x.rows * x.repeated + LANES);
        let made = rows.read(s, &weight.scales, first, count, &mut scratch.raw);
        for n in 0..x.rows {
            let of_row = n * x.repeated..(n + 1) * x.repeated;
            let (out, _) = scratch.products[of_row.clone()].as_chunks_mut::<LANES>();
            let (scales, _) = x.scales[of_row].as_chunks::<LANES>();
            made.each(
                s,
                0,
                out.iter_mut().zip(scales).take(vectors),
                #[inline(always)]
                |scale, (out, of_row)| s.store_f32(s.mul(scale, s.load_f32(of_row)), out),
            );
        }
    }
}

/// The scales of a unit of codes.
struct UnitLayout<S: Simd> {
    table: S::Bytes,
    /// The number of groups of a unit.
    groups: usize,
    /// The group that each lane is in.
    lanes: S::Lanes,
    /// The same in the last unit of a row if it is not whole. Lanes without inputs are in its last group, since the
    /// scale of the next row, which may be NaN, times their sums of zero would not be zero.
    last_lanes: S::Lanes,
    /// The group, counted in its vector, whose offset each lane takes in the last vector of a row that is not whole,
    /// likewise.
    rest_lanes: S::Lanes,
}

impl<S: Simd> UnitLayout<S> {
    #[inline(always)]
    fn new(s: S, coding: &ByteCoding, x: &ByteRows, inputs: usize) -> Self {
        let inputs_of_unit = coding.per_byte() * BYTES;
        let groups = inputs_of_unit / x.group;
        let lanes = groups_of(LANES / groups);
        let last = (inputs % inputs_of_unit / x.group).saturating_sub(1);
        let last_lanes = lanes.map(
            #[inline(always)]
            |group| group.min(last as u32),
        );
        let rest = (inputs / x.group % LANES).saturating_sub(1);
        let rest_lanes = groups_of(1).map(
            #[inline(always)]
            |group| group.min(rest as u32),
        );
        UnitLayout {
            table: coding.table(s),
            groups,
            lanes: s.lane_indices(&lanes),
            last_lanes: s.lane_indices(&last_lanes),
            rest_lanes: s.lane_indices(&rest_lanes),
        }
    }
}

/// Up to [`TILE`] rows of the weight and one of activations.
struct Tile<'a, S: Simd> {
    unit: &'a UnitLayout<S>,
    /// The activations.
    units: &'a [Unit],
    /// The codes from the first row on.
    codes: &'a [u8],
    /// The number of bytes of a row.
    bytes: usize,
    /// The scales from the first row on, times those of the activations; a vector follows the last.
    scales: &'a [f32],
    /// The number of groups of a row.
    groups: usize,
    /// The offsets from the first row on; a vector follows the last.
    offsets: &'a [f32],
    /// The sums of the activations of each group, which the offsets are multiplied with; zeros beyond the groups.
    of_groups: &'a [[f32; LANES]],
    /// The addresses of the scales and offsets that are prefetched, [`step`](Self::step) bytes a unit.
    next: [*const u8; 2],
    step: usize,
}

impl<S: Simd> Tile<'_, S> {
    /// Returns the partial sums of `T` rows from row `row` on.
    // The rows follow each other at one distance, so that a few registers hold the addresses of all.
    #[inline(always)]
    #[allow(
        clippy::needless_range_loop,
        reason = "loops over indices are unrolled"
    )]
    fn sums<const NUMBERS: u8, const OFFSETS: bool, const T: usize>(
        &self,
        s: S,
        row: usize,
    ) -> [S::F; T] {
        let UnitLayout { table, groups, .. } = *self.unit;
        let whole = self.bytes / BYTES;
        let codes = &self.codes[row * self.bytes..];
        let scales = &self.scales[row * self.groups..];
        assert!(
            codes.len() >= T * self.bytes
                && self.groups >= whole * groups
                && scales.len() >= T * self.groups + 4,
            "the sizes that `ByteRows` and `prepare` give"
        );
        let mut sums = [s.splat(0.0); T];
        if OFFSETS {
            let offsets = &self.offsets[row * self.groups..];
            assert!(
                offsets.len() >= T * self.groups + LANES
                    && self.of_groups.len() * LANES < self.groups + LANES,
                "the sizes that `ByteRows` and `prepare` give"
            );
            for (vector, of_groups) in self.of_groups.iter().enumerate() {
                let of_groups = s.load_f32(of_groups);
                let from = vector * LANES;
                for r in 0..T {
                    // SAFETY: `r < T`, and `from` is in the row, which a vector follows.
                    let offsets = unsafe { at(offsets, r * self.groups + from) };
                    let offsets = if from + LANES <= self.groups {
                        s.load_f32(offsets)
                    } else {
                        s.permute(offsets, self.unit.rest_lanes)
                    };
                    sums[r] = s.mul_add(offsets, of_groups, sums[r]);
                }
            }
        }
        for (index, unit) in self.units[..whole].iter().enumerate() {
            let start = s.load_sums(&unit.starts);
            for address in &self.next[..if OFFSETS { 2 } else { 1 }] {
                s.prefetch_near(address.wrapping_add(index * self.step));
            }
            for r in 0..T {
                let from = r * self.bytes + index * BYTES;
                s.prefetch_near(codes.as_ptr().wrapping_add(from + AHEAD));
                // SAFETY: `r < T` and `index < whole`: a vector of a row of `codes`.
                let packed = s.load_packed(unsafe { at(codes, from) });
                let total = dot::<S, NUMBERS>(s, start, packed, table, unit);
                // SAFETY: `r < T`, a row has the groups of whole units, and four floats follow the last row.
                let scales = unsafe { at(scales, r * self.groups + index * groups) };
                let scales = s.permute_four(scales, self.unit.lanes);
                sums[r] = s.mul_add(s.sums_to_f32(total), scales, sums[r]);
            }
        }
        if let Some(unit) = self.units.get(whole) {
            let start = s.load_sums(&unit.starts);
            for r in 0..T {
                let packed = last_unit(s, &codes[r * self.bytes + whole * BYTES..]);
                let total = dot::<S, NUMBERS>(s, start, packed, table, unit);
                // SAFETY: as above; the rest of a row has fewer groups than a unit.
                let scales = unsafe { at(scales, r * self.groups + whole * groups) };
                let scales = s.permute_four(scales, self.unit.last_lanes);
                sums[r] = s.mul_add(s.sums_to_f32(total), scales, sums[r]);
            }
        }
        sums
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
