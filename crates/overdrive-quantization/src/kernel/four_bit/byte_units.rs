//! Many rows of activations as bytes: as [`ByteRows`] has them, in little memory, and those of one unit of
//! inputs together.

use super::byte_rows::{ByteLayout, ByteRows, GROUP, UNIT};
use super::words::PACKED;
use crate::kernel::simd::InstructionSet;
use crate::kernel::threads::{Target, chunks};

/// Parts of a unit that have a scale each.
pub(super) const GROUPS: usize = UNIT / GROUP;

/// Activations that are quantized by one thread.
const PARALLEL: usize = 32 << 10;

/// 128 inputs of one row.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct ByteUnit {
    /// Those that belong to the low and to the high halves of each lane of codes, alternating.
    pub(super) quads: [[i8; 4]; PACKED / 2],
    /// Scale times the unit of the weight's bytes.
    pub(super) scales: [f32; GROUPS],
    /// What sums of products begin with, so that the code that stands for zero adds nothing.
    pub(super) starts: [i32; GROUPS],
    /// Sum of the activations as they are quantized; zeros unless wanted.
    pub(super) sums: [f32; GROUPS],
}

/// Rows of activations, quantized symmetrically with a scale for each [`GROUP`] inputs.
#[derive(Debug)]
pub(super) struct ByteUnits {
    /// `(units, rows)`
    all: Vec<ByteUnit>,
    pub(super) rows: usize,
    pub(super) units: usize,
}

impl ByteUnits {
    /// Quantizes `x (rows, inputs)`.
    pub(super) fn new(set: InstructionSet, x: &[f32], layout: &ByteLayout) -> Self {
        let inputs = layout.inputs();
        let (rows, units) = (x.len() / inputs, inputs / UNIT);
        let none = ByteUnit {
            quads: [[0; 4]; PACKED / 2],
            scales: [0.0; GROUPS],
            starts: [0; GROUPS],
            sums: [0.0; GROUPS],
        };
        let mut all = vec![none; rows * units];
        let out = Target::new(&mut all, rows);
        chunks(rows, 1, x.len() >= PARALLEL, |range| {
            for row in range {
                let of_row = ByteRows::new(set, &x[row * inputs..(row + 1) * inputs], layout);
                for (at, unit) in of_row.units(0).iter().enumerate() {
                    let mut made = none;
                    let (low, _) = unit.low.as_chunks::<4>();
                    let (high, _) = unit.high.as_chunks::<4>();
                    let halves = low.iter().zip(high);
                    for (quads, (low, high)) in made.quads.chunks_exact_mut(2).zip(halves) {
                        quads.copy_from_slice(&[*low, *high]);
                    }
                    let groups = at * GROUPS..(at + 1) * GROUPS;
                    made.scales.copy_from_slice(&of_row.scales[groups.clone()]);
                    if !of_row.sums.is_empty() {
                        made.sums.copy_from_slice(&of_row.sums[groups]);
                    }
                    // Of lanes of 8 inputs.
                    let lanes = unit.starts.chunks_exact(GROUP / 8);
                    for (start, lanes) in made.starts.iter_mut().zip(lanes) {
                        *start = lanes.iter().sum();
                    }
                    out.set(at, row, made);
                }
            }
        });
        ByteUnits { all, rows, units }
    }

    /// One unit of all rows.
    #[inline(always)]
    pub(super) fn of_unit(&self, unit: usize) -> &[ByteUnit] {
        &self.all[unit * self.rows..(unit + 1) * self.rows]
    }
}
