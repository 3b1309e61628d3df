//! Rows of activations in 8 bits.

use super::element::Element;
use super::simd::{Kernel, Simd, dispatch};
use super::threads::chunks;

/// Rows are padded with zeros to a multiple of this.
pub(crate) const PAD: usize = 64;

/// Rows of activations, each quantized symmetrically to `-127..=127`, with a scale of its own for the
/// whole row or for each group of inputs: `x ≈ codes · scale`.
#[derive(Debug)]
pub(crate) struct Int8Rows {
    /// i8 `(rows, padded)`; zero beyond `width`.
    pub(crate) codes: Vec<i8>,
    /// `(rows, groups)`. NaN where the row (or group) holds a NaN.
    pub(crate) scales: Vec<f32>,
    /// `Σ codes` by row and group.
    pub(crate) sums: Vec<i32>,
    pub(crate) rows: usize,
    pub(crate) width: usize,
    /// `width` rounded up to a multiple of [`PAD`].
    pub(crate) padded: usize,
    /// Inputs that share a scale; at least `width` where there is one for the row.
    pub(crate) group: usize,
}

impl Int8Rows {
    /// Quantizes `x (rows, width)`, with a scale for each `group` inputs of a row (the last may be
    /// shorter), or for the row if there is no group.
    pub(crate) fn quantize<T: Element>(x: &[T], width: usize, group: Option<usize>) -> Self {
        let rows = x.len().checked_div(width).unwrap_or(0);
        let padded = width.next_multiple_of(PAD);
        let group = group.unwrap_or(padded).max(1);
        let groups = width.div_ceil(group);
        let mut all = Int8Rows {
            codes: vec![0; rows * padded],
            scales: vec![0.0; rows * groups],
            sums: vec![0; rows * groups],
            rows,
            width,
            padded,
            group,
        };
        if rows == 0 || width == 0 {
            return all;
        }
        if rows * width < PARALLEL {
            quantize_rows(x, &mut all.codes, &mut all.scales, &mut all.sums, width, group);
            return all;
        }
        let parts = Parts {
            codes: all.codes.as_mut_slice(),
            scales: all.scales.as_mut_slice(),
            sums: all.sums.as_mut_slice(),
        };
        let count = overdrive_sys::threads::intra_op().clamp(1, rows);
        let share = rows.div_ceil(count);
        let parts: Vec<_> = parts
            .split(share * padded, share * groups)
            .zip(x.chunks(share * width))
            .map(std::sync::Mutex::new)
            .collect();
        chunks(parts.len(), 1, true, |range| {
            for part in &parts[range] {
                // Each part is visited once; a lock that a panic poisoned would have ended the product.
                if let Ok(mut part) = part.lock() {
                    let (out, x) = &mut *part;
                    quantize_rows(x, out.codes, out.scales, out.sums, width, group);
                }
            }
        });
        all
    }

    /// Groups of a row.
    pub(crate) fn groups(&self) -> usize {
        self.width.div_ceil(self.group)
    }

    /// The codes of a row, padded.
    #[inline(always)]
    pub(crate) fn row(&self, row: usize) -> &[i8] {
        &self.codes[row * self.padded..(row + 1) * self.padded]
    }
}

/// Activations that are quantized by one thread.
const PARALLEL: usize = 64 << 10;

struct Parts<'a> {
    codes: &'a mut [i8],
    scales: &'a mut [f32],
    sums: &'a mut [i32],
}

impl<'a> Parts<'a> {
    fn split(self, codes: usize, groups: usize) -> impl Iterator<Item = Parts<'a>> {
        let codes = self.codes.chunks_mut(codes);
        let scales = self.scales.chunks_mut(groups);
        let sums = self.sums.chunks_mut(groups);
        codes.zip(scales).zip(sums).map(|((codes, scales), sums)| Parts {
            codes,
            scales,
            sums,
        })
    }
}

/// `codes` are padded, with zeros at the ends of rows already.
fn quantize_rows<T: Element>(
    x: &[T],
    codes: &mut [i8],
    scales: &mut [f32],
    sums: &mut [i32],
    width: usize,
    group: usize,
) {
    let padded = width.next_multiple_of(PAD);
    let groups = width.div_ceil(group);
    let mut scratch = Vec::new();
    for (row, x) in x.chunks_exact(width).enumerate() {
        let x = T::floats(x, &mut scratch);
        let codes = &mut codes[row * padded..row * padded + width];
        for (index, (x, codes)) in x.chunks(group).zip(codes.chunks_mut(group)).enumerate() {
            let at = row * groups + index;
            (scales[at], sums[at]) = dispatch(QuantizeGroup { x, codes });
        }
    }
}

/// One group of one row: its scale, and the sum of the codes.
struct QuantizeGroup<'a> {
    x: &'a [f32],
    codes: &'a mut [i8],
}

impl Kernel for QuantizeGroup<'_> {
    type Output = (f32, i32);

    #[inline(always)]
    fn run<S: Simd>(self, _: S) -> (f32, i32) {
        quantize_group(self.x, self.codes)
    }
}

/// Plain loops, which become vectors of whatever set they are compiled for.
#[inline(always)]
fn quantize_group(x: &[f32], codes: &mut [i8]) -> (f32, i32) {
    // Magnitudes of floats compare as their bits do, and NaN is larger than all.
    let bits = x.iter().fold(0, |most, x| (x.to_bits() & !(1 << 31)).max(most));
    let most = f32::from_bits(bits);
    let inverse = 127.0 / most;
    // 127 over a subnormal number may be too much for a float: such rows are zero.
    let inverse = if inverse.is_finite() { inverse } else { 0.0 };
    // Adding 1.5 · 2²³ leaves the nearest integer (ties to even) in the low bits of the sum.
    const TO_INTEGER: f32 = 12_582_912.0;
    let mut sum = 0;
    for (code, x) in codes.iter_mut().zip(x) {
        #[allow(clippy::cast_possible_truncation, reason = "the low 8 bits are the integer")]
        let quantized = (x * inverse + TO_INTEGER).to_bits() as i8;
        *code = quantized;
        sum += i32::from(quantized);
    }
    (most / 127.0, sum)
}
