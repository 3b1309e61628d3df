//! The GEMV of one to three rows of activations in bytes.
//!
//! A vector of 64 bytes has the codes of 128 neighbouring inputs in 4 bits: its low halves are multiplied with one
//! vector of activations, its high halves with another, and a lane sums the products of 8 inputs. Or it has those of
//! 64 inputs in 8 bits, and a lane sums the products of 4.
#![allow(unsafe_code)]

use std::ops::Range;

use overdrive_kernels::{BYTES, Buffers, Kept, Kernel, LANES, Simd};

use super::aligned::AlignedVec;
use super::byte_rows::{ByteRows, Unit};
use super::coded_weight::{ByteCoding, ByteNumbers, CodedWeight};
use super::scale_rows::{Raw, ScaleRows, groups_of};
use super::scales::Scales;
use crate::kernel::at;
use crate::kernel::joint_gemm::Results;

/// The number of rows of the weight at a time: their sums are reduced together.
const TILE: usize = 4;

/// The number of rows of the weight whose scales are read at a time.
const BATCH: usize = 8;

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
    /// The scales times those of activations, `(rows of activations, batch, stride)`.
    products: AlignedVec<f32>,
    /// The contribution of the offsets in 16 partial sums, `(rows of activations, batch, 16)`.
    added: AlignedVec<f32>,
    /// The results, `(rows of activations, outputs)`.
    results: AlignedVec<f32>,
}

impl Buffers for Scratch {
    fn bytes(&self) -> usize {
        self.raw.bytes() + self.products.bytes() + self.added.bytes() + self.results.bytes()
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

impl Kernel for ByteGemv<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        // A weight with bytes of activations has one.
        let Some(coding) = self.weight.few_rows_byte_coding() else {
            return;
        };
        let offsets = self.weight.offsets.is_some();
        match (coding.numbers, offsets) {
            (ByteNumbers::Book(_), _) => self.outputs::<S, BOOK, false>(s, &coding),
            (ByteNumbers::Integers(_), false) => self.outputs::<S, NIBBLES, false>(s, &coding),
            (ByteNumbers::Integers(_), true) => self.outputs::<S, NIBBLES, true>(s, &coding),
            (ByteNumbers::Signed, false) => self.outputs::<S, SIGNED, false>(s, &coding),
            (ByteNumbers::Signed, true) => self.outputs::<S, SIGNED, true>(s, &coding),
            (ByteNumbers::Unsigned, false) => self.outputs::<S, UNSIGNED, false>(s, &coding),
            (ByteNumbers::Unsigned, true) => self.outputs::<S, UNSIGNED, true>(s, &coding),
        }
    }
}

/// The kinds of [`ByteNumbers`], for which there is code of its own.
const BOOK: u8 = 0;
const NIBBLES: u8 = 1;
const SIGNED: u8 = 2;
const UNSIGNED: u8 = 3;

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
        let table = coding.table(s);
        let rows = ScaleRows::new(weight.inputs, x.group);
        let bytes = weight.row_bytes();
        let groups = coding.per_byte() * BYTES / x.group;
        let lanes = s.lane_indices(&groups_of(LANES / groups));
        let outputs = self.outputs.len();
        scratch.results.grow(x.rows * outputs);
        assert!(
            bytes.div_ceil(BYTES) == x.of_row && x.stride >= x.of_row * groups,
            "the sizes that `ByteRows` and `CodedWeight::byte_coding` ensure"
        );
        // The first codes, which the prefetch of the loops below misses.
        let codes = &weight.codes[self.outputs.start * bytes..self.outputs.end * bytes];
        for line in codes[..AHEAD.min(codes.len())].chunks(BYTES) {
            s.prefetch_near(line.as_ptr());
        }
        let prefetch = ScalePrefetch::new(weight, &rows);
        prefetch.begin(s, self.outputs.start);
        let mut first = self.outputs.start;
        while first < self.outputs.end {
            let count = BATCH.min(self.outputs.end - first);
            self.prepare::<S, OFFSETS>(s, &rows, first, count, &mut scratch);
            // The last unit of a row may reach into the next row, where it is multiplied with zeros.
            let all = &weight.codes[first * bytes..];
            let whole = bytes / BYTES;
            assert!(all.len() >= count * bytes, "the rows of the outputs");
            let (products, added) = (&*scratch.products, &*scratch.added);
            assert!(
                products.len() >= x.rows * BATCH * x.stride + LANES
                    && (!OFFSETS || added.len() >= x.rows * BATCH * LANES),
                "the sizes that `prepare` gives"
            );
            for index in (0..count).step_by(TILE) {
                let held = TILE.min(count - index);
                // The last row stands for missing ones.
                let mut rows = [index; TILE];
                for (r, row) in rows.iter_mut().enumerate() {
                    *row += r.min(held - 1);
                }
                let next = prefetch.of_tile(first + index + SCALES_AHEAD);
                // The second row of activations finds the codes in the first cache.
                for n in 0..x.rows {
                    let mut sums = [s.splat(0.0); TILE];
                    if OFFSETS {
                        let (added, _) = added.as_chunks::<LANES>();
                        for (sum, row) in sums.iter_mut().zip(rows) {
                            *sum = s.load_f32(&added[n * BATCH + row]);
                        }
                    }
                    let of_row = n * BATCH * x.stride;
                    for (index, unit) in x.units(n).iter().enumerate() {
                        let start = s.load_sums(&unit.starts);
                        for address in &next[..if OFFSETS { 2 } else { 1 }] {
                            s.prefetch_near(address.wrapping_add(index * prefetch.step));
                        }
                        for (r, sum) in sums.iter_mut().enumerate() {
                            let from = rows[r] * bytes + index * BYTES;
                            s.prefetch_near(all.as_ptr().wrapping_add(from + AHEAD));
                            let packed = if index < whole {
                                // SAFETY: `rows[r] < count` and `index < whole`: a vector of a row of `all`.
                                s.load_packed(unsafe { at(all, from) })
                            } else {
                                last_unit(s, &all[from..])
                            };
                            let total = dot::<S, NUMBERS>(s, start, packed, table, unit);
                            let from = of_row + rows[r] * x.stride + index * groups;
                            // SAFETY: `rows[r] < BATCH`, the groups of a unit are whole in `stride`, and a vector
                            // follows the last.
                            let scales = s.permute_four(unsafe { at(products, from) }, lanes);
                            *sum = s.mul_add(s.sums_to_f32(total), scales, *sum);
                        }
                    }
                    let totals = s.reduce_add_each(sums);
                    let to = n * outputs + first + index - self.outputs.start;
                    scratch.results[to..to + held].copy_from_slice(&totals[..held]);
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

    /// Computes the scales of `count` rows of the weight times those of the activations, and the contribution of
    /// the offsets.
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
        // The last unit reads more scales than it has.
        scratch.products.grow(x.rows * BATCH * x.stride + LANES);
        if let Some(offsets) = weight.offsets.as_ref().filter(|_| OFFSETS) {
            scratch.added.grow(x.rows * BATCH * LANES);
            let made = rows.read(s, offsets, first, count, &mut scratch.raw);
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
        let made = rows.read(s, &weight.scales, first, count, &mut scratch.raw);
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
                let of_unit = weight.coding.per_byte() * BYTES / x.group;
                let beyond = weight.inputs / x.group..x.of_row * of_unit;
                // Inputs that do not exist are zeros, which the scale of another row may not make NaN.
                out.as_flattened_mut()[beyond].fill(0.0);
            }
        }
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
