//! Many rows of activations as bytes, quantized as [`ByteRows`] does and packed in panels: one unit of inputs of
//! all rows together.

use overdrive_kernels::threads::parallel_columns;
use overdrive_kernels::{BYTES, InstructionSet};

use super::byte_rows::{ByteLayout, ByteRows, GROUP, UNIT};

/// The number of groups of a unit, each with a scale.
pub(super) const GROUPS: usize = UNIT / GROUP;

/// The number of activations below which one thread quantizes all.
const PARALLEL: usize = 32 << 10;

/// The 128 inputs of a unit of one row.
#[derive(Debug, Clone, Copy)]
#[repr(C, align(64))]
pub(super) struct BytePanel {
    /// The inputs of the low and of the high halves of each lane of codes, alternating.
    pub(super) quads: [[i8; 4]; BYTES / 2],
    /// The scales times the unit of the weight.
    pub(super) scales: [f32; GROUPS],
    /// The start of the sums of products, which makes the code of zero add nothing.
    pub(super) starts: [i32; GROUPS],
    /// The sums of the quantized activations; zeros unless needed.
    pub(super) sums: [f32; GROUPS],
}

/// Rows of activations, quantized symmetrically with a scale for each [`GROUP`] inputs.
#[derive(Debug)]
pub(super) struct BytePanels {
    /// `(units, rows)`
    all: Vec<BytePanel>,
    pub(super) rows: usize,
    pub(super) units: usize,
}

impl BytePanels {
    /// Quantizes `x (rows, inputs)`.
    pub(super) fn new(set: InstructionSet, x: &[f32], layout: &ByteLayout) -> Self {
        let inputs = layout.inputs();
        let (rows, units) = (x.len() / inputs, inputs / UNIT);
        // Copied for each panel, since groups that are not wanted must be zero.
        let none = BytePanel {
            quads: [[0; 4]; BYTES / 2],
            scales: [0.0; GROUPS],
            starts: [0; GROUPS],
            sums: [0.0; GROUPS],
        };
        let mut all = vec![none; rows * units];
        parallel_columns(&mut all, rows, 1, x.len() >= PARALLEL, |mut out| {
            for row in out.range() {
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
                    // `ByteRows` has a sum for each lane of 8 inputs.
                    let lanes = unit.starts.chunks_exact(GROUP / 8);
                    for (start, lanes) in made.starts.iter_mut().zip(lanes) {
                        *start = lanes.iter().sum();
                    }
                    out.set(at, row, made);
                }
            }
        });
        BytePanels { all, rows, units }
    }

    /// Returns one unit of all rows.
    #[inline(always)]
    pub(super) fn of_unit(&self, unit: usize) -> &[BytePanel] {
        &self.all[unit * self.rows..(unit + 1) * self.rows]
    }
}
