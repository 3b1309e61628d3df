//! `y = x · codesᵀ · scales + bias` with activations and weights in 8 bits.
//!
//! Sums of products of codes are exact, so every instruction set has the same results to the bit.
//!
//! The weight is read as it lies: by `dot` for one row and on machines without AVX-512-VNNI, otherwise by
//! `tiles`.

mod dot;
mod outliers;
#[cfg(target_arch = "x86_64")]
mod tiles;
#[cfg(target_arch = "x86_64")]
mod turn;

use std::ops::Range;

pub(crate) use outliers::Split;

use super::activations::Int8Rows;
use super::element::Element;
use super::joint::Part;
use super::simd::InstructionSet;
use super::threads::Target;

/// Inputs up to which the sums fit 32 bits: 127 · 128 each.
pub(crate) const MAX_WIDTH: usize = 1 << 17;

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
    /// Where columns were taken apart: those that `x` lacks.
    pub(crate) split: Option<&'a Split>,
    pub(crate) set: InstructionSet,
}

/// Outputs of a part that one thread computes.
struct Job<'a, 'b, T> {
    part: &'a Int8Part<'b, T>,
    outputs: Range<usize>,
    first: usize,
    /// What is to be added before the scales of the outputs, `(rows, outputs)`.
    extra: Option<Vec<f32>>,
    y: &'a Target<'a, T>,
}

impl<T: Element> Part<T> for Int8Part<'_, T> {
    fn outputs(&self) -> usize {
        self.scales.len()
    }

    fn row_bytes(&self) -> usize {
        self.x.width
    }

    fn run(&self, outputs: Range<usize>, first: usize, y: &Target<'_, T>) {
        let extra = self
            .split
            .and_then(|split| split.products(self.set, self.codes, outputs.clone()));
        let job = Job {
            part: self,
            outputs,
            first,
            extra,
            y,
        };
        #[cfg(target_arch = "x86_64")]
        if let InstructionSet::Avx512(simd) = self.set
            && self.x.rows > 1
            && self.x.width > 0
        {
            return tiles::tiles(simd, &job);
        }
        self.set.run(dot::Dots(&job));
    }
}

impl<T: Element> Int8Part<'_, T> {
    #[inline(always)]
    fn weight(&self, output: usize) -> &[i8] {
        let width = self.x.width;
        &self.codes[output * width..(output + 1) * width]
    }
}

impl<T: Element> Job<'_, '_, T> {
    /// Writes the first `count` of four neighbours in a row, of which the sums of products of codes are
    /// known; each code of the weight was too large by `offset`.
    #[inline(always)]
    fn finish(&self, row: usize, output: usize, sums: [i32; 4], count: usize, offset: i32) {
        if count == 4 {
            return self.finish_all(row, output, sums, offset);
        }
        for (index, sum) in sums.into_iter().enumerate().take(count) {
            self.finish_all(row, output + index, [sum], offset);
        }
    }

    #[inline(always)]
    fn finish_all<const N: usize>(&self, row: usize, output: usize, sums: [i32; N], offset: i32) {
        let part = self.part;
        let excess = part.x.sums[row].wrapping_mul(offset);
        let scale = part.x.scales[row];
        let scales: &[f32; N] = chunk(part.scales, output);
        let mut results = [0.0; N];
        for (result, sum) in results.iter_mut().zip(sums) {
            #[allow(
                clippy::cast_precision_loss,
                reason = "within the rounding of the result"
            )]
            let sum = sum.wrapping_sub(excess) as f32;
            *result = sum * scale;
        }
        if let Some(extra) = &self.extra {
            let at = row * self.outputs.len() + output - self.outputs.start;
            for (result, extra) in results.iter_mut().zip(chunk::<_, N>(extra, at)) {
                *result += extra;
            }
        }
        // Not fused, so that all instruction sets have the same results.
        for (result, scale) in results.iter_mut().zip(scales) {
            *result *= scale;
        }
        if let Some(bias) = part.bias {
            for (result, bias) in results.iter_mut().zip(chunk::<_, N>(bias, output)) {
                *result += bias.to_f32();
            }
        }
        let results = results.map(
            #[inline(always)]
            |result| T::from_f32(result),
        );
        self.y.set_all(row, self.first + output, &results);
    }
}

/// Neighbours from `at` on.
#[inline(always)]
fn chunk<E, const N: usize>(all: &[E], at: usize) -> &[E; N] {
    let Some(chunk) = all[at..].first_chunk() else {
        unreachable!("the caller counted the outputs");
    };
    chunk
}

#[cfg(test)]
mod tests;
