//! A few outputs with a few rows at a time, both as they lie: rows of the weight go through the
//! registers once for the first few rows of activations, and for the others come from the first cache.
#![allow(unsafe_code)]

use super::Job;
use crate::kernel::element::Element;
use crate::kernel::simd::{BYTES, Kernel, Simd};

/// Bytes of the weight that are asked for before they are needed, by a single row.
const AHEAD: usize = 8192;

/// A job by dot products.
pub(super) struct Dots<'a, 'b, 'c, T>(pub(super) &'a Job<'b, 'c, T>);

impl<T: Element> Kernel for Dots<'_, '_, '_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.0.part.x.rows == 1 {
            return self.one_row(s);
        }
        match S::TILE {
            4 => self.tiles::<S, 4>(s),
            _ => self.tiles::<S, 2>(s),
        }
    }
}

impl<T: Element> Dots<'_, '_, '_, T> {
    /// One output after another, so that the weight is one stream.
    #[inline(always)]
    fn one_row<S: Simd>(&self, s: S) {
        let mut output = self.0.outputs.start;
        while output + 4 <= self.0.outputs.end {
            let sums = [
                self.dot(s, output),
                self.dot(s, output + 1),
                self.dot(s, output + 2),
                self.dot(s, output + 3),
            ];
            self.0.finish(0, output, s.total_each(sums), 4, S::OFFSET);
            output += 4;
        }
        while output < self.0.outputs.end {
            let sum = s.total(self.dot(s, output));
            self.0.finish(0, output, [sum, 0, 0, 0], 1, S::OFFSET);
            output += 1;
        }
    }

    /// The dot product with the one row, in four partial sums: one would wait for itself.
    #[inline(always)]
    fn dot<S: Simd>(&self, s: S, output: usize) -> S::A {
        const PARTS: usize = 4;
        let weight = self.0.part.weight(output);
        let x = self.0.part.x.row(0);
        assert!(x.len() >= weight.len(), "rows are padded");
        let mut sums = [s.zero(); PARTS];
        let whole = weight.len() - weight.len() % (BYTES * PARTS);
        let mut at = 0;
        while at < whole {
            for (part, sum) in sums.iter_mut().enumerate() {
                // SAFETY: `at + BYTES * PARTS <= weight.len() <= x.len()`.
                let (w, x) = unsafe {
                    let at = at + part * BYTES;
                    (vector(weight, at), vector(x, at))
                };
                // By itself the machine does not look beyond the page that it is in.
                s.prefetch_near(w.as_ptr().wrapping_add(AHEAD).cast());
                *sum = s.dot(*sum, s.load_codes(w), s.load_activations(x));
            }
            at += BYTES * PARTS;
        }
        while at < weight.len() {
            let w = codes(s, weight, at);
            // SAFETY: `x` is padded to whole vectors.
            let x = s.load_activations(unsafe { vector(x, at) });
            sums[0] = s.dot(sums[0], w, x);
            at += BYTES;
        }
        let [a, b, c, d] = sums;
        s.add_sums(s.add_sums(a, b), s.add_sums(c, d))
    }

    /// All outputs, `R` at a time, with all rows, four at a time. The few outputs of a tile stay in the
    /// first cache while the rows pass by.
    #[inline(always)]
    fn tiles<S: Simd, const R: usize>(&self, s: S) {
        let mut output = self.0.outputs.start;
        while output + R <= self.0.outputs.end {
            self.outputs::<S, R>(s, output);
            output += R;
        }
        while output < self.0.outputs.end {
            self.outputs::<S, 1>(s, output);
            output += 1;
        }
    }

    #[inline(always)]
    fn outputs<S: Simd, const R: usize>(&self, s: S, output: usize) {
        let rows = self.0.part.x.rows;
        let mut row = 0;
        while row + 4 <= rows {
            self.tile::<S, R, 4>(s, output, row);
            row += 4;
        }
        match rows - row {
            0 => {}
            1 => self.tile::<S, R, 1>(s, output, row),
            2 => self.tile::<S, R, 2>(s, output, row),
            _ => self.tile::<S, R, 3>(s, output, row),
        }
    }

    #[inline(always)]
    fn tile<S: Simd, const R: usize, const N: usize>(&self, s: S, output: usize, row: usize) {
        let width = self.0.part.x.width;
        let mut weights: [&[i8]; R] = [&[]; R];
        for (r, weight) in weights.iter_mut().enumerate() {
            *weight = self.0.part.weight(output + r);
        }
        let mut rows: [&[i8]; N] = [&[]; N];
        for (n, slot) in rows.iter_mut().enumerate() {
            *slot = self.0.part.x.row(row + n);
        }
        let mut sums = [[s.zero(); N]; R];
        let whole = width - width % BYTES;
        let mut at = 0;
        while at < whole {
            let mut w = [s.load_codes(&[0; BYTES]); R];
            for (w, weight) in w.iter_mut().zip(&weights) {
                if row == 0 {
                    // The same place of the next tile: several short streams at once are more than
                    // the machine foresees by itself.
                    s.prefetch(weight.as_ptr().wrapping_add(R * width + at));
                }
                // SAFETY: `at + BYTES <= width`, the length of every row of the weight.
                *w = s.load_codes(unsafe { vector(weight, at) });
            }
            for (n, x) in rows.iter().enumerate() {
                // SAFETY: as above; rows of activations are at least as long.
                let x = s.load_activations(unsafe { vector(x, at) });
                for (sums, w) in sums.iter_mut().zip(w) {
                    sums[n] = s.dot(sums[n], w, x);
                }
            }
            at += BYTES;
        }
        if at < width {
            for (sums, weight) in sums.iter_mut().zip(&weights) {
                let w = codes(s, weight, at);
                for (sum, x) in sums.iter_mut().zip(&rows) {
                    // SAFETY: rows of activations are padded to whole vectors.
                    let x = s.load_activations(unsafe { vector(x, at) });
                    *sum = s.dot(*sum, w, x);
                }
            }
        }
        for n in 0..N {
            let mut four = [s.zero(); 4];
            for (four, sums) in four.iter_mut().zip(&sums) {
                *four = sums[n];
            }
            self.0
                .finish(row + n, output, s.total_each(four), R, S::OFFSET);
        }
    }
}

/// What is left of a row from `at` on, at most a vector, with anything in the places beyond: there the
/// activations are zero.
#[inline(always)]
fn codes<S: Simd>(s: S, weight: &[i8], at: usize) -> S::W {
    let rest = &weight[at..];
    match rest.first_chunk::<BYTES>() {
        Some(whole) => s.load_codes(whole),
        None => {
            let mut padded = [0; BYTES];
            padded[..rest.len()].copy_from_slice(rest);
            s.load_codes(&padded)
        }
    }
}

/// A vector's worth of a row.
///
/// # Safety
/// `at + BYTES <= row.len()`.
#[inline(always)]
unsafe fn vector(row: &[i8], at: usize) -> &[i8; BYTES] {
    debug_assert!(at + BYTES <= row.len(), "the caller's promise");
    // SAFETY: the caller's promise; bytes have no alignment.
    unsafe { &*row.as_ptr().add(at).cast() }
}
