//! Keys and values of 8 bits: a code for each element, and a scale for each row.

use overdrive_kernels::{InstructionSet, LANES, e4m3, vectorized};

use super::inputs::View;

/// The keys or values that the kernels read.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Stored<'a, E> {
    /// The elements.
    Elements(View<'a, E>),
    /// Codes and the scale of each row, both contiguous.
    Quantized {
        codes: Codes<'a>,
        scales: View<'a, f32>,
    },
}

/// Rows of codes.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Codes<'a> {
    Int8(View<'a, i8>),
    /// e4m3.
    Fp8(View<'a, u8>),
}

/// Writes `codes · scale` of each row to the rows of `to`, which are `width` apart and padded with zeros.
pub(super) fn dequantize_rows(
    set: InstructionSet,
    (codes, scales): (&Codes<'_>, &View<'_, f32>),
    (batch, head, row): (usize, usize, usize),
    (dim, width): (usize, usize),
    to: &mut [f32],
) {
    let count = to.len() / width;
    let scales = &scales.data[scales.start(batch, head, row)..][..count];
    match codes {
        Codes::Int8(view) => {
            let codes = &view.data[view.start(batch, head, row)..][..count * dim];
            dequantize_int8(set, codes, scales, dim, to, width);
        }
        Codes::Fp8(view) => {
            let codes = &view.data[view.start(batch, head, row)..][..count * dim];
            dequantize_fp8(set, codes, scales, dim, to, width);
        }
    }
}

vectorized! {
    fn dequantize_int8<S: Simd>(
        s: S,
        codes: &[i8],
        scales: &[f32],
        dim: usize,
        to: &mut [f32],
        width: usize,
    ) {
        let rows = codes.chunks_exact(dim).zip(scales).zip(to.chunks_exact_mut(width));
        for ((codes, scale), to) in rows {
            let (to, padding) = to.split_at_mut(dim);
            padding.fill(0.0);
            let factor = s.splat(*scale);
            let (vectors, rest) = codes.as_chunks::<LANES>();
            let (to_vectors, to_rest) = to.as_chunks_mut::<LANES>();
            for (codes, to) in vectors.iter().zip(to_vectors) {
                s.store_f32(s.mul(s.load_i8(codes), factor), to);
            }
            for (code, to) in rest.iter().zip(to_rest) {
                *to = f32::from(*code) * scale;
            }
        }
    }
}

vectorized! {
    fn dequantize_fp8<S: Simd>(
        s: S,
        codes: &[u8],
        scales: &[f32],
        dim: usize,
        to: &mut [f32],
        width: usize,
    ) {
        let rows = codes.chunks_exact(dim).zip(scales).zip(to.chunks_exact_mut(width));
        for ((codes, scale), to) in rows {
            let (to, padding) = to.split_at_mut(dim);
            padding.fill(0.0);
            // `load_e4m3` divides by 256.
            let factor = s.splat(scale * 256.0);
            let (vectors, rest) = codes.as_chunks::<LANES>();
            let (to_vectors, to_rest) = to.as_chunks_mut::<LANES>();
            for (codes, to) in vectors.iter().zip(to_vectors) {
                s.store_f32(s.mul(s.load_e4m3(codes), factor), to);
            }
            for (code, to) in rest.iter().zip(to_rest) {
                *to = e4m3::decode(*code) * scale;
            }
        }
    }
}

/// Returns the scale with which the largest magnitude of a row gets the code `largest`: 0 for a row of zeros, NaN for one
/// with an element that is not finite, so that the row is read as NaN.
#[inline(always)]
fn scale_of(row: &[f32], largest: f32) -> f32 {
    let (mut most, mut finite) = (0.0f32, true);
    for x in row {
        most = most.max(x.abs());
        finite &= x.is_finite();
    }
    let scale = most / largest;
    match finite {
        true if scale < f32::MIN_POSITIVE => 0.0,
        true => scale,
        false => f32::NAN,
    }
}

vectorized! {
    /// Quantizes a row to `-127..=127` and returns its scale.
    pub(super) fn quantize_int8<S: Simd>(_s: S, row: &[f32], codes: &mut [i8]) -> f32 {
        let scale = scale_of(row, 127.0);
        if scale == 0.0 || scale.is_nan() {
            codes.fill(0);
            return scale;
        }
        for (code, x) in codes.iter_mut().zip(row) {
            // Adding 1.5 · 2²³ leaves the nearest integer, ties to even, in the low bits.
            *code = (x / scale + 12_582_912.0).to_bits() as i8;
        }
        scale
    }
}

vectorized! {
    /// Quantizes a row to e4m3 and returns its scale.
    pub(super) fn quantize_fp8<S: Simd>(_s: S, row: &[f32], codes: &mut [u8]) -> f32 {
        let scale = scale_of(row, e4m3::MAX);
        if scale == 0.0 || scale.is_nan() {
            codes.fill(0);
            return scale;
        }
        for (code, x) in codes.iter_mut().zip(row) {
            *code = e4m3::encode(x / scale);
        }
        scale
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns values in -1..1.
    fn values(count: usize) -> Vec<f32> {
        (0..count).map(|i| (i as f32 * 12.9898).sin()).collect()
    }

    fn view<T>(data: &[T], row: usize) -> View<'_, T> {
        View {
            data,
            batch: 0,
            head: 0,
            row,
        }
    }

    #[test]
    fn every_instruction_set_reads_rows_within_half_a_step() {
        // Whole vectors and a rest; the last row is longer than the others.
        let (dim, width) = (37, 48);
        let rows: Vec<f32> = values(3 * dim)
            .into_iter()
            .enumerate()
            .map(|(i, x)| if i < 2 * dim { x } else { 1e4 * x })
            .collect();
        for set in InstructionSet::available() {
            let (mut ints, mut floats) = (vec![0i8; 3 * dim], vec![0u8; 3 * dim]);
            let mut scales = [vec![0.0; 3], vec![0.0; 3]];
            for (n, row) in rows.chunks_exact(dim).enumerate() {
                let of = n * dim..(n + 1) * dim;
                scales[0][n] = quantize_int8(set, row, &mut ints[of.clone()]);
                scales[1][n] = quantize_fp8(set, row, &mut floats[of]);
            }
            let codes = [
                Codes::Int8(view(&ints, dim)),
                Codes::Fp8(view(&floats, dim)),
            ];
            for (codes, scales) in codes.iter().zip(&scales) {
                let mut back = vec![f32::NAN; 2 * width];
                // From the second row on.
                let stored = (codes, &view(scales, 1));
                dequantize_rows(set, stored, (0, 0, 1), (dim, width), &mut back);
                for (n, back) in back.chunks_exact(width).enumerate() {
                    let scale = scales[n + 1];
                    for (x, back) in rows[(n + 1) * dim..].iter().zip(&back[..dim]) {
                        let bound = match codes {
                            Codes::Int8(_) => scale * 0.5,
                            // Half of an eighth of the number, or half of the least step.
                            Codes::Fp8(_) => (x.abs() / 16.0).max(scale / 1024.0),
                        };
                        assert!((x - back).abs() <= bound * 1.000_01, "{set:?}: {x} {back}");
                    }
                    assert_eq!(back[dim..], [0.0; 11]);
                }
            }
        }
    }

    #[test]
    fn a_row_that_is_not_finite_is_nan_and_a_tiny_one_is_zero() {
        for set in InstructionSet::available() {
            let mut codes = [7i8; 3];
            assert!(quantize_int8(set, &[1.0, f32::INFINITY, 0.0], &mut codes).is_nan());
            assert!(quantize_int8(set, &[1.0, f32::NAN, 0.0], &mut codes).is_nan());
            assert_eq!(quantize_int8(set, &[1e-38, 0.0, -1e-38], &mut codes), 0.0);
            assert_eq!(codes, [0; 3]);
            let mut codes = [7u8; 3];
            assert!(quantize_fp8(set, &[1.0, f32::NAN, 0.0], &mut codes).is_nan());
            assert_eq!(quantize_fp8(set, &[0.0; 3], &mut codes), 0.0);
            assert_eq!(codes, [0; 3]);
        }
    }
}
