//! What codes with one scale a row have in common.

use super::LEAST_SCALE;
use super::floats::{first_not_finite, max_magnitude};
use super::jobs::NotFinite;

/// How a row becomes codes.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct RowFit {
    /// The magnitude that has the largest code.
    pub(crate) most: f32,
    pub(crate) scale: f32,
}

/// Quantizes a row; returns its scale. The largest magnitude, or `limit` where that is less, becomes the
/// number `largest`. `encode` is not asked about rows whose numbers are too small for a scale: they are
/// zeros.
pub(super) fn quantize_row<C: Copy + Default>(
    row: &[f32],
    limit: Option<f32>,
    largest: f32,
    codes: &mut [C],
    encode: impl FnOnce(RowFit, &mut [C]),
) -> Result<f32, NotFinite> {
    let most = max_magnitude(row);
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
