//! Rotary turns of keys and queries that have been turned to their positions already.

use tch::{Kind, Tensor};

use crate::entries::Spec;
use crate::{Error, Result};

/// A turn on by whole tokens, of `D` channels in the half-split convention (channel `i` turns with
/// channel `i + R/2`, `R` being twice the number of frequencies; channels from `R` on stay).
#[derive(Debug)]
pub(super) struct Turn {
    /// How many tokens on; of several, the first.
    pub(super) tokens: i64,
    /// `(N, D)`: one row for each turn, or one for all.
    cos: Tensor,
    sin: Tensor,
    rotary: i64,
    spec: Spec,
}

impl Turn {
    /// Turns by each of `tokens`, for keys of `spec`. Angles are computed in f64.
    pub(super) fn new(frequencies: &[f64], tokens: &[i64], spec: &Spec) -> Result<Turn> {
        let channels = spec.key_dim;
        let width = usize::try_from(channels).unwrap_or(0);
        let half = frequencies.len();
        if half == 0 || 2 * half > width {
            return Err(Error::BadConfig {
                key: "inverse_frequencies",
                found: format!("{half} numbers for keys of {channels} channels"),
                expected: "one for each pair of channels that turns, at most half as many as channels",
            });
        }
        let (mut cos, mut sin) = (Vec::new(), Vec::new());
        for turn in tokens {
            let angles: Vec<f64> = frequencies.iter().map(|f| f * *turn as f64).collect();
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
        Ok(Turn {
            tokens: tokens.first().copied().unwrap_or(0),
            cos: tensor(&cos)?,
            sin: tensor(&sin)?,
            rotary: 2 * half as i64,
            spec: *spec,
        })
    }

    /// Whether it was made for such keys.
    pub(super) fn fits(&self, spec: &Spec) -> bool {
        let of = |spec: &Spec| (spec.key_dim, spec.kind, spec.device);
        of(&self.spec) == of(spec)
    }
}

/// `x (B, H, N, D)` with each of its `N` rows turned on. Computed in f32 (f64 for f64).
pub(super) fn turned(x: &Tensor, turn: &Turn) -> Result<Tensor> {
    let kind = x.kind();
    let x = x.f_to_kind(wide(kind))?;
    let (half, channels) = (turn.rotary / 2, x.size()[3]);
    let part = |from, len| x.f_narrow(3, from, len);
    let other = Tensor::f_cat(
        &[
            part(half, half)?.f_neg()?,
            part(0, half)?,
            part(turn.rotary, channels - turn.rotary)?,
        ],
        3,
    )?;
    let turned = x.f_mul(&turn.cos)?.f_addcmul(&other, &turn.sin)?;
    Ok(turned.f_to_kind(kind)?)
}

fn wide(kind: Kind) -> Kind {
    match kind {
        Kind::Double => Kind::Double,
        _ => Kind::Float,
    }
}
