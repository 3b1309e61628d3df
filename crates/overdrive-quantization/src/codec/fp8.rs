//! 8-bit floats with one scale for each row or group of a row: `w = code · scale`, with codes in e4m3.

use super::not_finite::NotFinite;
use super::row_scale;
pub(crate) use overdrive_kernels::e4m3::{MAX, NAN, decode, encode};
use overdrive_kernels::{InstructionSet, vectorized};
use tch::Tensor;

/// The number of outputs and of inputs of a block with a scale of its own.
pub(crate) const BLOCK: usize = 128;

/// Returns the number of inputs that share a scale: `scales` are `(O,)`, or `(O, ⌈I/BLOCK⌉)` for blocks.
pub(crate) fn group(scales: &Tensor, inputs: usize) -> usize {
    match scales.dim() {
        2 => BLOCK,
        _ => inputs,
    }
}

/// Quantizes a row; returns its scale. Numbers beyond `limit`, if given, saturate.
pub(crate) fn quantize_row(
    row: &[f32],
    limit: Option<f32>,
    codes: &mut [u8],
) -> Result<f32, NotFinite> {
    row_scale::quantize_row(row, limit, MAX, codes, |fit, codes| {
        encode_row(InstructionSet::best(), row, fit.scale, codes);
    })
}

vectorized! {
    fn encode_row<S: Simd>(_s: S, row: &[f32], scale: f32, codes: &mut [u8]) {
        for (code, x) in codes.iter_mut().zip(row) {
            *code = encode(x / scale);
        }
    }
}

vectorized! {
    /// Dequantizes codes with one scale.
    fn decode_row<S: Simd>(_s: S, codes: &[u8], scale: f32, row: &mut [f32]) {
        for (x, code) in row.iter_mut().zip(codes) {
            *x = decode(*code) * scale;
        }
    }
}

/// Dequantizes a row with one scale for each `group` of it.
pub(crate) fn dequantize_row(codes: &[u8], group: usize, scales: &[f32], row: &mut [f32]) {
    let groups = codes.chunks(group).zip(row.chunks_mut(group));
    for ((codes, row), scale) in groups.zip(scales) {
        decode_row(InstructionSet::best(), codes, *scale, row);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rows_come_back_within_a_sixteenth(
            row in prop::collection::vec(-1e3f32..1e3, 1..200),
            exponent in -30..30,
        ) {
            let row: Vec<f32> = row.iter().map(|x| x * 2f32.powi(exponent)).collect();
            let mut codes = vec![0; row.len()];
            let scale = quantize_row(&row, None, &mut codes).expect("finite");
            let mut back = vec![0.0; row.len()];
            dequantize_row(&codes, row.len(), &[scale], &mut back);
            for (x, y) in row.iter().zip(&back) {
                // Half of an eighth of the number, or half of the least step.
                let bound = (x.abs() / 16.0).max(scale / 1024.0) * 1.000_01;
                prop_assert!((x - y).abs() <= bound, "{} {}", x, y);
            }
        }
    }
}
