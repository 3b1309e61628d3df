//! `y = x · wᵀ + b` for a few rows of `x`: decoding one token of a few texts.
//!
//! Such a product does little arithmetic on each weight, so its floor is the time to read the weights
//! once. General products pack a weight before they use it, which reads and writes it again; here each
//! row of the weight goes through the registers with a few rows of `x` at a time, and is still in the
//! first cache for the next few.
#![allow(unsafe_code)]

use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::simd::{Element, Kernel, LANES, Simd, dispatch, each_vector, load};

/// Bytes of weight that a thread takes at a time: enough to be read as a stream, few enough that a
/// thread held up by something else does not hold up the others.
const CHUNK_BYTES: usize = 128 << 10;

/// Work that is not worth waking another thread for.
const MIN_PARALLEL_BYTES: usize = 64 << 10;

/// Maps of the same `x`, whose results stand side by side.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Map<'a, W> {
    /// Row-major, one row an output.
    pub(crate) weight: &'a [W],
    /// One number an output.
    pub(crate) bias: Option<&'a [W]>,
}

/// Computes `y (rows, Σ outputs)` from `x (rows, width)`.
pub(crate) fn few_rows<W: Element>(x: &[f32], width: usize, maps: &[Map<'_, W>], y: &mut [W]) {
    let outputs: usize = maps.iter().map(|map| map.weight.len() / width).sum();
    let row_bytes = width * size_of::<W>();
    let chunk = (CHUNK_BYTES / row_bytes.max(1)).max(4);
    let chunks = outputs.div_ceil(chunk);
    let target = Target {
        y: y.as_mut_ptr(),
        len: y.len(),
        outputs,
    };
    let run = |range: Range<usize>| {
        let mut first = 0;
        for map in maps {
            let count = map.weight.len() / width;
            let from = range.start.clamp(first, first + count) - first;
            let to = range.end.clamp(first, first + count) - first;
            if from < to {
                dispatch(Part {
                    x,
                    width,
                    map: *map,
                    rows: from..to,
                    first,
                    target: &target,
                });
            }
            first += count;
        }
    };
    if outputs * row_bytes <= MIN_PARALLEL_BYTES {
        return run(0..outputs);
    }
    let next = AtomicUsize::new(0);
    let threads = overdrive_sys::threads::intra_op().min(chunks);
    overdrive_sys::threads::parallel_for(threads, 1, |_| {
        loop {
            let index = next.fetch_add(1, Ordering::Relaxed);
            if index >= chunks {
                break;
            }
            run(index * chunk..((index + 1) * chunk).min(outputs));
        }
    });
}

/// The results, of which each part writes its own columns.
struct Target<W> {
    y: *mut W,
    len: usize,
    outputs: usize,
}

// SAFETY: every part writes other elements, and nobody reads before all are done.
unsafe impl<W: Send> Sync for Target<W> {}

impl<W: Element> Target<W> {
    #[inline(always)]
    fn set(&self, row: usize, column: usize, value: f32) {
        let at = row * self.outputs + column;
        assert!(at < self.len, "a row and column of the result");
        // SAFETY: inside the slice that `few_rows` borrowed for writing; chunks do not overlap.
        unsafe { self.y.add(at).write(W::from_f32(value)) };
    }
}

/// Some outputs of one map.
struct Part<'a, W> {
    x: &'a [f32],
    width: usize,
    map: Map<'a, W>,
    rows: Range<usize>,
    /// The column of the map's first output.
    first: usize,
    target: &'a Target<W>,
}

impl<W: Element> Kernel for Part<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.x.len() == self.width {
            for output in self.rows.clone() {
                let sum = dot(s, self.x, self.weight(output));
                self.target
                    .set(0, self.first + output, sum + self.bias(output));
            }
            return;
        }
        match S::TILE {
            4 => self.tiles::<S, 4>(s),
            _ => self.tiles::<S, 2>(s),
        }
    }
}

impl<W: Element> Part<'_, W> {
    #[inline(always)]
    fn weight(&self, output: usize) -> &[W] {
        &self.map.weight[output * self.width..(output + 1) * self.width]
    }

    #[inline(always)]
    fn bias(&self, output: usize) -> f32 {
        self.map.bias.map_or(0.0, |bias| bias[output].to_f32())
    }

    /// All outputs, `T` at a time, with all rows, `T` at a time.
    #[inline(always)]
    fn tiles<S: Simd, const T: usize>(&self, s: S) {
        let mut output = self.rows.start;
        while output + T <= self.rows.end {
            self.outputs::<S, T, T>(s, output);
            output += T;
        }
        while output < self.rows.end {
            self.outputs::<S, 1, T>(s, output);
            output += 1;
        }
    }

    /// `R` outputs from `output` on, with all rows, `T` at a time.
    #[inline(always)]
    fn outputs<S: Simd, const R: usize, const T: usize>(&self, s: S, output: usize) {
        let rows = self.x.len() / self.width;
        let mut row = 0;
        while row + T <= rows {
            self.tile::<S, R, T>(s, output, row);
            row += T;
        }
        // Of the tail as much as there is at once: each visit reads the weights from the cache again.
        match rows - row {
            0 => {}
            1 => self.tile::<S, R, 1>(s, output, row),
            2 => self.tile::<S, R, 2>(s, output, row),
            _ => self.tile::<S, R, 3>(s, output, row),
        }
    }

    /// `R` outputs of `N` rows.
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const N: usize>(&self, s: S, output: usize, row: usize) {
        let width = self.width;
        let mut weights: [&[W]; R] = [&[]; R];
        for (r, weight) in weights.iter_mut().enumerate() {
            *weight = self.weight(output + r);
        }
        let mut rows: [&[f32]; N] = [&[]; N];
        for (n, slot) in rows.iter_mut().enumerate() {
            *slot = &self.x[(row + n) * width..(row + n + 1) * width];
        }
        let mut sums = [[s.splat(0.0); N]; R];
        let whole = width - width % LANES;
        let mut at = 0;
        while at < whole {
            let mut x = [s.splat(0.0); N];
            for (x, row) in x.iter_mut().zip(&rows) {
                // SAFETY: `at + LANES <= width`, the length of every row.
                *x = f32::load(s, unsafe { vector(row, at) });
            }
            for (weight, sums) in weights.iter().zip(&mut sums) {
                if row == 0 {
                    // The same place of the next tile: several short streams at once are more than
                    // the machine foresees by itself.
                    s.prefetch(weight.as_ptr().wrapping_add(R * width + at));
                }
                // SAFETY: as above.
                let w = W::load(s, unsafe { vector(weight, at) });
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = s.mul_add(x, w, *sum);
                }
            }
            at += LANES;
        }
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
            let mut four = [s.splat(0.0); 4];
            four[..N].copy_from_slice(&sums);
            let totals = s.reduce_add_each(four);
            for (n, total) in totals.into_iter().take(N).enumerate() {
                self.target
                    .set(row + n, self.first + output + r, total + bias);
            }
        }
    }
}

/// The dot product of two rows, in four partial sums: one would wait for itself.
#[inline(always)]
fn dot<S: Simd, W: Element>(s: S, x: &[f32], weight: &[W]) -> f32 {
    const PARTS: usize = 4;
    let width = weight.len();
    assert_eq!(x.len(), width, "one row of each");
    let mut sums = [s.splat(0.0); PARTS];
    let whole = width - width % (LANES * PARTS);
    let mut at = 0;
    while at < whole {
        for (part, sum) in sums.iter_mut().enumerate() {
            // SAFETY: `at + LANES * PARTS <= width`, the length of both.
            let (x, w) = unsafe {
                let at = at + part * LANES;
                (vector(x, at), vector(weight, at))
            };
            *sum = s.mul_add(f32::load(s, x), W::load(s, w), *sum);
        }
        at += LANES * PARTS;
    }
    each_vector(
        width - whole,
        #[inline(always)]
        |span| {
            let product = (load(s, &x[whole..], span), load(s, &weight[whole..], span));
            sums[0] = s.mul_add(product.0, product.1, sums[0]);
        },
    );
    let [a, b, c, d] = sums;
    s.reduce_add(s.add(s.add(a, b), s.add(c, d)))
}

/// A vector's worth of a row.
///
/// # Safety
/// `at + LANES <= row.len()`.
#[inline(always)]
unsafe fn vector<T>(row: &[T], at: usize) -> &[T; LANES] {
    debug_assert!(at + LANES <= row.len(), "the caller's promise");
    // SAFETY: the caller's promise; an array has the alignment of its elements.
    unsafe { &*row.as_ptr().add(at).cast() }
}
