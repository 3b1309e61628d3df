//! `y = x · codesᵀ · scales + bias` with activations and weights in 8 bits.
//!
//! Sums of products of codes are exact, so every instruction set computes the same ones, and results
//! differ by the rounding of the scales at most.
//!
//! A few rows go through `dot`, which reads the weight as it lies; many through `panels` where the
//! machine has instructions for that.

mod dot;
#[cfg(target_arch = "x86_64")]
mod panels;

use std::ops::Range;

use super::activations::Int8Rows;
use super::element::Element;
use super::joint::Part;
use super::simd::InstructionSet;
use super::threads::Target;

/// Inputs up to which the sums fit 32 bits: 127 · 128 each.
pub(crate) const MAX_WIDTH: usize = 1 << 17;

/// Rows from which on a weight is packed before it is multiplied.
const PANEL_ROWS: usize = 24;

/// A weight with one scale an output, and the activations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Int8Part<'a, T> {
    /// Quantized by row, not in groups.
    pub(crate) x: &'a Int8Rows,
    /// i8 `(outputs, x.width)`.
    pub(crate) codes: &'a [i8],
    /// One an output.
    pub(crate) scales: &'a [f32],
    /// One an output.
    pub(crate) bias: Option<&'a [T]>,
    pub(crate) set: InstructionSet,
}

impl<T: Element> Part<T> for Int8Part<'_, T> {
    fn outputs(&self) -> usize {
        self.scales.len()
    }

    fn row_bytes(&self) -> usize {
        self.x.width
    }

    fn run(&self, outputs: Range<usize>, first: usize, y: &Target<'_, T>) {
        #[cfg(target_arch = "x86_64")]
        if let InstructionSet::Avx512(simd) = self.set
            && self.x.rows >= PANEL_ROWS
        {
            return panels::panels(simd, self, outputs, first, y);
        }
        self.set.run(dot::Dots {
            part: self,
            outputs,
            first,
            y,
        });
    }
}

impl<T: Element> Int8Part<'_, T> {
    #[inline(always)]
    fn weight(&self, output: usize) -> &[i8] {
        let width = self.x.width;
        &self.codes[output * width..(output + 1) * width]
    }

    /// The result for the sum of products of codes, of which each weight was too large by `offset`.
    #[inline(always)]
    fn result(&self, row: usize, output: usize, sum: i32, offset: i32) -> T {
        let sum = sum.wrapping_sub(self.x.sums[row].wrapping_mul(offset));
        #[allow(clippy::cast_precision_loss, reason = "within the rounding of the result")]
        let sum = sum as f32;
        let bias = self.bias.map_or(0.0, |bias| bias[output].to_f32());
        T::from_f32((sum * self.x.scales[row]).mul_add(self.scales[output], bias))
    }
}
