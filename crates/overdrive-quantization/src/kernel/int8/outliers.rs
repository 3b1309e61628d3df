//! Columns of activations with large numbers, apart from the others (LLM.int8, Dettmers et al. 2022,
//! arXiv:2208.07339).

use std::ops::Range;

use crate::kernel::activations::Int8Rows;
use crate::kernel::simd::{InstructionSet, Kernel, LANES, Simd};

/// Activations in two parts: columns without large numbers in 8 bits, the others as they are.
#[derive(Debug)]
pub(crate) struct Split {
    /// With zeros in the columns of large numbers.
    pub(crate) int8: Int8Rows,
    /// Which columns those are.
    columns: Vec<usize>,
    /// Their numbers, `(rows, columns)`, each row padded with zeros to vectors.
    values: Vec<f32>,
    padded: usize,
}

impl Split {
    /// Takes the columns of `x (rows, width)` with a magnitude beyond the threshold apart. NaN is beyond
    /// every threshold.
    pub(crate) fn new(x: &[f32], width: usize, threshold: f32) -> Split {
        let mut most = vec![0.0_f32; width];
        for row in x.chunks_exact(width.max(1)) {
            for (most, x) in most.iter_mut().zip(row) {
                // Not `max`, which drops NaN.
                let x = x.abs();
                *most = if x <= *most { *most } else { x };
            }
        }
        let columns: Vec<usize> = (0..width)
            .filter(|column| most[*column].is_nan() || most[*column] > threshold)
            .collect();
        if columns.is_empty() {
            return Split {
                int8: Int8Rows::quantize(x, width),
                columns,
                values: Vec::new(),
                padded: 0,
            };
        }
        let padded = columns.len().next_multiple_of(LANES);
        let rows = x.len() / width;
        let mut rest = x.to_vec();
        let mut values = vec![0.0; rows * padded];
        for (row, values) in rest
            .chunks_exact_mut(width)
            .zip(values.chunks_exact_mut(padded))
        {
            for (value, column) in values.iter_mut().zip(&columns) {
                *value = std::mem::take(&mut row[*column]);
            }
        }
        Split {
            int8: Int8Rows::quantize(&rest, width),
            columns,
            values,
            padded,
        }
    }

    /// What the large columns add to these outputs, without the outputs' scales, `(rows, outputs)`;
    /// nothing if there are none.
    pub(super) fn products(
        &self,
        set: InstructionSet,
        codes: &[i8],
        outputs: Range<usize>,
    ) -> Option<Vec<f32>> {
        (!self.columns.is_empty()).then(|| {
            set.run(Products {
                split: self,
                codes,
                outputs,
            })
        })
    }
}

struct Products<'a> {
    split: &'a Split,
    codes: &'a [i8],
    outputs: Range<usize>,
}

impl Kernel for Products<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Vec<f32> {
        let Split {
            int8,
            columns,
            values,
            padded,
        } = self.split;
        let count = self.outputs.len();
        let mut products = vec![0.0; int8.rows * count];
        let mut weight = vec![0.0_f32; *padded];
        for (index, output) in self.outputs.enumerate() {
            let codes = &self.codes[output * int8.width..(output + 1) * int8.width];
            for (weight, column) in weight.iter_mut().zip(columns) {
                *weight = f32::from(codes[*column]);
            }
            for (row, x) in values.chunks_exact(*padded).enumerate() {
                let mut sum = s.splat(0.0);
                let vectors = x
                    .as_chunks::<LANES>()
                    .0
                    .iter()
                    .zip(weight.as_chunks::<LANES>().0);
                for (x, w) in vectors {
                    sum = s.mul_add(s.load_f32(x), s.load_f32(w), sum);
                }
                products[row * count + index] = s.reduce_add(sum);
            }
        }
        products
    }
}
