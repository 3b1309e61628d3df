//! `y = x · codesᵀ · scales` with activations and weights in 8 bits.
//!
//! Sums of products of codes are exact, so every instruction set has the same results bit for bit.
//!
//! The weight is read in its layout in memory: by `dot` for one row and on machines without AVX-512-VNNI,
//! otherwise by `vnni_gemm`.

// Another instruction set begins in overdrive-kernels (`arch`, `dispatch.rs`); only a GEMM of its own is here.
mod dot;
mod outliers;
#[cfg(target_arch = "x86_64")]
mod transpose;
#[cfg(target_arch = "x86_64")]
mod vnni_gemm;

use std::ops::Range;

use overdrive_kernels::{Buffers, InstructionSet, Kept, capacity_bytes, vectorized};

pub(crate) use outliers::OutlierSplit;

use super::int8_rows::Int8Rows;
use super::joint_gemm::{Gemm, Results};

/// The largest number of inputs at which sums fit 32 bits: each product is at most 127 · 128.
pub(crate) const MAX_WIDTH: usize = 1 << 17;

/// A weight with one scale for each output, and the activations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Int8Gemm<'a> {
    /// The activations, quantized by row.
    pub(crate) x: &'a Int8Rows,
    /// The weight, i8 `(outputs, x.width)`.
    pub(crate) codes: &'a [i8],
    /// The scale of each output.
    pub(crate) scales: &'a [f32],
    /// The outlier columns that were split off from `x`, if any.
    pub(crate) split: Option<&'a OutlierSplit>,
    pub(crate) set: InstructionSet,
}

/// The outputs of a GEMM that one thread computes.
struct Job<'a, 'b> {
    gemm: &'a Int8Gemm<'b>,
    outputs: Range<usize>,
    /// The part of the outlier columns, before the scales of the outputs, `(rows, outputs)`.
    outliers: Option<Vec<f32>>,
}

/// The buffers of a job; kept from call to call, since the pages of new memory cost more than its use.
#[derive(Default)]
struct Scratch {
    sums: Vec<i32>,
    /// Sums of some rows, with the outputs of a row side by side.
    rows: Vec<i32>,
    /// The results of a row.
    results: Vec<f32>,
}

impl Buffers for Scratch {
    fn bytes(&self) -> usize {
        capacity_bytes(&self.sums) + capacity_bytes(&self.rows) + capacity_bytes(&self.results)
    }
}

thread_local! {
    static SCRATCH: Kept<Scratch> = const { Kept::new() };
}

impl Gemm for Int8Gemm<'_> {
    fn outputs(&self) -> usize {
        self.scales.len()
    }

    fn row_bytes(&self) -> usize {
        self.x.width
    }

    fn run(&self, outputs: Range<usize>, results: &mut dyn Results) {
        let outliers = self
            .split
            .and_then(|split| split.products(self.set, self.codes, outputs.clone()));
        let job = Job {
            gemm: self,
            outputs,
            outliers,
        };
        let mut scratch = Kept::take(&SCRATCH);
        match self.set {
            #[cfg(target_arch = "x86_64")]
            InstructionSet::Avx512(simd) if self.x.rows > 1 && self.x.width > 0 => {
                vnni_gemm::run(simd, &job, &mut scratch, results);
            }
            set => {
                let count = job.outputs.len();
                scratch.sums.resize(self.x.rows * count, 0);
                let offset = set.run(dot::Dots {
                    gemm: self,
                    outputs: job.outputs.clone(),
                    sums: &mut scratch.sums,
                });
                let sums = scratch.sums.chunks_exact(count.max(1));
                for (row, sums) in sums.take(self.x.rows).enumerate() {
                    job.finish(row, sums, offset, &mut scratch.results, results);
                }
            }
        }
        Kept::put(&SCRATCH, scratch);
    }
}

impl Int8Gemm<'_> {
    #[inline(always)]
    fn weight(&self, output: usize) -> &[i8] {
        let width = self.x.width;
        &self.codes[output * width..(output + 1) * width]
    }
}

impl Job<'_, '_> {
    /// Puts the results of a row, of which `sums` has the sums of products of codes; each code of the weight
    /// was too large by `offset`.
    fn finish(
        &self,
        row: usize,
        sums: &[i32],
        offset: i32,
        buffer: &mut Vec<f32>,
        results: &mut dyn Results,
    ) {
        let (gemm, count) = (self.gemm, self.outputs.len());
        let outliers = match &self.outliers {
            Some(all) => &all[row * count..(row + 1) * count],
            None => &[],
        };
        buffer.resize(count, 0.0);
        scale(
            gemm.set,
            sums,
            gemm.x.sums[row].wrapping_mul(offset),
            gemm.x.scales[row],
            outliers,
            &gemm.scales[self.outputs.clone()],
            buffer,
        );
        results.put(row, self.outputs.start, buffer);
    }
}

vectorized! {
    /// Computes `((sum − excess) · scale + outlier) · scales` for each output. Nothing is fused, so that all
    /// instruction sets have the same results.
    fn scale<S: Simd>(
        _s: S,
        sums: &[i32],
        excess: i32,
        scale: f32,
        outliers: &[f32],
        scales: &[f32],
        to: &mut [f32],
    ) {
        for (to, sum) in to.iter_mut().zip(sums) {
            #[allow(
                clippy::cast_precision_loss,
                reason = "within the rounding of the result"
            )]
            let sum = sum.wrapping_sub(excess) as f32;
            *to = sum * scale;
        }
        for (to, outlier) in to.iter_mut().zip(outliers) {
            *to += outlier;
        }
        for (to, scale) in to.iter_mut().zip(scales) {
            *to *= scale;
        }
    }
}

#[cfg(test)]
mod tests;
