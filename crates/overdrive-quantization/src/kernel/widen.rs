//! A few rows of activations in full precision with a weight of 8 bits, whose codes become floats in
//! registers.
#![allow(unsafe_code)]

use std::ops::Range;

use super::element::Element;
use super::joint::Part;
use super::simd::{InstructionSet, Kernel, LANES, Simd};
use super::threads::Target;

/// A code of 8 bits.
pub(crate) trait Code: Copy + Default + Sync {
    /// What a code as [`load`](Self::load) gives it is too small by.
    const FACTOR: f32;
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F;
}

impl Code for i8 {
    const FACTOR: f32 = 1.0;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F {
        simd.load_i8(from)
    }
}

/// An 8-bit float.
#[derive(Debug, Clone, Copy, Default)]
#[repr(transparent)]
pub(crate) struct E4m3(u8);

impl E4m3 {
    pub(crate) fn of(codes: &[u8]) -> &[E4m3] {
        // SAFETY: a transparent wrapper of a byte.
        unsafe { std::slice::from_raw_parts(codes.as_ptr().cast(), codes.len()) }
    }
}

impl Code for E4m3 {
    const FACTOR: f32 = 256.0;

    #[inline(always)]
    fn load<S: Simd>(simd: S, from: &[Self; LANES]) -> S::F {
        simd.load_e4m3(&from.map(
            #[inline(always)]
            |code| code.0,
        ))
    }
}

/// A weight with one scale an output, and the activations.
#[derive(Debug, Clone, Copy)]
pub(crate) struct WidenPart<'a, C, T> {
    /// `(rows, width)`.
    pub(crate) x: &'a [f32],
    pub(crate) width: usize,
    /// `(outputs, width)`.
    pub(crate) codes: &'a [C],
    /// One an output.
    pub(crate) scales: &'a [f32],
    /// One an output.
    pub(crate) bias: Option<&'a [T]>,
    pub(crate) set: InstructionSet,
}

impl<C: Code, T: Element> Part<T> for WidenPart<'_, C, T> {
    fn outputs(&self) -> usize {
        self.scales.len()
    }

    fn row_bytes(&self) -> usize {
        self.width
    }

    fn run(&self, outputs: Range<usize>, first: usize, y: &Target<'_, T>) {
        self.set.run(Widen {
            part: self,
            outputs,
            first,
            y,
        });
    }
}

/// Some outputs of a part.
struct Widen<'a, 'b, C, T> {
    part: &'a WidenPart<'b, C, T>,
    outputs: Range<usize>,
    first: usize,
    y: &'a Target<'a, T>,
}

impl<C: Code, T: Element> Kernel for Widen<'_, '_, C, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        if self.part.x.len() == self.part.width {
            for output in self.outputs.clone() {
                let sum = dot(s, self.part.x, self.weight(output));
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

impl<C: Code, T: Element> Widen<'_, '_, C, T> {
    #[inline(always)]
    fn weight(&self, output: usize) -> &[C] {
        let width = self.part.width;
        &self.part.codes[output * width..(output + 1) * width]
    }

    #[inline(always)]
    fn set(&self, row: usize, output: usize, sum: f32) {
        let bias = self.part.bias.map_or(0.0, |bias| bias[output].to_f32());
        let y = sum * C::FACTOR * self.part.scales[output] + bias;
        self.y.set(row, self.first + output, T::from_f32(y));
    }

    /// All outputs, `N` at a time, with all rows, `N` at a time.
    #[inline(always)]
    fn tiles<S: Simd, const N: usize>(&self, s: S) {
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
    fn outputs<S: Simd, const R: usize, const N: usize>(&self, s: S, output: usize) {
        let rows = self.part.x.len() / self.part.width;
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

    /// `R` outputs of `N` rows.
    #[inline(always)]
    fn tile<S: Simd, const R: usize, const N: usize>(&self, s: S, output: usize, row: usize) {
        let width = self.part.width;
        let mut weights: [&[C]; R] = [&[]; R];
        for (r, weight) in weights.iter_mut().enumerate() {
            *weight = self.weight(output + r);
        }
        let mut rows: [&[f32]; N] = [&[]; N];
        for (n, slot) in rows.iter_mut().enumerate() {
            *slot = &self.part.x[(row + n) * width..(row + n + 1) * width];
        }
        let mut sums = [[s.splat(0.0); N]; R];
        let whole = width - width % LANES;
        let mut at = 0;
        while at < whole {
            let mut x = [s.splat(0.0); N];
            for (x, row) in x.iter_mut().zip(&rows) {
                // SAFETY: `at + LANES <= width`, the length of every row.
                *x = s.load_f32(unsafe { vector(row, at) });
            }
            for (weight, sums) in weights.iter().zip(&mut sums) {
                if row == 0 && at % 64 == 0 {
                    // The same place of the next tile: several short streams at once are more than
                    // the machine foresees by itself.
                    s.prefetch(weight.as_ptr().wrapping_add(R * width + at));
                }
                // SAFETY: as above.
                let w = C::load(s, unsafe { vector(weight, at) });
                for (sum, x) in sums.iter_mut().zip(x) {
                    *sum = s.mul_add(x, w, *sum);
                }
            }
            at += LANES;
        }
        if whole < width {
            for (weight, sums) in weights.iter().zip(&mut sums) {
                let w = C::load(s, &padded(&weight[whole..]));
                for (sum, x) in sums.iter_mut().zip(&rows) {
                    *sum = s.mul_add(s.load_f32(&padded(&x[whole..])), w, *sum);
                }
            }
        }
        for (r, sums) in sums.into_iter().enumerate() {
            let mut four = [s.splat(0.0); 4];
            four[..N].copy_from_slice(&sums);
            for (n, total) in s.reduce_add_each(four).into_iter().take(N).enumerate() {
                self.set(row + n, output + r, total);
            }
        }
    }
}

/// The dot product of two rows, in four partial sums: one would wait for itself.
#[inline(always)]
fn dot<S: Simd, C: Code>(s: S, x: &[f32], weight: &[C]) -> f32 {
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
            *sum = s.mul_add(s.load_f32(x), C::load(s, w), *sum);
        }
        at += LANES * PARTS;
    }
    while at < width {
        let end = (at + LANES).min(width);
        let (x, w) = (padded(&x[at..end]), padded(&weight[at..end]));
        sums[0] = s.mul_add(s.load_f32(&x), C::load(s, &w), sums[0]);
        at += LANES;
    }
    let [a, b, c, d] = sums;
    s.reduce_add(s.add(s.add(a, b), s.add(c, d)))
}

/// What is left of a row, at most a vector, and zeros.
#[inline(always)]
fn padded<T: Copy + Default>(rest: &[T]) -> [T; LANES] {
    let mut padded = [T::default(); LANES];
    padded[..rest.len()].copy_from_slice(rest);
    padded
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
