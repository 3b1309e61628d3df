//! Outlier columns of activations, multiplied apart from the others (LLM.int8, Dettmers et al. 2022,
//! arXiv:2208.07339).

use std::ops::Range;

use overdrive_kernels::{InstructionSet, Kernel, LANES, Simd};

use crate::kernel::int8_rows::Int8Rows;

/// Activations in two matrices: columns without outliers in 8 bits, the others in f32.
#[derive(Debug)]
pub(crate) struct OutlierSplit {
    /// The activations in 8 bits, with zeros in the outlier columns.
    pub(crate) int8: Int8Rows,
    /// The indices of the outlier columns.
    columns: Vec<usize>,
    /// The outlier columns, `(rows, columns)`, each row padded with zeros to vectors.
    values: Vec<f32>,
    padded: usize,
}

impl OutlierSplit {
    /// Splits off the columns of `x (rows, width)` with a magnitude of at least the threshold, as bitsandbytes does,
    /// and those with NaN. With an infinite threshold there are none.
    pub(crate) fn new(x: &[f32], width: usize, threshold: f32) -> OutlierSplit {
        let mut most = vec![0.0_f32; width];
        for row in x.chunks_exact(width.max(1)) {
            for (most, x) in most.iter_mut().zip(row) {
                // Not `max`, which drops NaN.
                let x = x.abs();
                *most = if x <= *most { *most } else { x };
            }
        }
        let columns: Vec<usize> = (0..width)
            .filter(|column| {
                most[*column].is_nan() || (most[*column] >= threshold && threshold.is_finite())
            })
            .collect();
        if columns.is_empty() {
            return OutlierSplit {
                int8: Int8Rows::quantize(x, width),
                columns,
                values: Vec::new(),
                padded: 0,
            };
        }
        // Whole vectors, so that the loop below has no remainder.
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
        OutlierSplit {
            int8: Int8Rows::quantize(&rest, width),
            columns,
            values,
            padded,
        }
    }

    /// Returns the products of the outlier columns for these outputs, without the scales of the outputs,
    /// `(rows, outputs)`; `None` if there are no outliers.
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
    split: &'a OutlierSplit,
    codes: &'a [i8],
    outputs: Range<usize>,
}

impl Kernel for Products<'_> {
    type Output = Vec<f32>;

    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> Vec<f32> {
        let OutlierSplit {
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
            // Gathered once for all rows.
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
