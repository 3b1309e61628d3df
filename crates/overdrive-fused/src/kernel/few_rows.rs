//! Linear layers, `y = x · wᵀ + b`, for few rows of `x`, as in decoding one token for a few sequences.
//!
//! Such a matmul does little arithmetic on each weight, so the time to read the weights once is its lower
//! bound. General matmuls pack a weight before they use it, which reads and writes it again. Here each row of
//! the weight is multiplied with a few rows of `x` at a time, and is still in the L1 cache for the next
//! few.

use std::ops::Range;

use overdrive_kernels::threads::parallel_columns;
use overdrive_kernels::{ColumnsMut, Element, Kernel, LANES, Simd, dispatch, each_vector, load};

/// The number of bytes of weight that a thread takes at a time: enough to be read as a stream, and few enough
/// that a delayed thread does not delay the others.
const CHUNK_BYTES: usize = 128 << 10;

/// The number of bytes of weight below which waking another thread does not pay.
const MIN_PARALLEL_BYTES: usize = 64 << 10;

/// Linear layers of the same `x`, with their results side by side.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Layer<'a, W> {
    /// The weight, row-major, one row for each output.
    pub(crate) weight: &'a [W],
    /// The bias, one element for each output.
    pub(crate) bias: Option<&'a [W]>,
}

/// Computes `y (rows, Σ outputs)` from `x (rows, width)`.
pub(crate) fn few_rows<W: Element>(x: &[f32], width: usize, layers: &[Layer<'_, W>], y: &mut [W]) {
    let outputs: usize = layers.iter().map(|layer| layer.weight.len() / width).sum();
    let row_bytes = width * size_of::<W>();
    // At least the number in a tile.
    let chunk = (CHUNK_BYTES / row_bytes.max(1)).max(4);
    let parallel = outputs * row_bytes > MIN_PARALLEL_BYTES;
    parallel_columns(y, outputs, chunk, parallel, |mut target| {
        let range = target.range();
        let mut first = 0;
        for &layer in layers {
            let count = layer.weight.len() / width;
            let from = range.start.clamp(first, first + count) - first;
            let to = range.end.clamp(first, first + count) - first;
            if from < to {
                dispatch(Outputs {
                    x,
                    width,
                    layer,
                    outputs: from..to,
                    first,
                    target: &mut target,
                });
            }
            first += count;
        }
    });
}

/// Some outputs of one layer.
struct Outputs<'a, 't, W> {
    x: &'a [f32],
    width: usize,
    layer: Layer<'a, W>,
    outputs: Range<usize>,
    /// The column of the layer's first output.
    first: usize,
    target: &'a mut ColumnsMut<'t, W>,
}

impl<W: Element> Kernel for Outputs<'_, '_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(mut self, s: S) {
        // One row does not reuse weights, and the hardware prefetches a single stream best.
        if self.x.len() == self.width {
            for output in self.outputs.clone() {
                let sum = dot(s, self.x, self.weight(output));
                self.set(0, output, sum + self.bias(output));
            }
            return;
        }
        // The sums of a four by four tile and their operands fit into 32 registers, but not into 16.
        match S::TILE {
            4 => self.tiles::<S, 4>(s),
            _ => self.tiles::<S, 2>(s),
        }
    }
}

impl<'a, W: Element> Outputs<'a, '_, W> {
    #[inline(always)]
    fn weight(&self, output: usize) -> &'a [W] {
        &self.layer.weight[output * self.width..][..self.width]
    }

    #[inline(always)]
    fn bias(&self, output: usize) -> f32 {
        self.layer.bias.map_or(0.0, |bias| bias[output].to_f32())
    }

    #[inline(always)]
    fn set(&mut self, row: usize, output: usize, value: f32) {
        self.target
            .set(row, self.first + output, W::from_f32(value));
    }

    /// Computes all outputs, `T` at a time, with all rows, `T` at a time.
    #[inline(always)]
    fn tiles<S: Simd, const T: usize>(&mut self, s: S) {
        let Range { start, end } = self.outputs;
        let mut output = start;
        while output + T <= end {
            self.rows::<S, T, T>(s, output);
            output += T;
        }
        while output < end {
            self.rows::<S, 1, T>(s, output);
            output += 1;
        }
    }

    /// Computes `R` outputs from `output` on, with all rows, `T` at a time.
    #[inline(always)]
    fn rows<S: Simd, const R: usize, const T: usize>(&mut self, s: S, output: usize) {
        let rows = self.x.len() / self.width;
        let mut row = 0;
        while row + T <= rows {
            self.tile::<S, R, T>(s, output, row);
            row += T;
        }
        // All remaining rows at once, since each pass reads the weights from the cache again.
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
        let width = self.width;
        let mut weights: [&[W]; R] = [&[]; R];
        for (r, weight) in weights.iter_mut().enumerate() {
            *weight = self.weight(output + r);
        }
        let mut rows: [&[f32]; N] = [&[]; N];
        for (n, slot) in rows.iter_mut().enumerate() {
            *slot = &self.x[(row + n) * width..][..width];
        }
        let weight_vectors = weights.map(whole_vectors);
        let row_vectors = rows.map(whole_vectors);
        let mut sums = [[s.splat(0.0); N]; R];
        for vector in 0..width / LANES {
            let mut x = [s.splat(0.0); N];
            for (x, row) in x.iter_mut().zip(row_vectors) {
                *x = s.load_f32(&row[vector]);
            }
            for (weight, sums) in weight_vectors.into_iter().zip(&mut sums) {
                if row == 0 {
                    // Prefetches the same vector of the next tile: the hardware does not predict several
                    // short streams at once.
                    let here = weight.as_ptr().wrapping_add(vector).cast::<W>();
                    s.prefetch(here.wrapping_add(R * width));
                }
                let w = W::load(s, &weight[vector]);
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = s.mul_add(x, w, *sum);
                }
            }
        }
        let whole = width - width % LANES;
        each_vector(
            width - whole,
            #[inline(always)]
            |span| {
                for (weight, sums) in weights.iter().zip(&mut sums) {
                    let w = load(s, &weight[whole..], span);
                    for (sum, x) in sums.iter_mut().zip(&rows) {
                        *sum = s.mul_add(load(s, &x[whole..], span), w, *sum);
                    }
                }
            },
        );
        for (r, sums) in sums.into_iter().enumerate() {
            let bias = self.bias(output + r);
            // Four sums are reduced together, with fewer shuffles than one after another.
            let mut four = [s.splat(0.0); 4];
            four[..N].copy_from_slice(&sums);
            let totals = s.reduce_add_each(four);
            for (n, total) in totals.into_iter().take(N).enumerate() {
                self.set(row + n, output + r, total + bias);
            }
        }
    }
}

/// Returns the dot product of two rows, in the order of [`Outputs::tile`]. The chains of additions of several outputs
/// overlap in the processor.
#[inline(always)]
fn dot<S: Simd, W: Element>(s: S, x: &[f32], weight: &[W]) -> f32 {
    let width = weight.len();
    assert_eq!(x.len(), width, "one row of each");
    let mut sum = s.splat(0.0);
    for (x, w) in whole_vectors(x).iter().zip(whole_vectors(weight)) {
        sum = s.mul_add(s.load_f32(x), W::load(s, w), sum);
    }
    let whole = width - width % LANES;
    each_vector(
        width - whole,
        #[inline(always)]
        |span| {
            let product = (load(s, &x[whole..], span), load(s, &weight[whole..], span));
            sum = s.mul_add(product.0, product.1, sum);
        },
    );
    let zero = s.splat(0.0);
    s.reduce_add_each([sum, zero, zero, zero])[0]
}

/// Returns the whole vectors of a row.
#[inline(always)]
fn whole_vectors<T>(row: &[T]) -> &[[T; LANES]] {
    row.as_chunks().0
}
