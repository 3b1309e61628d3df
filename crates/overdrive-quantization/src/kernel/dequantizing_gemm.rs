//! The GEMM of a few rows of activations in f32 with a weight of 8 bits, which is dequantized in registers.
#![allow(unsafe_code)]

use std::ops::Range;

use overdrive_kernels::{Buffers, InstructionSet, Kept, Kernel, LANES, Simd, capacity_bytes};

use super::at;
use super::joint_gemm::{Gemm, Results};

/// A code of 8 bits.
pub(crate) trait Code: Copy + Default + Sync {
    /// The factor by which the numbers that [`load`](Self::load) returns are too small.
    const FACTOR: f32;
    /// Reads 16 codes as floats.
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F;
}

impl Code for i8 {
    const FACTOR: f32 = 1.0;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F {
        simd.load_i8(from)
    }
}

/// An 8-bit float (e4m3).
impl Code for u8 {
    const FACTOR: f32 = 256.0;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F {
        simd.load_e4m3(from)
    }
}

/// A weight with one scale for each group of the inputs of an output, and the activations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct DequantizingGemm<'a, C> {
    /// The activations, `(rows, width)`.
    pub(crate) x: &'a [f32],
    pub(crate) width: usize,
    /// The weight, `(outputs, width)`.
    pub(crate) codes: &'a [C],
    /// The scales, `(outputs, ⌈width/group⌉)`.
    pub(crate) scales: &'a [f32],
    /// The number of columns that share a scale: `width` for one scale for each output.
    pub(crate) group: usize,
    pub(crate) set: InstructionSet,
}

/// The sums of a chunk.
#[derive(Default)]
struct Sums(Vec<f32>);

impl Buffers for Sums {
    fn bytes(&self) -> usize {
        capacity_bytes(&self.0)
    }
}

thread_local! {
    static SUMS: Kept<Sums> = const { Kept::new() };
}

impl<C> DequantizingGemm<'_, C> {
    /// Returns the ranges of columns that share a scale.
    #[inline(always)]
    fn groups(&self) -> impl Iterator<Item = Range<usize>> {
        let (width, group) = (self.width, self.group.max(1));
        let firsts = (0..width).step_by(group);
        firsts.map(move |first| first..width.min(first + group))
    }

    /// Returns `true` if an output has several scales.
    #[inline(always)]
    fn is_grouped(&self) -> bool {
        self.group < self.width
    }

    /// Returns the scale of a group of an output that has several.
    #[inline(always)]
    fn scale(&self, output: usize, group: usize) -> f32 {
        let groups = self.width.div_ceil(self.group.max(1));
        self.scales[output * groups + group]
    }
}

impl<C: Code> Gemm for DequantizingGemm<'_, C> {
    fn outputs(&self) -> usize {
        self.codes.len() / self.width.max(1)
    }

    fn row_bytes(&self) -> usize {
        self.width
    }

    fn run(&self, outputs: Range<usize>, results: &mut dyn Results) {
        let count = outputs.len();
        let rows = self.x.len().checked_div(self.width).unwrap_or(0);
        let mut kept = Kept::take(&SUMS);
        let sums = &mut kept.0;
        sums.resize(rows * count, 0.0);
        self.set.run(Tiles {
            gemm: *self,
            outputs: outputs.clone(),
            sums,
        });
        let by_output = self
            .scales
            .get(outputs.clone())
            .filter(|_| !self.is_grouped());
        for (row, sums) in sums.chunks_exact_mut(count.max(1)).enumerate() {
            match by_output {
                // Scaled here and not in the tiles: a row at a time becomes vectors.
                Some(scales) => {
                    for (sum, scale) in sums.iter_mut().zip(scales) {
                        *sum = *sum * C::FACTOR * scale;
                    }
                }
                None => sums.iter_mut().for_each(|sum| *sum *= C::FACTOR),
            }
            results.put(row, outputs.start, sums);
        }
        Kept::put(&SUMS, kept);
    }
}

/// The sums of some outputs.
struct Tiles<'a, 'b, C> {
    gemm: DequantizingGemm<'b, C>,
    outputs: Range<usize>,
    /// `(rows, outputs)`.
    sums: &'a mut [f32],
}

impl<C: Code> Kernel for Tiles<'_, '_, C> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        if self.gemm.x.len() == self.gemm.width {
            // One stream through the weight is faster than several short ones.
            for output in self.outputs.clone() {
                let sum = match self.gemm.is_grouped() {
                    true => self.dot_of_groups(s, output),
                    false => dot(s, self.gemm.x, self.weight(output)),
                };
                self.set(0, output, sum);
            }
            return;
        }
        match S::TILE {
            4 => self.tiles::<S, 4>(s),
            _ => self.tiles::<S, 2>(s),
        }
    }
}

impl<'b, C: Code> Tiles<'_, 'b, C> {
    #[inline(always)]
    fn weight(&self, output: usize) -> &'b [C] {
        let width = self.gemm.width;
        &self.gemm.codes[output * width..(output + 1) * width]
    }

    #[inline(always)]
    fn set(&mut self, row: usize, output: usize, sum: f32) {
        self.sums[row * self.outputs.len() + output - self.outputs.start] = sum;
    }

    /// Returns the result of one output with several scales for the only row, in the order of [`Tiles::tile`].
    #[inline(always)]
    fn dot_of_groups<S: Simd>(&self, s: S, output: usize) -> f32 {
        let (x, weight) = (self.gemm.x, self.weight(output));
        let zero = s.splat(0.0);
        let mut sum = zero;
        for (group, columns) in self.gemm.groups().enumerate() {
            let [[part]] = products(s, &[weight], &[x], columns, false);
            sum = s.mul_add(part, s.splat(self.gemm.scale(output, group)), sum);
        }
        s.reduce_add_each([sum, zero, zero, zero])[0]
    }

    /// Computes all outputs, `N` at a time, with all rows, `N` at a time.
    #[inline(always)]
    fn tiles<S: Simd, const N: usize>(&mut self, s: S) {
        let mut output = self.outputs.start;
        while output + N <= self.outputs.end {
            self.outputs::<S, N, N>(s, output);
            output += N;
        }
        while output < self.outputs.end {
            self.outputs::<S, 1, N>(s, output);
            output += 1;
        }
    }

    #[inline(always)]
    fn outputs<S: Simd, const R: usize, const N: usize>(&mut self, s: S, output: usize) {
        let rows = self.gemm.x.len() / self.gemm.width;
        let mut row = 0;
        while row + N <= rows {
            self.tile::<S, R, N>(s, output, row);
            row += N;
        }
        match rows - row {
            0 => {}
            1 => self.tile::<S, R, 1>(s, output, row),
            2 => self.tile::<S, R, 2>(s, output, row),
            _ => self.tile::<S, R, 3>(s, output, row),
        }
    }

    /// Computes `R` outputs of `N` rows.
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const N: usize>(&mut self, s: S, output: usize, row: usize) {
        let width = self.gemm.width;
        let mut weights: [&[C]; R] = [&[]; R];
        for (r, weight) in weights.iter_mut().enumerate() {
            *weight = self.weight(output + r);
        }
        let mut rows: [&[f32]; N] = [&[]; N];
        for (n, slot) in rows.iter_mut().enumerate() {
            *slot = &self.gemm.x[(row + n) * width..(row + n + 1) * width];
        }
        let mut sums = [[s.splat(0.0); N]; R];
        if self.gemm.is_grouped() {
            for (group, columns) in self.gemm.groups().enumerate() {
                let part = products(s, &weights, &rows, columns, row == 0);
                for (r, (sums, part)) in sums.iter_mut().zip(part).enumerate() {
                    let scale = s.splat(self.gemm.scale(output + r, group));
                    for (sum, part) in sums.iter_mut().zip(part) {
                        *sum = s.mul_add(part, scale, *sum);
                    }
                }
            }
            self.reduce(s, output, row, sums);
            return;
        }
        // The loop of `products` once more: its sums would leave the registers, at half the speed.
        let whole = width - width % LANES;
        let mut column = 0;
        while column < whole {
            let mut x = [s.splat(0.0); N];
            for (x, row) in x.iter_mut().zip(&rows) {
                // SAFETY: `column + LANES <= width`, the length of every row.
                *x = s.load_f32(unsafe { at(row, column) });
            }
            for (weight, sums) in weights.iter().zip(&mut sums) {
                // Only the first rows find the weight outside of the caches; a line has 64 codes.
                if row == 0 && column.is_multiple_of(64) {
                    // The same columns of the next tile: several short streams at once are more than the
                    // hardware prefetcher follows.
                    s.prefetch(weight.as_ptr().wrapping_add(R * width + column));
                }
                // SAFETY: as above.
                let w = C::load(s, unsafe { at(weight, column) });
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = s.mul_add(x, w, *sum);
                }
            }
            column += LANES;
        }
        if whole < width {
            for (weight, sums) in weights.iter().zip(&mut sums) {
                let w = C::load(s, &padded(&weight[whole..]));
                for (sum, x) in sums.iter_mut().zip(&rows) {
                    *sum = s.mul_add(s.load_f32(&padded(&x[whole..])), w, *sum);
                }
            }
        }
        self.reduce(s, output, row, sums);
    }

    /// Sets the results of `R` outputs of `N` rows.
    #[inline(always)]
    fn reduce<S: Simd, const R: usize, const N: usize>(
        &mut self,
        s: S,
        output: usize,
        row: usize,
        sums: [[S::F; N]; R],
    ) {
        for (r, sums) in sums.into_iter().enumerate() {
            let mut four = [s.splat(0.0); 4];
            // Four are reduced together: that costs less than four reductions.
            four[..N].copy_from_slice(&sums);
            for (n, total) in s.reduce_add_each(four).into_iter().take(N).enumerate() {
                self.set(row + n, output + r, total);
            }
        }
    }
}

/// Returns the dot product of two rows, in the order of [`Tiles::tile`]. The chains of additions of several outputs
/// overlap in the processor.
#[inline(always)]
fn dot<S: Simd, C: Code>(s: S, x: &[f32], weight: &[C]) -> f32 {
    let width = weight.len();
    assert_eq!(x.len(), width, "one row of each");
    let mut sum = s.splat(0.0);
    let whole = width - width % LANES;
    let mut column = 0;
    while column < whole {
        // SAFETY: `column + LANES <= width`, the length of both.
        let (x, w) = unsafe { (at(x, column), at(weight, column)) };
        sum = s.mul_add(s.load_f32(x), C::load(s, w), sum);
        column += LANES;
    }
    if whole < width {
        let (x, w) = (padded(&x[whole..]), padded(&weight[whole..]));
        sum = s.mul_add(s.load_f32(&x), C::load(s, &w), sum);
    }
    let zero = s.splat(0.0);
    s.reduce_add_each([sum, zero, zero, zero])[0]
}

/// Returns the sums of `x · w` over some columns of `R` rows of a weight and `N` rows of activations.
///
/// Inlined, so that the sums stay in registers.
#[inline(always)]
fn products<S: Simd, C: Code, const R: usize, const N: usize>(
    s: S,
    weights: &[&[C]; R],
    rows: &[&[f32]; N],
    columns: Range<usize>,
    prefetch: bool,
) -> [[S::F; N]; R] {
    let is_inside = weights.iter().all(|weight| columns.end <= weight.len())
        && rows.iter().all(|row| columns.end <= row.len());
    assert!(is_inside, "the columns are those of every row");
    let mut sums = [[s.splat(0.0); N]; R];
    let whole = columns.end - columns.len() % LANES;
    let mut column = columns.start;
    while column < whole {
        let mut x = [s.splat(0.0); N];
        for (x, row) in x.iter_mut().zip(rows) {
            // SAFETY: `column + LANES <= columns.end`, at most the length of every row as asserted.
            *x = s.load_f32(unsafe { at(row, column) });
        }
        for (weight, sums) in weights.iter().zip(&mut sums) {
            // Only the first rows find the weight outside of the caches; a line has 64 codes.
            if prefetch && column.is_multiple_of(64) {
                // The same columns of the next tile: several short streams at once are more than the
                // hardware prefetcher follows.
                s.prefetch(weight.as_ptr().wrapping_add(R * weight.len() + column));
            }
            // SAFETY: as above.
            let w = C::load(s, unsafe { at(weight, column) });
            for (sum, x) in sums.iter_mut().zip(x) {
                *sum = s.mul_add(x, w, *sum);
            }
        }
        column += LANES;
    }
    if whole < columns.end {
        for (weight, sums) in weights.iter().zip(&mut sums) {
            let w = C::load(s, &padded(&weight[whole..columns.end]));
            for (sum, x) in sums.iter_mut().zip(rows) {
                let x = padded(&x[whole..columns.end]);
                *sum = s.mul_add(s.load_f32(&x), w, *sum);
            }
        }
    }
    sums
}

/// Returns the rest of a row, at most a vector, padded with zeros.
#[inline(always)]
fn padded<T: Copy + Default>(rest: &[T]) -> [T; LANES] {
    let mut padded = [T::default(); LANES];
    padded[..rest.len()].copy_from_slice(rest);
    padded
}
