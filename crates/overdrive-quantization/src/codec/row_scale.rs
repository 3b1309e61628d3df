//! Quantization with one scale for each row, which INT8 and FP8 share.

use overdrive_kernels::InstructionSet;

use super::LEAST_SCALE;
use super::floats::{first_not_finite, max_magnitude};
use super::not_finite::NotFinite;

/// The scale of a row.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RowFit {
    /// The magnitude that gets the largest code.
    pub(crate) most: f32,
    pub(crate) scale: f32,
}

/// Quantizes a row; returns its scale. The largest magnitude, or `limit` if that is smaller, becomes the number
/// `largest`. Rows whose numbers are too small for a scale become zeros, without a call of `encode`.
pub(super) fn quantize_row<C: Copy + Default>(
    row: &[f32],
    limit: Option<f32>,
    largest: f32,
    codes: &mut [C],
    encode: impl FnOnce(RowFit, &mut [C]),
) -> Result<f32, NotFinite> {
    let most = max_magnitude(InstructionSet::best(), row);
    // The maximum shows a bad number; the search for it runs only then.
    if !most.is_finite() {
        let index = first_not_finite(row).unwrap_or_default();
        return Err(NotFinite { index });
    }
    let most = limit.map_or(most, |limit| most.min(limit));
    let scale = most / largest;
    if scale < LEAST_SCALE {
        codes.fill(C::default());
        return Ok(LEAST_SCALE);
    }
    encode(RowFit { most, scale }, codes);
    Ok(scale)
}
