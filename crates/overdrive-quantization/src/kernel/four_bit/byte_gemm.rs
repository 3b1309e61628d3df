//! The GEMM of many rows of activations in bytes. The lanes are outputs.
//!
//! One unit of inputs of 16 outputs is transposed, four bytes in a lane, once for all rows of activations. It is unpacked
//! to bytes, either once, to the first cache, or for each few rows anew. The products of a few rows are summed in
//! registers, and converted to f32 once for the inputs that share a scale. Every row is computed as it would be alone.
#![allow(unsafe_code)]

use std::hint::black_box;
use std::ops::Range;

use overdrive_kernels::{BYTES, Buffers, InstructionSet, Kept, Kernel, LANES, Simd};

use super::aligned::AlignedVec;
use super::byte_panels::{BytePanel, BytePanels};
use super::byte_rows::UNIT;
use super::coded_weight::{
    BOOK, ByteCoding, ByteNumbers, CodedWeight, MIN_GROUP_OF_NIBBLES, NIBBLES, SIGNED, UNSIGNED,
};
use super::scale_rows::{Raw, ScaleRows};
use super::word_gemm::{codes, next_output, prefetch_first};
use crate::kernel::joint_gemm::Results;

/// The number of vectors of bytes of a unit of 16 outputs: low and high halves of each lane of codes.
const HELD: usize = 2 * LANES;

/// The number of vectors of outputs whose sums are kept at once: the activations of a unit come from the second cache,
/// and serve this many each time.
const VECTORS: usize = 4;

/// The number of rows that are multiplied with all inputs before the next: their sums and the activations of a unit are
/// in the nearer caches. The weight is unpacked for each.
const ROWS: usize = 128;

/// The number of rows from which on codes are unpacked once for all rows.
const MIN_UNPACKED_ONCE: usize = 64;

/// The number of vectors of codes whose products fit words, as [`dot_pairs`](overdrive_kernels::FourBit::dot_pairs) sums
/// them: the least number that shares a scale.
const MAX_PAIRS: usize = MIN_GROUP_OF_NIBBLES / 4;

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
    /// The bytes of a unit, `(32, 64)`.
    bytes: AlignedVec<i8>,
}

impl Buffers for Scratch {
    fn bytes(&self) -> usize {
        let aligned = [&self.scales, &self.offsets, &self.sums].map(AlignedVec::bytes);
        self.raw.bytes() + aligned.iter().sum::<usize>() + self.bytes.bytes()
    }
}

thread_local! {
    static SCRATCH: Kept<Scratch> = const { Kept::new() };
}

impl ByteGemm<'_> {
    /// Computes the outputs.
    pub(super) fn run(self, set: InstructionSet) {
        // A weight with bytes of activations has one.
        let Some(coding) = self.weight.byte_coding() else {
            return;
        };
        match coding.numbers {
            ByteNumbers::Book(_) => set.run(Outputs::<BOOK>(self, coding)),
            ByteNumbers::Integers(_) => set.run(Outputs::<NIBBLES>(self, coding)),
            ByteNumbers::Signed => set.run(Outputs::<SIGNED>(self, coding)),
            ByteNumbers::Unsigned => set.run(Outputs::<UNSIGNED>(self, coding)),
        }
    }
}

/// The outputs for one kind of [`ByteNumbers`]: a kernel each, as those of [`ByteGemv`](super::byte_gemv::ByteGemv).
struct Outputs<'a, const NUMBERS: u8>(ByteGemm<'a>, ByteCoding);

impl<const NUMBERS: u8> Kernel for Outputs<'_, NUMBERS> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Outputs(mut gemm, coding) = self;
        let mut scratch = Kept::take(&SCRATCH);
        let mut output = gemm.outputs.start;
        let first = output..(output + VECTORS * LANES).min(gemm.outputs.end);
        prefetch_first(s, gemm.weight, first);
        while output < gemm.outputs.end {
            let vectors = (gemm.outputs.end - output).div_ceil(LANES).min(VECTORS);
            gemm.vectors::<S, NUMBERS>(s, &coding, output, vectors, &mut scratch);
            output += vectors * LANES;
        }
        Kept::put(&SCRATCH, scratch);
    }
}

impl ByteGemm<'_> {
    /// Computes `vectors` vectors of outputs from `output` on.
    #[inline(always)]
    fn vectors<S: Simd, const NUMBERS: u8>(
        &mut self,
        s: S,
        coding: &ByteCoding,
        output: usize,
        vectors: usize,
        scratch: &mut Scratch,
    ) {
        let (x, weight) = (self.x, self.weight);
        let groups = UNIT / x.group;
        let shape = ScaleRows::new(weight.inputs, x.group);
        // The scales of a vector of outputs.
        let each = (x.units * groups).next_multiple_of(LANES) * LANES;
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
        let scales = &scratch.scales[..vectors * each];
        // Beyond the groups of a row are scales of other rows.
        let of_row = weight.inputs / x.group;
        scratch.bytes.grow(HELD * BYTES);
        let Some(held) = scratch.bytes.as_chunks_mut().0.first_chunk_mut() else {
            unreachable!("as many bytes")
        };
        scratch.sums.grow(vectors * ROWS.min(x.rows) * LANES);
        for first in (0..x.rows).step_by(ROWS) {
            let rows = first..(first + ROWS).min(x.rows);
            let sums = &mut scratch.sums[..vectors * rows.len() * LANES];
            sums.fill(0.0);
            for unit in 0..x.units {
                let of_vectors = sums.chunks_exact_mut(rows.len() * LANES);
                for (vector, sums) in of_vectors.enumerate() {
                    let from = vector * each + unit * groups * LANES;
                    let of_unit = from..from + groups * LANES;
                    let mut block = Block {
                        x: &x.of_unit(unit)[rows.clone()],
                        scales: &scales[of_unit.clone()],
                        offsets: offsets.get(of_unit).unwrap_or_default(),
                        groups: groups.min(of_row - unit * groups),
                        sums,
                    };
                    let output = output + vector * LANES;
                    let next = next_output(output, vectors, self.outputs.end);
                    let codes = Codes {
                        weight,
                        output,
                        unit,
                        next,
                    };
                    block.unit::<S, NUMBERS>(s, coding, &codes, held);
                }
            }
            let (sums, _) = sums.as_chunks::<LANES>();
            for (at, row) in rows.clone().enumerate() {
                for vector in 0..vectors {
                    let output = output + vector * LANES;
                    let count = LANES.min(self.outputs.end - output);
                    let sums = &sums[vector * rows.len() + at][..count];
                    self.results.put(row, output, sums);
                }
            }
        }
    }
}

/// One unit of 16 outputs.
struct Codes<'a> {
    weight: &'a CodedWeight<'a>,
    output: usize,
    unit: usize,
    /// The output whose codes are read after these.
    next: usize,
}

impl Codes<'_> {
    /// Returns codes of 4 bits, transposed.
    #[inline(always)]
    fn nibbles<S: Simd>(&self, s: S) -> [S::Packed; LANES] {
        codes(s, self.weight, self.output, self.unit, self.next)
    }

    /// Returns codes of 8 bits, transposed, those of the first half of the unit first.
    #[inline(always)]
    fn bytes<S: Simd>(&self, s: S) -> [S::Packed; HELD] {
        let mut both = [s.load_packed(&[0; BYTES]); HELD];
        for (half, out) in both.chunks_exact_mut(LANES).enumerate() {
            let columns = codes(s, self.weight, self.output, 2 * self.unit + half, self.next);
            out.copy_from_slice(&columns);
        }
        both
    }
}

/// One unit of inputs, some rows, and a vector of outputs.
struct Block<'a> {
    /// The activations of each row.
    x: &'a [BytePanel],
    /// `(groups, 16)`
    scales: &'a [f32],
    /// Likewise; empty if there are none.
    offsets: &'a [f32],
    /// The number of groups that exist: fewer than there are scales in the last unit of a row that is not whole.
    groups: usize,
    /// `(rows, 16)`
    sums: &'a mut [f32],
}

impl Block<'_> {
    /// Adds the products with some codes. `held` is for their bytes, `(32, 64)`.
    #[inline(always)]
    fn unit<S: Simd, const NUMBERS: u8>(
        &mut self,
        s: S,
        coding: &ByteCoding,
        codes: &Codes<'_>,
        held: &mut [[i8; BYTES]; HELD],
    ) {
        let table = coding.table(s);
        match NUMBERS {
            NIBBLES => self.nibbles(
                s,
                &codes.nibbles(s),
                held,
                #[inline(always)]
                |codes| s.unpack_nibbles::<false>(codes, table),
                S::PAIRS,
            ),
            BOOK => self.nibbles(
                s,
                &codes.nibbles(s),
                held,
                #[inline(always)]
                |codes| s.unpack_nibbles::<true>(codes, table),
                false,
            ),
            SIGNED => self.bytes(
                s,
                &codes.bytes(s),
                held,
                #[inline(always)]
                |codes| s.unpack_bytes::<true>(codes),
            ),
            _ => self.bytes(
                s,
                &codes.bytes(s),
                held,
                #[inline(always)]
                |codes| s.unpack_bytes::<false>(codes),
            ),
        }
    }

    /// Adds the products with codes of 4 bits.
    // Places are taken modulo the number of vectors, which they are below: it costs less than a check.
    #[inline(always)]
    fn nibbles<S: Simd>(
        &mut self,
        s: S,
        columns: &[S::Packed; LANES],
        held: &mut [[i8; BYTES]; HELD],
        unpack: impl Fn(S::Packed) -> [S::Bytes; 2] + Copy,
        pairs: bool,
    ) {
        if many_registers::<S>() && self.x.len() < MIN_UNPACKED_ONCE {
            return self.add::<S, 2, false>(
                s,
                #[inline(always)]
                |at| unpack(columns[at % LANES]),
            );
        }
        let (both, _) = held.as_chunks_mut::<2>();
        for (column, [low, high]) in columns.iter().zip(both) {
            let halves = unpack(*column);
            s.store_bytes(halves[0], low);
            s.store_bytes(halves[1], high);
        }
        self.held(s, held, pairs);
    }

    /// Adds the products with codes of 8 bits.
    #[inline(always)]
    fn bytes<S: Simd>(
        &mut self,
        s: S,
        columns: &[S::Packed; HELD],
        held: &mut [[i8; BYTES]; HELD],
        unpack: impl Fn(S::Packed) -> S::Bytes + Copy,
    ) {
        if many_registers::<S>() && self.x.len() < MIN_UNPACKED_ONCE {
            return self.add::<S, 1, false>(
                s,
                #[inline(always)]
                |at| [unpack(columns[at % HELD])],
            );
        }
        for (column, out) in columns.iter().zip(held.iter_mut()) {
            s.store_bytes(unpack(*column), out);
        }
        self.held(s, held, false);
    }

    /// Adds the products with bytes; `pairs` says that they are codes of 4 bits, whose products are summed in words.
    #[inline(always)]
    fn held<S: Simd>(&mut self, s: S, held: &[[i8; BYTES]; HELD], pairs: bool) {
        if S::PAIRS && pairs {
            self.add::<S, 1, true>(
                s,
                #[inline(always)]
                |at| [s.load_bytes(&held[at % HELD])],
            );
        } else {
            self.add::<S, 1, false>(
                s,
                #[inline(always)]
                |at| [s.load_bytes(&held[at % HELD])],
            );
        }
    }

    /// Adds the products of all rows with `bytes`, which returns `P` of the 32 vectors of bytes of the unit each time.
    #[inline(always)]
    fn add<S: Simd, const P: usize, const PAIRS: bool>(
        &mut self,
        s: S,
        bytes: impl Fn(usize) -> [S::Bytes; P] + Copy,
    ) {
        let rows = self.x.len();
        let blocks = rows.div_ceil(S::BYTE_ROWS);
        // The sizes of blocks differ by at most one row.
        for block in 0..blocks {
            let row = block * rows / blocks;
            match (block + 1) * rows / blocks - row {
                8 if S::BYTE_ROWS > 7 => self.rows::<S, P, 8, PAIRS>(s, row, bytes),
                7 if S::BYTE_ROWS > 6 => self.rows::<S, P, 7, PAIRS>(s, row, bytes),
                6 if S::BYTE_ROWS > 5 => self.rows::<S, P, 6, PAIRS>(s, row, bytes),
                5 if S::BYTE_ROWS > 4 => self.rows::<S, P, 5, PAIRS>(s, row, bytes),
                4 => self.rows::<S, P, 4, PAIRS>(s, row, bytes),
                3 => self.rows::<S, P, 3, PAIRS>(s, row, bytes),
                2 => self.rows::<S, P, 2, PAIRS>(s, row, bytes),
                _ => self.rows::<S, P, 1, PAIRS>(s, row, bytes),
            }
        }
    }

    /// Adds those of `N` rows from `row` on.
    #[inline(always)]
    #[allow(
        clippy::needless_range_loop,
        reason = "loops over indices are unrolled"
    )]
    fn rows<S: Simd, const P: usize, const N: usize, const PAIRS: bool>(
        &mut self,
        s: S,
        row: usize,
        bytes: impl Fn(usize) -> [S::Bytes; P] + Copy,
    ) {
        let (scales, _) = self.scales.as_chunks::<LANES>();
        let (offsets, _) = self.offsets.as_chunks::<LANES>();
        let (kept, _) = self.sums.as_chunks_mut::<LANES>();
        let panels: Option<&[BytePanel; N]> = self.x[row..].first_chunk();
        let kept = kept[row..].first_chunk_mut();
        // Hidden from the compiler: in registers while codes are transposed, sums would be moved to memory and back for
        // every group.
        let (Some(panels), Some(kept)) = black_box((panels, kept)) else {
            unreachable!("as many rows")
        };
        let kept: &mut [[f32; LANES]; N] = kept;
        // Hidden as well: it unrolls a loop of known length and then loads all operands first, for which there are no
        // registers.
        let each = black_box(HELD / P / scales.len());
        assert!(
            P * each * scales.len() <= HELD && (!PAIRS || each.is_multiple_of(MAX_PAIRS)),
            "the vectors of a unit"
        );
        let mut sums = [s.splat(0.0); N];
        for n in 0..N {
            sums[n] = s.load_f32(&kept[n]);
        }
        for (g, scale) in scales.iter().enumerate().take(self.groups) {
            let mut totals = [s.zero_sums(); N];
            for (total, panel) in totals.iter_mut().zip(panels) {
                *total = s.splat_sums(panel.starts[g]);
            }
            let of_group = g * each..(g + 1) * each;
            if PAIRS {
                let ones = s.splat_pair(&[1, 1]);
                for first in of_group.step_by(MAX_PAIRS) {
                    let mut words = [s.splat_pair(&[0, 0]); N];
                    for at in first..first + MAX_PAIRS {
                        // SAFETY: asserted.
                        unsafe { multiply(s, at, bytes, panels, &mut words, S::dot_pairs) };
                    }
                    for (total, words) in totals.iter_mut().zip(words) {
                        *total = s.dot_words(*total, words, ones);
                    }
                }
            } else {
                for at in of_group {
                    // SAFETY: asserted.
                    unsafe { multiply(s, at, bytes, panels, &mut totals, S::dot_bytes) };
                }
            }
            let scale = s.load_f32(scale);
            for n in 0..N {
                if !many_registers::<S>() {
                    sums[n] = s.load_f32(&kept[n]);
                }
                let scale = s.mul(scale, s.splat(panels[n].scales[g]));
                sums[n] = s.mul_add(s.sums_to_f32(totals[n]), scale, sums[n]);
                if !many_registers::<S>() {
                    s.store_f32(sums[n], &mut kept[n]);
                }
            }
            if let Some(offset) = offsets.get(g) {
                let offset = s.load_f32(offset);
                for n in 0..N {
                    let of_group = s.splat(panels[n].sums[g]);
                    sums[n] = s.mul_add(offset, of_group, sums[n]);
                    if !many_registers::<S>() {
                        s.store_f32(sums[n], &mut kept[n]);
                    }
                }
            }
        }
        if many_registers::<S>() {
            for n in 0..N {
                s.store_f32(sums[n], &mut kept[n]);
            }
        }
    }
}

/// Returns `true` if the sums of all groups fit the registers beside those of one, and codes are unpacked anew for a few
/// rows in less time than their bytes are stored.
const fn many_registers<S: Simd>() -> bool {
    S::BYTE_ROWS == 8
}

/// The question to an instruction set whether it has [`many_registers`].
pub(super) struct ManyRegisters;

impl Kernel for ManyRegisters {
    type Output = bool;

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> bool {
        many_registers::<S>()
    }
}

/// Adds the products of the `at`-th `P` vectors of bytes with `N` rows to `totals`.
///
/// # Safety
/// `P · at + P` is at most [`HELD`].
#[inline(always)]
unsafe fn multiply<S: Simd, A: Copy, const P: usize, const N: usize>(
    s: S,
    at: usize,
    bytes: impl Fn(usize) -> [S::Bytes; P],
    panels: &[BytePanel; N],
    totals: &mut [A; N],
    dot: impl Fn(S, A, S::Bytes, S::Bytes) -> A,
) {
    for (p, w) in bytes(at).into_iter().enumerate() {
        for (total, panel) in totals.iter_mut().zip(panels) {
            // SAFETY: the caller ensures the bounds.
            let x = s.splat_quad(unsafe { panel.quads.get_unchecked(P * at + p) });
            *total = dot(s, *total, w, x);
        }
    }
}

const _: () = assert!(UNIT == HELD * 4, "four inputs in a lane");
