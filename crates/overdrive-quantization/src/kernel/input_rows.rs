//! The activations of a GEMM, in each form that a kernel takes, converted once.

use std::cell::OnceCell;

use overdrive_kernels::{Element, InstructionSet};

use super::int8_rows::Int8Rows;

/// Rows of activations `(rows, width)`.
#[derive(Debug)]
pub(crate) struct InputRows<'a, T> {
    x: &'a [T],
    pub(crate) rows: usize,
    pub(crate) width: usize,
    // Converted on demand: INT8 kernels do not need floats, and float kernels do not need bytes.
    floats: OnceCell<Vec<f32>>,
    int8: OnceCell<Int8Rows>,
}

impl<'a, T: Element> InputRows<'a, T> {
    pub(crate) fn new(x: &'a [T], width: usize) -> Self {
        InputRows {
            x,
            rows: x.len().checked_div(width).unwrap_or(0),
            width,
            floats: OnceCell::new(),
            int8: OnceCell::new(),
        }
    }

    /// Returns the rows as f32, `(rows, width)`.
    pub(crate) fn floats(&self) -> &[f32] {
        T::as_acc(self.x).unwrap_or_else(|| {
            self.floats.get_or_init(|| {
                let mut floats = vec![0.0; self.x.len()];
                T::widen(InstructionSet::best(), self.x, &mut floats);
                floats
            })
        })
    }

    /// Returns the rows in 8 bits, with one scale for each.
    pub(crate) fn int8(&self) -> &Int8Rows {
        self.int8
            .get_or_init(|| Int8Rows::quantize(self.x, self.width))
    }
}
