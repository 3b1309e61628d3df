//! RMSNorm, `y = w · x / sqrt(mean(x²) + eps)`, row by row.

use overdrive_kernels::threads::{block_rows, run_jobs};
use overdrive_kernels::{Element, Kernel, Simd, dispatch, each_vector, load, store};

/// Normalizes the rows of `x` or, with a residual, of `x + residual`, which is written to `sum`.
///
/// `inverse` receives the reciprocal root mean square of each row. `x`, `y` and `residual_and_sum`, if given,
/// have `inverse.len()` rows as wide as `weight`.
pub(crate) fn forward<T: Element>(
    x: &[T],
    residual_and_sum: Option<(&[T], &mut [T])>,
    weight: &[T],
    eps: f32,
    y: &mut [T],
    inverse: &mut [f32],
) {
    let width = weight.len();
    let rows = block_rows(inverse.len(), size_of_val(weight) * 2);
    let cells = rows * width;
    let blocks = x
        .chunks(cells)
        .zip(y.chunks_mut(cells))
        .zip(inverse.chunks_mut(rows));
    match residual_and_sum {
        None => run_jobs(blocks, |((x, y), inverse)| {
            dispatch(Forward {
                x,
                weight,
                eps,
                y,
                inverse,
            });
        }),
        Some((residual, sum)) => {
            let blocks = blocks.zip(residual.chunks(cells).zip(sum.chunks_mut(cells)));
            run_jobs(blocks, |(((x, y), inverse), (residual, sum))| {
                dispatch(AddForward {
                    x,
                    residual,
                    sum,
                    weight,
                    eps,
                    y,
                    inverse,
                });
            });
        }
    }
}

/// The tensors that backward reads.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Saved<'a, T> {
    /// The rows before normalization.
    pub(crate) x: &'a [T],
    pub(crate) weight: &'a [T],
    pub(crate) inverse: &'a [f32],
}

/// Computes the gradients from `dy`: `dx`, to which `extra` is added if given, and `dw`.
pub(crate) fn backward<T: Element>(
    saved: Saved<'_, T>,
    dy: &[T],
    extra: Option<&[T]>,
    dx: &mut [T],
    dw: &mut [f32],
) {
    let Saved { x, weight, inverse } = saved;
    let width = weight.len();
    let rows = block_rows(inverse.len(), size_of_val(weight) * 3);
    let cells = rows * width;
    // One row for each block instead of each thread, since threads take blocks in any order.
    let mut partial = vec![0.0_f32; inverse.len().div_ceil(rows.max(1)) * width];
    let blocks = x
        .chunks(cells)
        .zip(dy.chunks(cells))
        .zip(inverse.chunks(rows))
        .zip(dx.chunks_mut(cells))
        .zip(partial.chunks_mut(width))
        .enumerate();
    run_jobs(blocks, |(block, ((((x, dy), inverse), dx), dw))| {
        let extra = extra.map(|extra| &extra[block * cells..block * cells + dx.len()]);
        dispatch(Backward {
            saved: Saved { x, weight, inverse },
            dy,
            extra,
            dx,
            dw,
        });
    });
    // In the order of the blocks, which do not depend on the number of threads, so the sum does not either.
    dw.fill(0.0);
    for block in partial.chunks(width) {
        for (sum, part) in dw.iter_mut().zip(block) {
            *sum += part;
        }
    }
}

struct Forward<'a, T> {
    x: &'a [T],
    weight: &'a [T],
    eps: f32,
    y: &'a mut [T],
    inverse: &'a mut [f32],
}

impl<T: Element> Kernel for Forward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.weight.len();
        let rows = self
            .x
            .chunks_exact(width)
            .zip(self.y.chunks_exact_mut(width));
        for ((x, y), inverse) in rows.zip(self.inverse) {
            let mut squares = s.splat(0.0);
            each_vector(
                width,
                #[inline(always)]
                |span| {
                    let x = load(s, x, span);
                    squares = s.mul_add(x, x, squares);
                },
            );
            *inverse = reciprocal(s.reduce_add(squares), width, self.eps);
            // A second pass over a row that is still in the L1 cache.
            normalise(s, x, self.weight, *inverse, y);
        }
    }
}

struct AddForward<'a, T> {
    x: &'a [T],
    residual: &'a [T],
    sum: &'a mut [T],
    weight: &'a [T],
    eps: f32,
    y: &'a mut [T],
    inverse: &'a mut [f32],
}

impl<T: Element> Kernel for AddForward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let width = self.weight.len();
        let inputs = self
            .x
            .chunks_exact(width)
            .zip(self.residual.chunks_exact(width));
        let outputs = self
            .sum
            .chunks_exact_mut(width)
            .zip(self.y.chunks_exact_mut(width));
        for (((x, residual), (sum, y)), inverse) in inputs.zip(outputs).zip(self.inverse) {
            let mut squares = s.splat(0.0);
            each_vector(
                width,
                #[inline(always)]
                |span| {
                    store(
                        s,
                        s.add(load(s, x, span), load(s, residual, span)),
                        sum,
                        span,
                    );
                    // The sum after rounding, because backward and the next layer read that.
                    let sum = load(s, sum, span);
                    squares = s.mul_add(sum, sum, squares);
                },
            );
            *inverse = reciprocal(s.reduce_add(squares), width, self.eps);
            normalise(s, sum, self.weight, *inverse, y);
        }
    }
}

#[inline(always)]
fn reciprocal(squares: f32, width: usize, eps: f32) -> f32 {
    1.0 / (squares / width as f32 + eps).sqrt()
}

#[inline(always)]
fn normalise<S: Simd, T: Element>(s: S, x: &[T], weight: &[T], inverse: f32, y: &mut [T]) {
    let inverse = s.splat(inverse);
    each_vector(
        x.len(),
        #[inline(always)]
        |span| {
            let x = s.mul(load(s, x, span), inverse);
            store(s, s.mul(x, load(s, weight, span)), y, span);
        },
    );
}

struct Backward<'a, T> {
    saved: Saved<'a, T>,
    dy: &'a [T],
    extra: Option<&'a [T]>,
    dx: &'a mut [T],
    dw: &'a mut [f32],
}

impl<T: Element> Kernel for Backward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Saved { x, weight, inverse } = self.saved;
        let width = weight.len();
        let dw = self.dw;
        let inputs = x.chunks_exact(width).zip(self.dy.chunks_exact(width));
        let rows = inputs.zip(inverse).zip(self.dx.chunks_exact_mut(width));
        for (row, (((x, dy), &inverse), dx)) in rows.enumerate() {
            let scale = s.splat(inverse);
            let mut dot = s.splat(0.0);
            each_vector(
                width,
                #[inline(always)]
                |span| {
                    let dy = load(s, dy, span);
                    let x = load(s, x, span);
                    // Shared by the sum over the row, for dx, and those over columns, dw.
                    let product = s.mul(dy, x);
                    dot = s.mul_add(product, load(s, weight, span), dot);
                    store(s, s.mul_add(product, scale, load(s, dw, span)), dw, span);
                },
            );
            // dx = w·dy/r - x · mean(w·dy·x) / r³, with r the root mean square.
            let along = -s.reduce_add(dot) / width as f32 * inverse * inverse * inverse;
            let along = s.splat(along);
            let extra = self
                .extra
                .map(|extra| &extra[row * width..(row + 1) * width]);
            each_vector(
                width,
                #[inline(always)]
                |span| {
                    let across = s.mul(s.mul(load(s, dy, span), load(s, weight, span)), scale);
                    let gradient = s.mul_add(load(s, x, span), along, across);
                    let gradient = match extra {
                        None => gradient,
                        Some(extra) => s.add(gradient, load(s, extra, span)),
                    };
                    store(s, gradient, dx, span);
                },
            );
        }
    }
}
