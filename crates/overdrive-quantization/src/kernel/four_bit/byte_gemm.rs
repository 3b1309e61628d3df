//! The GEMM of many rows of activations in bytes. The lanes are outputs.
//!
//! Some rows of the weight are transposed, four bytes in a lane, and unpacked to bytes once for all rows of
//! activations, to the first cache; the sum of a lane is converted to f32 once for the inputs that share a scale.
//! With many rows, groups of fewer inputs than a unit are scaled to bytes that share one, for codes of 4 bits.
#![allow(unsafe_code)]

use std::ops::Range;

use overdrive_kernels::{BYTES, Buffers, Kept, Kernel, LANES, Simd};

use super::aligned::AlignedVec;
use super::byte_panels::{BytePanel, BytePanels};
use super::byte_rows::UNIT;
use super::coded_weight::{ByteCoding, ByteNumbers, CodedWeight, MIN_GROUP_OF_NIBBLES};
use super::scale_rows::{Raw, ScaleRows};
use super::word_gemm::{codes, next_output, prefetch_first};
use crate::codec::floats::round_bits;
use crate::kernel::at;
use crate::kernel::joint_gemm::Results;

/// The number of vectors of bytes of a unit of 16 outputs: low and high halves of each lane of codes.
const HELD: usize = 2 * LANES;

/// The number of vectors of outputs that are unpacked at once: activations come from the second cache or
/// further, and serve this many each time.
const VECTORS: usize = 4;

/// The number of units that are unpacked at once. The sums of many rows come from the second cache for each block
/// of units; two units of [`VECTORS`] vectors take half of a first cache of 32 KB.
const UNITS: usize = 2;

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
    /// The sums, `(rows, vectors, 16)`.
    sums: AlignedVec<f32>,
    /// The bytes of some units, `(units, 32, vectors, 64)`.
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

impl Kernel for ByteGemm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        // A weight with bytes of activations has one.
        let Some(coding) = self.weight.byte_coding() else {
            return;
        };
        let mut scratch = Kept::take(&SCRATCH);
        let mut output = self.outputs.start;
        let first = output..(output + VECTORS * LANES).min(self.outputs.end);
        prefetch_first(s, self.weight, first);
        while output < self.outputs.end {
            let vectors = (self.outputs.end - output).div_ceil(LANES).min(VECTORS);
            self.vectors(s, &coding, output, vectors, &mut scratch);
            output += vectors * LANES;
        }
        Kept::put(&SCRATCH, scratch);
    }
}

impl ByteGemm<'_> {
    /// Computes `vectors` vectors of outputs from `output` on.
    #[inline(always)]
    fn vectors<S: Simd>(
        &mut self,
        s: S,
        coding: &ByteCoding,
        output: usize,
        vectors: usize,
        scratch: &mut Scratch,
    ) {
        let (x, weight) = (self.x, self.weight);
        let granule = weight.scales.block.min(x.group);
        // The groups of the weight in a unit, and whether they get one scale.
        let (groups, rescaled) = (UNIT / granule, granule < x.group);
        let shape = ScaleRows::new(weight.inputs, granule);
        let each = (x.units * groups).next_multiple_of(LANES) * LANES;
        let sums = x.rows * VECTORS * LANES;
        scratch.sums.grow(sums);
        scratch.sums[..sums].fill(0.0);
        scratch.bytes.grow(UNITS * HELD * VECTORS * BYTES);
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
        let pairs = !rescaled && matches!(coding.numbers, ByteNumbers::Integers(_));
        let blocks = x.rows.div_ceil(S::BYTE_ROWS);
        for first in (0..x.units).step_by(UNITS) {
            let units = first..(first + UNITS).min(x.units);
            for vector in 0..vectors {
                for unit in units.clone() {
                    let output = output + vector * LANES;
                    let next = next_output(output, vectors, self.outputs.end);
                    let held = (unit - first) * HELD * VECTORS + vector;
                    let out = &mut scratch.bytes[held * BYTES..];
                    if coding.per_byte() == 1 {
                        for half in 0..2 {
                            let columns = codes(s, weight, output, 2 * unit + half, next);
                            let out = &mut out[half * LANES * VECTORS * BYTES..];
                            unpack_bytes(s, coding, &columns, out);
                        }
                        continue;
                    }
                    let columns = codes(s, weight, output, unit, next);
                    if !rescaled {
                        unpack(s, coding, &columns, out, |_, bytes| bytes);
                        continue;
                    }
                    let first = vector * each;
                    let of_groups =
                        first + unit * groups * LANES..first + (unit + 1) * groups * LANES;
                    let of_groups_offsets = offsets.get(of_groups.clone()).unwrap_or_default();
                    let scales = &scratch.scales[of_groups];
                    let (made, of_unit) = Rescaled::new(s, coding, scales, of_groups_offsets);
                    unpack(
                        s,
                        coding,
                        &columns,
                        out,
                        #[inline(always)]
                        |column, bytes| {
                            let group = column * groups / LANES;
                            s.rescale_bytes(bytes, made.factors[group], made.starts[group])
                        },
                    );
                    // Over the scales of groups, which are no longer needed: units are unpacked in their order.
                    scratch.scales[first + unit * LANES..][..LANES].copy_from_slice(&of_unit);
                }
            }
            // The sizes of blocks differ by at most one row.
            for block in 0..blocks {
                let of_block = block * x.rows / blocks..(block + 1) * x.rows / blocks;
                let mut vector = 0;
                while vector < vectors {
                    // A power of two.
                    let count = 1 << S::BYTE_VECTORS.min(vectors - vector).ilog2();
                    let mut block = Block {
                        x,
                        units: units.clone(),
                        row: of_block.start,
                        each,
                        // Hidden from the compiler: it unrolls a loop of known length and then loads all
                        // operands first, for which there are no registers.
                        steps: std::hint::black_box(HELD / x.groups()),
                        pairs,
                        bytes: &scratch.bytes[vector * BYTES..],
                        scales: &scratch.scales[vector * each..vectors * each],
                        offsets: match rescaled {
                            true => &[],
                            false => offsets.get(vector * each..).unwrap_or_default(),
                        },
                        sums: &mut scratch.sums[vector * LANES..sums],
                    };
                    match count {
                        4 => block.rows::<S, 4>(s, of_block.len()),
                        2 => block.rows::<S, 2>(s, of_block.len()),
                        _ => block.rows::<S, 1>(s, of_block.len()),
                    }
                    vector += count;
                }
            }
        }
        let count = (vectors * LANES).min(self.outputs.end - output);
        let of_rows = scratch.sums[..sums].chunks_exact(VECTORS * LANES);
        for (row, sums) in of_rows.enumerate() {
            self.results.put(row, output, &sums[..count]);
        }
    }
}

/// Unpacks the bytes of one unit of 16 outputs, `(16 lanes of codes, low and high halves, vectors, 64)`; `scaled`
/// changes those of a lane of codes.
#[inline(always)]
fn unpack<S: Simd>(
    s: S,
    coding: &ByteCoding,
    columns: &[S::Packed; LANES],
    out: &mut [i8],
    scaled: impl Fn(usize, S::Bytes) -> S::Bytes,
) {
    match coding.numbers {
        ByteNumbers::Book(_) => unpack_halves::<S, true>(s, coding, columns, out, scaled),
        _ => unpack_halves::<S, false>(s, coding, columns, out, scaled),
    }
}

#[inline(always)]
fn unpack_halves<S: Simd, const BOOK: bool>(
    s: S,
    coding: &ByteCoding,
    columns: &[S::Packed; LANES],
    out: &mut [i8],
    scaled: impl Fn(usize, S::Bytes) -> S::Bytes,
) {
    let table = coding.table(s);
    let (out, _) = out.as_chunks_mut::<BYTES>();
    for ((column, packed), out) in columns.iter().enumerate().zip(out.chunks_mut(2 * VECTORS)) {
        let halves = s.unpack_nibbles::<BOOK>(*packed, table);
        for (half, out) in halves.into_iter().zip(out.iter_mut().step_by(VECTORS)) {
            s.store_bytes(scaled(column, half), out);
        }
    }
}

/// Unpacks the bytes of half a unit of 16 outputs in codes of 8 bits, `(16 lanes of codes, vectors, 64)`.
#[inline(always)]
fn unpack_bytes<S: Simd>(s: S, coding: &ByteCoding, columns: &[S::Packed; LANES], out: &mut [i8]) {
    let (out, _) = out.as_chunks_mut::<BYTES>();
    for (packed, out) in columns.iter().zip(out.iter_mut().step_by(VECTORS)) {
        let bytes = match coding.numbers {
            ByteNumbers::Unsigned => s.unpack_bytes::<false>(*packed),
            _ => s.unpack_bytes::<true>(*packed),
        };
        s.store_bytes(bytes, out);
    }
}

/// The factors and starts, one of each for a group and output, that make the numbers of the groups of a unit bytes
/// with one scale, as [`rescale_bytes`](overdrive_kernels::FourBit::rescale_bytes) takes them.
///
/// A byte is off by half of 1/127 of the largest number of the unit: where the scales of the groups are the same, by
/// 1/16 of a step of integer codes.
struct Rescaled<S: Simd> {
    factors: [S::Sums; MAX_GROUPS],
    starts: [S::Sums; MAX_GROUPS],
}

/// The largest number of groups of a unit, of codes of 4 bits.
const MAX_GROUPS: usize = UNIT / MIN_GROUP_OF_NIBBLES;

/// The largest byte, as the high one of a word.
const MOST: f32 = 127.0 * 256.0;

impl<S: Simd> Rescaled<S> {
    /// Makes those of some groups from their scales and offsets `(groups, 16)`; returns the scale of the unit for
    /// each output, too.
    #[inline(always)]
    fn new(s: S, coding: &ByteCoding, scales: &[f32], offsets: &[f32]) -> (Self, [f32; LANES]) {
        let (scales, _) = scales.as_chunks::<LANES>();
        let (offsets, _) = offsets.as_chunks::<LANES>();
        // Numbers of integer codes are `code · step + low`, with codes of 0 to 15.
        let zero = match coding.numbers {
            ByteNumbers::Integers(zero) => Some(f32::from(zero)),
            _ => None,
        };
        let mut lows = [[0.0; LANES]; MAX_GROUPS];
        let mut most = [0.0_f32; LANES];
        let mut bad = [0.0; LANES];
        for (g, (steps, lows)) in scales.iter().zip(&mut lows).enumerate() {
            let offsets = offsets.get(g).unwrap_or(&[0.0; LANES]);
            for lane in 0..LANES {
                let step = steps[lane];
                let magnitude = match zero {
                    Some(zero) => {
                        lows[lane] = offsets[lane] - zero * step;
                        lows[lane].abs().max((lows[lane] + 15.0 * step).abs())
                    }
                    None => 127.0 * step.abs(),
                };
                most[lane] = most[lane].max(magnitude);
                // NaN if a scale is infinite or NaN, which a maximum passes over.
                bad[lane] += magnitude * 0.0;
            }
        }
        let mut made = Rescaled {
            factors: [s.zero_sums(); MAX_GROUPS],
            starts: [s.zero_sums(); MAX_GROUPS],
        };
        let inverses = most.map(
            #[inline(always)]
            |most| {
                let inverse = MOST / most;
                // The quotient by a subnormal number may overflow: such units are zero.
                if inverse.is_finite() { inverse } else { 0.0 }
            },
        );
        // Both words of a lane.
        let twice = |word: i32| (word & 0xffff).wrapping_mul(0x1_0001);
        for (g, steps) in scales.iter().enumerate() {
            let (mut factors, mut starts) = ([0; LANES], [0; LANES]);
            for lane in 0..LANES {
                let factor = round_bits(steps[lane] * inverses[lane]) as i32;
                let low = round_bits(lows[g][lane] * inverses[lane]) as i32;
                // A book's numbers come with `BOOK_ZERO`; half a byte rounds the high one.
                let known = if zero.is_none() { S::BOOK_ZERO } else { 0 };
                let start = low.wrapping_sub(factor.wrapping_mul(known));
                factors[lane] = twice(factor);
                starts[lane] = twice(start.wrapping_add((S::BOOK_ZERO << 8) + 128));
            }
            made.factors[g] = s.load_sums(&factors);
            made.starts[g] = s.load_sums(&starts);
        }
        let mut of_unit = bad;
        for (scale, most) in of_unit.iter_mut().zip(most) {
            *scale += most / 127.0;
        }
        (made, of_unit)
    }
}

/// Some units of inputs, some rows, and one, two or four vectors of outputs.
struct Block<'a> {
    x: &'a BytePanels,
    units: Range<usize>,
    row: usize,
    /// The number of scales of a vector of outputs.
    each: usize,
    /// The number of vectors of bytes that share a scale of activations.
    steps: usize,
    /// If `true`, `bytes` are codes of 4 bits, whose products may be summed in words.
    pairs: bool,
    /// `(units, 32, vectors, 64)`, from the first vector of these on
    bytes: &'a [i8],
    scales: &'a [f32],
    /// Empty if there are none.
    offsets: &'a [f32],
    /// `(rows, vectors, 16)`, likewise
    sums: &'a mut [f32],
}

impl Block<'_> {
    /// Adds `count` rows, at most `S::BYTE_ROWS`.
    #[inline(always)]
    fn rows<S: Simd, const V: usize>(&mut self, s: S, count: usize) {
        match S::PAIRS && self.pairs {
            true => self.rows_by::<S, V, true>(s, count),
            false => self.rows_by::<S, V, false>(s, count),
        }
    }

    #[inline(always)]
    fn rows_by<S: Simd, const V: usize, const PAIRS: bool>(&mut self, s: S, count: usize) {
        match count {
            6 if S::BYTE_ROWS > 5 => self.add::<S, V, 6, PAIRS>(s),
            5 if S::BYTE_ROWS > 4 => self.add::<S, V, 5, PAIRS>(s),
            4 => self.add::<S, V, 4, PAIRS>(s),
            3 => self.add::<S, V, 3, PAIRS>(s),
            2 => self.add::<S, V, 2, PAIRS>(s),
            _ => self.add::<S, V, 1, PAIRS>(s),
        }
    }

    /// Adds `N` rows with `V` vectors of outputs.
    #[inline(always)]
    #[allow(
        clippy::needless_range_loop,
        reason = "loops over indices are unrolled"
    )]
    fn add<S: Simd, const V: usize, const N: usize, const PAIRS: bool>(&mut self, s: S) {
        let (rows, groups) = (self.x.rows, self.x.groups());
        let (units, steps) = (self.units.clone(), self.steps);
        assert!(
            V <= VECTORS
                && self.row + N <= rows
                && steps * groups <= HELD
                && (!PAIRS || steps.is_multiple_of(MAX_PAIRS))
                && self.bytes.len() >= ((units.len() * HELD - 1) * VECTORS + V) * BYTES
                && self.sums.len() >= ((rows - 1) * VECTORS + V) * LANES
                && self.scales.len() >= V * self.each
                && units.end * groups * LANES <= self.each,
            "the sizes that the caller gave"
        );
        for unit in units.clone() {
            // SAFETY: asserted; a panel of each row.
            let panels: &[BytePanel; N] = unsafe { at(self.x.of_unit(unit), self.row) };
            let first = (unit - units.start) * HELD;
            for g in 0..groups {
                let mut totals = [[s.zero_sums(); V]; N];
                for (totals, panel) in totals.iter_mut().zip(panels) {
                    *totals = [s.splat_sums(panel.starts[g]); V];
                }
                let (mut held, end) = (g * steps, (g + 1) * steps);
                while held < end {
                    if !PAIRS {
                        // SAFETY: asserted.
                        unsafe { self.step(s, (first, held), panels, &mut totals, S::dot_bytes) };
                        held += 1;
                        continue;
                    }
                    let mut words = [[s.splat_pair(&[0, 0]); V]; N];
                    for step in 0..MAX_PAIRS {
                        let at = (first, held + step);
                        // SAFETY: asserted.
                        unsafe { self.step(s, at, panels, &mut words, S::dot_pairs) };
                    }
                    held += MAX_PAIRS;
                    let ones = s.splat_pair(&[1, 1]);
                    for (totals, words) in totals.iter_mut().zip(words) {
                        for (total, words) in totals.iter_mut().zip(words) {
                            *total = s.dot_words(*total, words, ones);
                        }
                    }
                }
                let from = (unit * groups + g) * LANES;
                let mut scales = [s.splat(0.0); V];
                for (v, scale) in scales.iter_mut().enumerate() {
                    // SAFETY: asserted.
                    *scale = s.load_f32(unsafe { at(self.scales, v * self.each + from) });
                }
                // The sums stay in memory, so that all registers are there for the totals; and the loop is short, so
                // that it is unrolled, without which the totals would be in memory too.
                for n in 0..N {
                    let of_row = s.splat(panels[n].scales[g]);
                    for v in 0..V {
                        // SAFETY: asserted.
                        let sum = unsafe { self.sum(n, v) };
                        let total = s.sums_to_f32(totals[n][v]);
                        let scale = s.mul(scales[v], of_row);
                        s.store_f32(s.mul_add(total, scale, s.load_f32(sum)), sum);
                    }
                }
                if !self.offsets.is_empty() {
                    for v in 0..V {
                        let offset = s.load_f32(&self.offset(v * self.each + from));
                        for (n, panel) in panels.iter().enumerate() {
                            // SAFETY: asserted.
                            let sum = unsafe { self.sum(n, v) };
                            let of_group = s.splat(panel.sums[g]);
                            s.store_f32(s.mul_add(offset, of_group, s.load_f32(sum)), sum);
                        }
                    }
                }
            }
        }
    }

    /// Adds the products of one vector of bytes of each of `V` vectors of outputs and `N` rows to `totals`.
    ///
    /// # Safety
    /// `held` is below [`HELD`], and `bytes` has those of the unit whose first is `first`.
    #[inline(always)]
    unsafe fn step<S: Simd, A: Copy, const V: usize, const N: usize>(
        &self,
        s: S,
        (first, held): (usize, usize),
        panels: &[BytePanel; N],
        totals: &mut [[A; V]; N],
        dot: impl Fn(S, A, S::Bytes, S::Bytes) -> A,
    ) {
        let mut w = [s.load_bytes(&[0; BYTES]); V];
        for (v, w) in w.iter_mut().enumerate() {
            let from = ((first + held) * VECTORS + v) * BYTES;
            // SAFETY: the caller ensures the bounds.
            *w = s.load_bytes(unsafe { at(self.bytes, from) });
        }
        for (totals, panel) in totals.iter_mut().zip(panels) {
            // SAFETY: `held < HELD`, of which there are as many quads.
            let x = s.splat_quad(unsafe { panel.quads.get_unchecked(held) });
            for (total, w) in totals.iter_mut().zip(w) {
                *total = dot(s, *total, w, x);
            }
        }
    }

    #[inline(always)]
    fn offset(&self, from: usize) -> [f32; LANES] {
        let offset = self.offsets[from..].first_chunk();
        offset.copied().unwrap_or_default()
    }

    /// Returns the sums of one row and one vector of these.
    ///
    /// # Safety
    /// The row and the vector exist.
    #[inline(always)]
    unsafe fn sum(&mut self, n: usize, v: usize) -> &mut [f32; LANES] {
        let first = ((self.row + n) * VECTORS + v) * LANES;
        debug_assert!(
            first + LANES <= self.sums.len(),
            "in the bounds of the slice"
        );
        // SAFETY: the caller ensures the bounds; an array has the alignment of its elements.
        unsafe { &mut *self.sums.as_mut_ptr().add(first).cast() }
    }
}
