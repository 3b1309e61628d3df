//! Further rotations of keys and queries that are already rotated to their positions.

use tch::{Kind, Tensor};

use crate::Result;
use crate::key_values::Spec;

/// A rotation by whole tokens of `D` channels in the half-split convention: channel `i` rotates with
/// channel `i + R/2`, where `R` is twice the number of frequencies; channels from `R` on are not rotated.
#[derive(Debug)]
pub(super) struct Rotation {
    /// The number of tokens of the first rotation.
    pub(super) tokens: i64,
    /// `(N, D)`: one row for each rotation, or one for all.
    cos: Tensor,
    sin: Tensor,
    rotary: i64,
    spec: Spec,
}

impl Rotation {
    /// Returns the rotations by each of `tokens`, for keys of `spec`.
    pub(super) fn new(frequencies: &[f64], tokens: &[i64], spec: &Spec) -> Result<Rotation> {
        let channels = spec.key_dim;
        let width = usize::try_from(channels).unwrap_or(0);
        let half = frequencies.len();
        if half == 0 || 2 * half > width {
            let found = format!("{half} numbers for keys of {channels} channels");
            let expected =
                "one for each pair of channels that rotates, at most half as many as channels";
            return Err(
                overdrive_core::Error::option("inverse_frequencies", found, expected).into(),
            );
        }
        // Computed in f64: at position 100,000 an f32 angle is off by up to 0.004 radians.
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for distance in tokens {
            let angles: Vec<f64> = frequencies.iter().map(|f| f * *distance as f64).collect();
            let rest = width - 2 * half;
            cos.extend(angles.iter().chain(&angles).map(|angle| angle.cos()));
            cos.extend(std::iter::repeat_n(1.0, rest));
            sin.extend(angles.iter().chain(&angles).map(|angle| angle.sin()));
            sin.extend(std::iter::repeat_n(0.0, rest));
        }
        let tensor = |numbers: &[f64]| -> Result<Tensor> {
            let rows = Tensor::f_from_slice(numbers)?.f_view([-1, channels])?;
            Ok(rows.f_to_kind(wide(spec.kind))?.f_to_device(spec.device)?)
        };
        Ok(Rotation {
            tokens: tokens.first().copied().unwrap_or(0),
            cos: tensor(&cos)?,
            sin: tensor(&sin)?,
            rotary: 2 * half as i64,
            spec: *spec,
        })
    }

    /// Returns `true` if the rotation is for keys of `spec`.
    pub(super) fn fits(&self, spec: &Spec) -> bool {
        let of = |spec: &Spec| (spec.key_dim, spec.kind, spec.device);
        of(&self.spec) == of(spec)
    }
}

/// Rotates each of the `N` rows of `x (B, H, N, D)`. Computed in f32 (f64 for f64).
pub(super) fn rotate(x: &Tensor, rotation: &Rotation) -> Result<Tensor> {
    let kind = x.kind();
    let x = x.f_to_kind(wide(kind))?;
    let (half, channels) = (rotation.rotary / 2, x.size()[3]);
    let channel_range = |from, len| x.f_narrow(3, from, len);
    let other = Tensor::f_cat(
        &[
            channel_range(half, half)?.f_neg()?,
            channel_range(0, half)?,
            channel_range(rotation.rotary, channels - rotation.rotary)?,
        ],
        3,
    )?;
    let rotated = x.f_mul(&rotation.cos)?.f_addcmul(&other, &rotation.sin)?;
    Ok(rotated.f_to_kind(kind)?)
}

fn wide(kind: Kind) -> Kind {
    match kind {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}
