//! The GEMM of codes of 4 bits with many rows of activations in bytes. The lanes are outputs.
//!
//! Some rows of the weight are transposed, four bytes in a lane, and unpacked to bytes once for all rows of
//! activations, to the first cache; the sum of a lane is converted to f32 once for 32 inputs.
#![allow(unsafe_code)]

use std::cell::Cell;
use std::ops::Range;

use overdrive_kernels::{BYTES, Kernel, LANES, Simd};

use super::aligned::AlignedVec;
use super::byte_panels::{BytePanels, GROUPS};
use super::byte_rows::GROUP;
use super::coded_weight::{ByteTable, CodedWeight};
use super::scale_rows::{Raw, ScaleRows};
use super::word_gemm::codes;
use crate::kernel::at;
use crate::kernel::joint_gemm::Results;

/// The number of vectors of bytes of a unit of 16 outputs: low and high halves of each lane of codes.
const HELD: usize = 2 * LANES;

/// The number of vectors of bytes that share a scale of activations.
const HELD_GROUP: usize = HELD / GROUPS;

/// The number of vectors of outputs that are unpacked at once: activations come from the second cache or
/// further, and serve this many each time.
const VECTORS: usize = 4;

/// The GEMM of some outputs.
pub(super) struct ByteGemm<'a> {
    pub(super) x: &'a BytePanels,
    pub(super) weight: &'a CodedWeight<'a>,
    pub(super) outputs: Range<usize>,
    pub(super) results: &'a mut dyn Results,
}

/// The buffers of some vectors of outputs, kept from call to call.
#[derive(Default)]
struct Scratch {
    raw: Raw,
    /// The scales, `(vectors, groups in whole vectors, 16)`.
    scales: AlignedVec<f32>,
    /// The offsets, likewise.
    offsets: AlignedVec<f32>,
    /// The sums, `(vectors, rows, 16)`.
    sums: AlignedVec<f32>,
    /// The bytes of one unit, `(vectors, 32, 64)`.
    bytes: AlignedVec<i8>,
}

thread_local! {
    static SCRATCH: Cell<Scratch> = Cell::default();
}

impl Kernel for ByteGemm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        // A weight with bytes of activations has a table.
        let Some((table, _)) = self.weight.byte_table() else {
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

impl ByteGemm<'_> {
    /// Computes `vectors` vectors of outputs from `output` on.
    #[inline(always)]
    fn vectors<S: Simd>(
        &mut self,
        s: S,
        table: &ByteTable,
        output: usize,
        vectors: usize,
        scratch: &mut Scratch,
    ) {
        let (x, weight) = (self.x, self.weight);
        let shape = ScaleRows::new(weight.inputs, GROUP);
        let each = (x.units * GROUPS).next_multiple_of(LANES) * LANES;
        let rows = x.rows * LANES;
        scratch.sums.grow(vectors * rows);
        scratch.sums[..vectors * rows].fill(0.0);
        scratch.bytes.grow(vectors * HELD * BYTES);
        let offsets = shape.tiles(
            s,
            weight,
            output,
            vectors,
            each,
            &mut scratch.raw,
            &mut scratch.scales,
            &mut scratch.offsets,
        );
        for unit in 0..x.units {
            for vector in 0..vectors {
                let columns = codes(s, weight, output + vector * LANES, unit);
                let held = &mut scratch.bytes[vector * HELD * BYTES..(vector + 1) * HELD * BYTES];
                unpack(s, table, &columns, held);
            }
            let mut vector = 0;
            while vector < vectors {
                let count = S::BYTE_VECTORS.min(vectors - vector);
                let mut block = Block {
                    x,
                    unit,
                    row: 0,
                    each,
                    // Hidden from the compiler: it unrolls a loop of known length and then loads all operands
                    // first, for which there are no registers.
                    steps: std::hint::black_box(HELD_GROUP),
                    bytes: &scratch.bytes[vector * HELD * BYTES..],
                    scales: &scratch.scales[vector * each..vectors * each],
                    offsets: offsets.get(vector * each..).unwrap_or_default(),
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

/// Unpacks the bytes of one unit of 16 outputs, `(16 lanes of codes, low and high halves, 64)`.
#[inline(always)]
fn unpack<S: Simd>(s: S, table: &ByteTable, columns: &[S::Packed; LANES], out: &mut [i8]) {
    let numbers = s.byte_table(&table.values);
    let (out, _) = out.as_chunks_mut::<BYTES>();
    for (packed, out) in columns.iter().zip(out.chunks_exact_mut(2)) {
        let halves = match table.zero {
            Some(_) => s.unpack_nibbles::<false>(*packed, numbers),
            None => s.unpack_nibbles::<true>(*packed, numbers),
        };
        for (half, out) in halves.into_iter().zip(out) {
            s.store_bytes(half, out);
        }
    }
}

/// One unit of inputs and one or two vectors of outputs.
struct Block<'a> {
    x: &'a BytePanels,
    unit: usize,
    row: usize,
    /// The number of scales of a vector of outputs.
    each: usize,
    /// [`HELD_GROUP`].
    steps: usize,
    bytes: &'a [i8],
    scales: &'a [f32],
    /// Empty if there are none.
    offsets: &'a [f32],
    /// `(vectors, rows, 16)`
    sums: &'a mut [f32],
}

impl Block<'_> {
    /// Adds all rows, in blocks whose sizes differ by at most one row.
    #[inline(always)]
    fn all_rows<S: Simd, const V: usize>(&mut self, s: S) {
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

    /// Adds `N` rows with `V` vectors of outputs.
    #[inline(always)]
    fn add<S: Simd, const V: usize, const N: usize>(&mut self, s: S) {
        let rows = self.x.rows;
        let units = &self.x.of_unit(self.unit)[self.row..self.row + N];
        let group = self.unit * GROUPS;
        assert!(
            self.steps <= HELD_GROUP
                && self.bytes.len() >= V * HELD * BYTES
                && self.sums.len() >= V * rows * LANES
                && self.scales.len() >= V * self.each
                && (group + GROUPS) * LANES <= self.each,
            "the sizes that the caller gave"
        );
        let mut sums = [[s.splat(0.0); V]; N];
        let (stored, _) = self.sums.as_chunks::<LANES>();
        for (v, stored) in stored.chunks_exact(rows).take(V).enumerate() {
            for (sums, stored) in sums.iter_mut().zip(&stored[self.row..]) {
                sums[v] = s.load_f32(stored);
            }
        }
        for g in 0..GROUPS {
            let mut totals = [[s.zero_sums(); V]; N];
            for (totals, unit) in totals.iter_mut().zip(units) {
                *totals = [s.splat_sums(unit.starts[g]); V];
            }
            for step in 0..self.steps {
                let held = g * HELD_GROUP + step;
                let mut w = [s.load_bytes(&[0; BYTES]); V];
                for (v, w) in w.iter_mut().enumerate() {
                    // SAFETY: asserted: `held < HELD`, of each of `V` vectors.
                    *w = s.load_bytes(unsafe { at(self.bytes, (v * HELD + held) * BYTES) });
                }
                for (totals, unit) in totals.iter_mut().zip(units) {
                    // SAFETY: `held < HELD`, of which there are as many quads.
                    let x = s.splat_quad(unsafe { unit.quads.get_unchecked(held) });
                    for (total, w) in totals.iter_mut().zip(w) {
                        *total = s.dot_bytes(*total, w, x);
                    }
                }
            }
            for v in 0..V {
                let first = v * self.each + (group + g) * LANES;
                // SAFETY: asserted.
                let scale = s.load_f32(unsafe { at(self.scales, first) });
                for (n, unit) in units.iter().enumerate() {
                    let scale = s.mul(scale, s.splat(unit.scales[g]));
                    sums[n][v] = s.mul_add(s.sums_to_f32(totals[n][v]), scale, sums[n][v]);
                }
                let offsets = self.offsets.get(first..);
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
