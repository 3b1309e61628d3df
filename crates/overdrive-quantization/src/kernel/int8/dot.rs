//! Dot products of a few outputs with a few rows at a time, both in their layout in memory. A block of rows of
//! activations stays in the first cache for all outputs, the weight in the second for the next blocks.
#![allow(unsafe_code)]

use std::ops::Range;

use overdrive_kernels::{BYTES, Kernel, Simd};

use super::Int8Gemm;
use crate::kernel::at;

/// The distance of the prefetch in bytes of the weight, for a single row.
const AHEAD: usize = 8192;

/// The bytes of the rows that are multiplied with all outputs of a job before the next: half of a first cache of 32 KB.
/// The weight comes from the second cache for each such block.
const BLOCK_BYTES: usize = 16 << 10;

/// The sums of products of codes of some outputs.
pub(super) struct Dots<'a, 'b> {
    pub(super) gemm: &'a Int8Gemm<'b>,
    pub(super) outputs: Range<usize>,
    /// `(rows, outputs)`.
    pub(super) sums: &'a mut [i32],
}

impl Kernel for Dots<'_, '_> {
    /// The amount that was added to each code of the weight.
    type Output = i32;

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) -> i32 {
        // 4 x 4 sums and their operands need 32 registers, 2 x 4 fit 16.
        match (self.gemm.x.rows, S::TILE) {
            (1, _) => self.one_row(s),
            (_, 4) => self.tiles::<S, 4>(s),
            _ => self.tiles::<S, 2>(s),
        }
        S::OFFSET
    }
}

impl Dots<'_, '_> {
    /// Stores the sums of neighbouring outputs of a row.
    #[inline(always)]
    fn store(&mut self, row: usize, output: usize, sums: &[i32]) {
        let first = row * self.outputs.len() + output - self.outputs.start;
        self.sums[first..first + sums.len()].copy_from_slice(sums);
    }

    /// Computes one output after another, so that the weight is one stream.
    #[inline(always)]
    fn one_row<S: Simd>(&mut self, s: S) {
        let mut output = self.outputs.start;
        while output + 4 <= self.outputs.end {
            let sums = [
                self.dot(s, output),
                self.dot(s, output + 1),
                self.dot(s, output + 2),
                self.dot(s, output + 3),
            ];
            self.store(0, output, &s.total_each(sums));
            output += 4;
        }
        while output < self.outputs.end {
            let sum = s.total(self.dot(s, output));
            self.store(0, output, &[sum]);
            output += 1;
        }
    }

    /// Returns the dot product with the one row, in four partial sums: one sum would wait for its own latency.
    #[inline(always)]
    fn dot<S: Simd>(&self, s: S, output: usize) -> S::A {
        const PARTS: usize = 4;
        let weight = self.gemm.weight(output);
        let x = self.gemm.x.row(0);
        // The reads of `x` below are unchecked.
        assert!(x.len() >= weight.len(), "rows are padded");
        let mut sums = [s.zero(); PARTS];
        let whole = weight.len() - weight.len() % (BYTES * PARTS);
        let mut column = 0;
        while column < whole {
            for (part, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `column + BYTES * PARTS <= weight.len() <= x.len()`.
                let (w, x) = unsafe {
                    let column = column + part * BYTES;
                    (at::<_, BYTES>(weight, column), at(x, column))
                };
                // The hardware prefetcher stops at the end of a page.
                s.prefetch_near(w.as_ptr().wrapping_add(AHEAD).cast());
                *sum = s.dot(*sum, s.load_codes(w), s.load_activations(x));
            }
            column += BYTES * PARTS;
        }
        while column < weight.len() {
            let w = codes(s, weight, column);
            // SAFETY: `x` is padded to whole vectors.
            let x = s.load_activations(unsafe { at(x, column) });
            sums[0] = s.dot(sums[0], w, x);
            column += BYTES;
        }
        let [a, b, c, d] = sums;
        s.add_sums(s.add_sums(a, b), s.add_sums(c, d))
    }

    /// Computes all outputs, `R` at a time, with a block of rows, four at a time, and then with the next block.
    #[inline(always)]
    fn tiles<S: Simd, const R: usize>(&mut self, s: S) {
        let (all, width) = (self.gemm.x.rows, self.gemm.x.width);
        let block = (BLOCK_BYTES / width.max(1)).max(1).next_multiple_of(4);
        for first in (0..all).step_by(block) {
            let rows = first..(first + block).min(all);
            let mut output = self.outputs.start;
            while output + R <= self.outputs.end {
                self.outputs::<S, R>(s, output, rows.clone());
                output += R;
            }
            while output < self.outputs.end {
                self.outputs::<S, 1>(s, output, rows.clone());
                output += 1;
            }
        }
    }

    #[inline(always)]
    fn outputs<S: Simd, const R: usize>(&mut self, s: S, output: usize, rows: Range<usize>) {
        let mut row = rows.start;
        while row + 4 <= rows.end {
            self.tile::<S, R, 4>(s, output, row);
            row += 4;
        }
        match rows.end - row {
            0 => {}
            1 => self.tile::<S, R, 1>(s, output, row),
            2 => self.tile::<S, R, 2>(s, output, row),
            _ => self.tile::<S, R, 3>(s, output, row),
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize, const N: usize>(&mut self, s: S, output: usize, row: usize) {
        let gemm = self.gemm;
        let width = gemm.x.width;
        let mut weights: [&[i8]; R] = [&[]; R];
        for (r, weight) in weights.iter_mut().enumerate() {
            *weight = gemm.weight(output + r);
        }
        let mut rows: [&[i8]; N] = [&[]; N];
        for (n, slot) in rows.iter_mut().enumerate() {
            *slot = gemm.x.row(row + n);
        }
        let mut sums = [[s.zero(); N]; R];
        let whole = width - width % BYTES;
        let mut column = 0;
        while column < whole {
            let mut w = [s.load_codes(&[0; BYTES]); R];
            for (w, weight) in w.iter_mut().zip(&weights) {
                // For later rows the weight is in the cache already.
                if row == 0 {
                    // The same columns of the next tile: several short streams at once are more than the
                    // hardware prefetcher follows.
                    s.prefetch(weight.as_ptr().wrapping_add(R * width + column));
                }
                // SAFETY: `column + BYTES <= width`, the length of every row of the weight.
                *w = s.load_codes(unsafe { at(weight, column) });
            }
            for (n, x) in rows.iter().enumerate() {
                // SAFETY: as above; rows of activations are at least as long.
                let x = s.load_activations(unsafe { at(x, column) });
                for (sums, w) in sums.iter_mut().zip(w) {
                    sums[n] = s.dot(sums[n], w, x);
                }
            }
            column += BYTES;
        }
        if column < width {
            for (sums, weight) in sums.iter_mut().zip(&weights) {
                let w = codes(s, weight, column);
                for (sum, x) in sums.iter_mut().zip(&rows) {
                    // SAFETY: rows of activations are padded to whole vectors.
                    let x = s.load_activations(unsafe { at(x, column) });
                    *sum = s.dot(*sum, w, x);
                }
            }
        }
        for n in 0..N {
            let mut four = [s.zero(); 4];
            for (four, sums) in four.iter_mut().zip(&sums) {
                *four = sums[n];
            }
            self.store(row + n, output, &s.total_each(four)[..R]);
        }
    }
}

/// Reads the rest of a row from `column` on, at most a vector. The codes beyond its end do not matter: the
/// activations are zero there.
#[inline(always)]
fn codes<S: Simd>(s: S, weight: &[i8], column: usize) -> S::W {
    let rest = &weight[column..];
    match rest.first_chunk::<BYTES>() {
        Some(whole) => s.load_codes(whole),
        None => {
            let mut padded = [0; BYTES];
            padded[..rest.len()].copy_from_slice(rest);
            s.load_codes(&padded)
        }
    }
}
