//! Rows of activations as bytes, in the order in which codes are unpacked.

use overdrive_kernels::{
    BYTES, Buffers, InstructionSet, Kept, Kernel, LANES, Simd, capacity_bytes,
};

use super::aligned::AlignedVec;
use super::coded_weight::{ByteCoding, CodedWeight};
use crate::codec::floats::{max_magnitude_of, round_bits};

/// The largest number of inputs that share a scale with weights of 8 bits; with weights of 4 bits it is [`UNIT`]. As
/// many share one as in the weight, up to that.
///
/// The rounding error of a group of `n` inputs is at most `√(n / 12) / 127` of its norm where the errors are spread
/// evenly, 2.6 % for 128; that of weights in 4 bits is some 8 %. For 32 it is that of
/// weights in 8 bits with a scale for as many.
const MAX_GROUP_OF_BYTES: usize = 32;

/// The number of inputs of 64 bytes of codes of 4 bits.
pub(super) const UNIT: usize = 2 * BYTES;

/// The largest byte.
pub(super) const LEVELS: f32 = 127.0;

/// The layout of the bytes of activations. Weights of the same layout share them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ByteLayout {
    pub(super) coding: ByteCoding,
    /// If `true`, the sums of groups are needed, for offsets.
    sums: bool,
    inputs: usize,
    /// The number of inputs that share a scale.
    pub(super) group: usize,
}

impl ByteLayout {
    /// Returns the layout for a weight; `None` if it has no kernel of bytes. It does not depend on the number of rows.
    pub(super) fn of(weight: &CodedWeight<'_>) -> Option<Self> {
        let coding = weight.byte_coding()?;
        Some(ByteLayout {
            coding,
            sums: weight.offsets.is_some(),
            inputs: weight.inputs,
            group: weight.scales.block.min(match coding.per_byte() {
                // The error of activations must not be larger than that of the weight.
                1 => MAX_GROUP_OF_BYTES,
                _ => UNIT,
            }),
        })
    }

    /// Returns the number of inputs of a row.
    pub(super) fn inputs(&self) -> usize {
        self.inputs
    }
}

/// The inputs of a vector of codes: 128 for codes of 4 bits, of which lane `l` has inputs `8 l ..`, four in each of
/// `low` and `high`; 64 for codes of 8 bits, all in `low`.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Unit {
    /// The inputs of the low halves of bytes, or of bytes.
    pub(super) low: [i8; BYTES],
    /// The inputs of the high halves of bytes.
    pub(super) high: [i8; BYTES],
    /// The start of the sums of products, which makes the code of zero add nothing.
    pub(super) starts: [i32; LANES],
}

/// The memory of [`ByteRows`], kept from call to call: rows of one token are quantized in less time than new memory
/// takes.
#[derive(Debug, Default)]
struct RowBuffers {
    units: Vec<Unit>,
    scales: AlignedVec<f32>,
    sums: AlignedVec<f32>,
}

impl Buffers for RowBuffers {
    fn bytes(&self) -> usize {
        capacity_bytes(&self.units) + self.scales.bytes() + self.sums.bytes()
    }
}

thread_local! {
    static BUFFERS: Kept<RowBuffers> = const { Kept::new() };
}

/// Rows of activations, quantized symmetrically with a scale for each group of inputs.
#[derive(Debug)]
pub(super) struct ByteRows {
    /// `(rows, units of a row)`
    units: Vec<Unit>,
    pub(super) of_row: usize,
    pub(super) rows: usize,
    /// The number of inputs that share a scale.
    pub(super) group: usize,
    /// The number of groups of a row.
    pub(super) groups: usize,
    /// The scale of each group times the unit of the weight, `(rows, groups)`.
    scales: AlignedVec<f32>,
    /// The sum of the quantized activations of each group, `(rows, groups)`; empty unless needed.
    sums: AlignedVec<f32>,
}

impl ByteRows {
    /// Quantizes `x (rows, inputs)`, a few rows.
    pub(super) fn new(set: InstructionSet, x: &[f32], layout: &ByteLayout) -> Self {
        let rows = x.len() / layout.inputs;
        // The last unit of a row may have inputs that do not exist: zeros.
        let of_row = layout.inputs.div_ceil(BYTES * layout.coding.per_byte());
        let groups = layout.inputs / layout.group;
        let RowBuffers {
            mut units,
            mut scales,
            mut sums,
        } = Kept::take(&BUFFERS);
        // All are written below; new ones are zero.
        let zero = Unit {
            low: [0; BYTES],
            high: [0; BYTES],
            starts: [0; LANES],
        };
        units.resize(rows * of_row, zero);
        scales.reset(rows * groups);
        sums.reset(if layout.sums { rows * groups } else { 0 });
        let mut all = ByteRows {
            units,
            of_row,
            rows,
            group: layout.group,
            groups,
            scales,
            sums,
        };
        let out = &mut all;
        set.run(Quantize { x, layout, out });
        all
    }

    /// Returns the units of a row.
    #[inline(always)]
    pub(super) fn units(&self, row: usize) -> &[Unit] {
        &self.units[row * self.of_row..(row + 1) * self.of_row]
    }

    /// Returns the scales of the groups of a row.
    #[inline(always)]
    pub(super) fn scales(&self, row: usize) -> &[f32] {
        &self.scales[row * self.groups..(row + 1) * self.groups]
    }

    /// Returns the sums of the groups of a row; none unless the layout has them.
    #[inline(always)]
    pub(super) fn sums(&self, row: usize) -> &[f32] {
        let of_row = row * self.groups..(row + 1) * self.groups;
        self.sums.get(of_row).unwrap_or(&[])
    }
}

impl Drop for ByteRows {
    fn drop(&mut self) {
        let buffers = RowBuffers {
            units: std::mem::take(&mut self.units),
            scales: std::mem::take(&mut self.scales),
            sums: std::mem::take(&mut self.sums),
        };
        Kept::put(&BUFFERS, buffers);
    }
}

struct Quantize<'a> {
    x: &'a [f32],
    layout: &'a ByteLayout,
    out: &'a mut ByteRows,
}

impl Kernel for Quantize<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        match (self.layout.coding.per_byte(), self.layout.group) {
            (1, 16) => self.rows::<S, 16, 1>(s),
            (1, _) => self.rows::<S, MAX_GROUP_OF_BYTES, 1>(s),
            (_, 32) => self.rows::<S, 32, 2>(s),
            (_, 64) => self.rows::<S, 64, 2>(s),
            _ => self.rows::<S, UNIT, 2>(s),
        }
    }
}

impl Quantize<'_> {
    // `G` inputs in a group, and `CODES` codes in a byte. Plain loops, which the compiler vectorizes for each set. Two
    // passes, since a vector load right after the stores of its elements waits for them.
    #[inline(always)]
    fn rows<S: Simd, const G: usize, const CODES: usize>(self, s: S) {
        let (layout, out) = (self.layout, self.out);
        let excess = layout.coding.excess::<S>();
        // Both halves of each byte are 1, so that the dot product is the sum of the activations.
        let ones = s.load_packed(&[0x11; BYTES]);
        let none = s.byte_table(&[0; 16]);
        let each = G / (4 * CODES);
        let inputs = CODES * BYTES;
        let rows = self.x.chunks_exact(layout.inputs);
        for (row, x) in rows.enumerate() {
            let units = &mut out.units[row * out.of_row..(row + 1) * out.of_row];
            let scales = &mut out.scales[row * out.groups..(row + 1) * out.groups];
            let of_units = scales.chunks_mut(inputs / G);
            for ((x, unit), scales) in x.chunks(inputs).zip(&mut *units).zip(of_units) {
                let mut bytes = [0; UNIT];
                let (groups, _) = x.as_chunks::<G>();
                let (of_groups, _) = bytes.as_chunks_mut::<G>();
                for ((x, out), scale) in groups.iter().zip(of_groups).zip(scales) {
                    *scale = quantize_group(x, out);
                }
                let (low, high) = bytes.split_at(BYTES);
                unit.low.copy_from_slice(low);
                unit.high.copy_from_slice(high);
            }
            for (index, unit) in units.iter_mut().enumerate() {
                if CODES == 2 {
                    let (mut even, mut odd) = ([0; BYTES], [0; BYTES]);
                    for at in 0..BYTES / 2 {
                        even[at] = unit.low[2 * at];
                        odd[at] = unit.low[2 * at + 1];
                        even[at + BYTES / 2] = unit.high[2 * at];
                        odd[at + BYTES / 2] = unit.high[2 * at + 1];
                    }
                    (unit.low, unit.high) = if layout.coding.high_first {
                        (odd, even)
                    } else {
                        (even, odd)
                    };
                }
                let (low, high) = (s.load_bytes(&unit.low), s.load_bytes(&unit.high));
                let totals = s.dot_nibbles::<false>(s.zero_sums(), ones, none, low, high);
                let mut starts = [0; LANES];
                s.store_sums(totals, &mut starts);
                if layout.sums {
                    let first = index * LANES / each;
                    let sums = &mut out.sums[row * out.groups..][first..out.groups];
                    let of_groups = sums.iter_mut().zip(&scales[first..]);
                    for (totals, (sum, scale)) in starts.chunks_exact(each).zip(of_groups) {
                        let total: i32 = totals.iter().sum();
                        #[allow(clippy::cast_precision_loss, reason = "at most 2^14")]
                        {
                            *sum = total as f32 * scale;
                        }
                    }
                }
                unit.starts = starts.map(
                    #[inline(always)]
                    |total| -excess * total,
                );
            }
            for scale in scales {
                *scale *= layout.coding.unit;
            }
        }
    }
}

/// Quantizes inputs that share a scale; returns the scale.
#[inline(always)]
pub(super) fn quantize_group<const G: usize>(x: &[f32; G], out: &mut [i8; G]) -> f32 {
    let most = max_magnitude_of(x);
    let inverse = LEVELS / most;
    // The quotient by a subnormal number may overflow: such groups are zero.
    let inverse = if inverse.is_finite() { inverse } else { 0.0 };
    let mut rounded = [0; G];
    for (byte, x) in rounded.iter_mut().zip(x) {
        #[allow(
            clippy::cast_possible_truncation,
            reason = "the low 8 bits are the integer"
        )]
        {
            *byte = round_bits(x * inverse) as i8;
        }
    }
    // Copied at once: written to `out` directly, the compiler stores them one by one.
    *out = rounded;
    most / LEVELS
}
