//! Rows of activations as bytes, in the order in which codes of 4 bits come out of a vector of them.
#![allow(unsafe_code)]

use super::lines::Lines;
use super::map::CodedMap;
use super::words::{PACKED, Words, Work, run_on};
use crate::kernel::simd::{InstructionSet, LANES};

/// Inputs that share a scale. Twice as many would double the error of the rounding where one activation
/// is large, and save little: scales are multiplied in 16 at a time, and spread over lanes in any case.
pub(super) const GROUP: usize = 32;

/// Inputs of a unit: 64 bytes of codes.
pub(super) const UNIT: usize = 2 * PACKED;

/// Steps on each side of zero.
pub(super) const LEVELS: f32 = 127.0;

/// What the bytes of activations depend on. Maps that agree in it share them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct ByteLayout {
    /// Codes whose first is in the high half of a byte.
    high_first: bool,
    /// The code that stands for zero, where codes are numbers themselves.
    zero: Option<u8>,
    /// What the bytes of the weight are multiples of.
    unit: f32,
    /// Whether the sums of lanes are wanted.
    sums: bool,
    inputs: usize,
}

impl ByteLayout {
    /// `None` for maps that have no kernel of bytes.
    pub(super) fn of(map: &CodedMap<'_>) -> Option<Self> {
        let (table, high_first) = map.byte_table()?;
        Some(ByteLayout {
            high_first,
            zero: table.zero,
            unit: table.unit,
            sums: map.offsets.is_some(),
            inputs: map.inputs,
        })
    }

    /// Numbers of a row.
    pub(super) fn inputs(&self) -> usize {
        self.inputs
    }
}

/// What a vector of codes is multiplied with: 128 inputs, of which lane `l` has `8 l ..`, four in each
/// plane.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct Unit {
    /// Those that belong to the low halves of bytes.
    pub(super) low: [i8; PACKED],
    pub(super) high: [i8; PACKED],
    /// What sums of products begin with, so that the code that stands for zero adds nothing.
    pub(super) starts: [i32; LANES],
}

/// Rows of activations, quantized symmetrically with a scale for each [`GROUP`] inputs.
#[derive(Debug)]
pub(super) struct ByteRows {
    /// `(rows, units of a row)`
    units: Box<[Unit]>,
    pub(super) of_row: usize,
    pub(super) rows: usize,
    /// Scale of each group times the unit of the weight's bytes, `(rows, stride)`; zeros beyond the groups.
    pub(super) scales: Lines<f32>,
    /// Sum of the activations of a group as they are quantized, likewise; empty unless wanted.
    pub(super) sums: Lines<f32>,
    /// Groups of a row, rounded up to whole vectors.
    pub(super) stride: usize,
}

impl ByteRows {
    /// Quantizes `x (rows, inputs)`, a few rows.
    pub(super) fn new(set: InstructionSet, x: &[f32], layout: &ByteLayout) -> Self {
        let units = Box::new_zeroed_slice(x.len() / UNIT);
        // SAFETY: numbers of zero bytes are zero.
        let units: Box<[Unit]> = unsafe { units.assume_init() };
        let rows = x.len() / layout.inputs;
        let stride = (layout.inputs / GROUP).next_multiple_of(LANES);
        let mut all = ByteRows {
            units,
            of_row: layout.inputs / UNIT,
            rows,
            scales: Lines::new(rows * stride),
            sums: Lines::new(if layout.sums { rows * stride } else { 0 }),
            stride,
        };
        let out = &mut all;
        run_on(set, Quantize { x, layout, out });
        all
    }

    /// The units of a row.
    #[inline(always)]
    pub(super) fn units(&self, row: usize) -> &[Unit] {
        &self.units[row * self.of_row..(row + 1) * self.of_row]
    }
}

struct Quantize<'a> {
    x: &'a [f32],
    layout: &'a ByteLayout,
    out: &'a mut ByteRows,
}

impl Work for Quantize<'_> {
    type Output = ();

    /// Plain loops, which become vectors of whatever set they are compiled for. Two passes, since a
    /// vector that is loaded right after its parts were written has to wait for them.
    #[inline(always)]
    fn run<S: Words>(self, s: S) {
        let (layout, out) = (self.layout, self.out);
        let zero = layout.zero.map_or(S::BOOK_ZERO, i32::from);
        // Both halves of a byte are one: each activation once.
        let ones = s.load_packed(&[0x11; PACKED]);
        let none = s.byte_table(&[0; 16]);
        let each = GROUP / 8;
        let rows = self.x.chunks_exact(layout.inputs);
        for (row, x) in rows.enumerate() {
            let (all, _) = x.as_chunks::<UNIT>();
            let units = &mut out.units[row * out.of_row..(row + 1) * out.of_row];
            let scales = &mut out.scales[row * out.stride..(row + 1) * out.stride];
            let of_units = scales.chunks_exact_mut(UNIT / GROUP);
            for ((x, unit), scales) in all.iter().zip(&mut *units).zip(of_units) {
                let (groups, _) = x.as_chunks::<GROUP>();
                let (low, _) = unit.low.as_chunks_mut::<GROUP>();
                let (high, _) = unit.high.as_chunks_mut::<GROUP>();
                let out = low.iter_mut().chain(high);
                for ((x, out), scale) in groups.iter().zip(out).zip(scales) {
                    *scale = group(x, out);
                }
            }
            for (index, unit) in units.iter_mut().enumerate() {
                let (mut even, mut odd) = ([0; PACKED], [0; PACKED]);
                for at in 0..PACKED / 2 {
                    even[at] = unit.low[2 * at];
                    odd[at] = unit.low[2 * at + 1];
                    even[at + PACKED / 2] = unit.high[2 * at];
                    odd[at + PACKED / 2] = unit.high[2 * at + 1];
                }
                (unit.low, unit.high) = if layout.high_first {
                    (odd, even)
                } else {
                    (even, odd)
                };
                let (low, high) = (s.load_plane(&unit.low), s.load_plane(&unit.high));
                let totals = s.add_nibbles::<false>(s.no_sums(), ones, none, low, high);
                let mut starts = [0; LANES];
                s.store_sums(totals, &mut starts);
                if layout.sums {
                    for (g, totals) in starts.chunks_exact(each).enumerate() {
                        let at = index * LANES / each + g;
                        let total: i32 = totals.iter().sum();
                        #[allow(clippy::cast_precision_loss, reason = "at most 2^12")]
                        let total = total as f32;
                        out.sums[row * out.stride + at] = total * scales[at];
                    }
                }
                unit.starts = starts.map(
                    #[inline(always)]
                    |total| -zero * total,
                );
            }
            for scale in scales {
                *scale *= layout.unit;
            }
        }
    }
}

/// The bytes of inputs that share a scale, and the scale.
#[inline(always)]
fn group(x: &[f32; GROUP], out: &mut [i8; GROUP]) -> f32 {
    // Magnitudes of floats compare as their bits do, and NaN is larger than all.
    let bits = x
        .iter()
        .fold(0, |most, x| (x.to_bits() & !(1 << 31)).max(most));
    let most = f32::from_bits(bits);
    let inverse = LEVELS / most;
    // The quotient by a subnormal number may be too much for a float: such groups are zero.
    let inverse = if inverse.is_finite() { inverse } else { 0.0 };
    // Adding 1.5 · 2²³ leaves the nearest integer (ties to even) in the low bits of the sum.
    const TO_INTEGER: f32 = 12_582_912.0;
    let mut rounded = [0; GROUP];
    for (byte, x) in rounded.iter_mut().zip(x) {
        #[allow(
            clippy::cast_possible_truncation,
            reason = "the low 8 bits are the integer"
        )]
        {
            *byte = (x * inverse + TO_INTEGER).to_bits() as i8;
        }
    }
    // All at once, or they are written one by one.
    *out = rounded;
    most / LEVELS
}
