//! The frequencies of rotary positions. Each step is rounded to fp32 as in transformers: at position 100,000
//! the last bit of an inverse frequency is 0.006 rad.

use std::borrow::Cow;
use std::f64::consts::TAU;

use tch::{Device, Kind, Tensor};

use crate::config::{LongRope, Yarn};
use crate::{Result, RopeScaling};

/// The inverse frequencies of a model, `(D/2,)`.
#[derive(Debug)]
pub(super) struct Frequencies {
    /// The frequencies within the original context.
    short: Vec<f32>,
    beyond: Beyond,
    /// The factor of cosines and sines.
    scale: f64,
}

/// The frequencies beyond the original context.
#[derive(Debug)]
enum Beyond {
    Same,
    /// Other frequencies from a number of positions on (LongRoPE).
    Long {
        context: i64,
        frequencies: Vec<f32>,
    },
    /// Other frequencies for every length (dynamic scaling).
    Dynamic {
        context: i64,
        factor: f64,
        theta: f64,
        dim: i64,
    },
}

impl Frequencies {
    pub(super) fn new(
        dim: i64,
        theta: f64,
        scaling: &RopeScaling,
        context: i64,
    ) -> Result<Frequencies> {
        // By tensors and not by f64: transformers computes powers in fp32, and its rounding is part of the model.
        let powers = || -> Result<Tensor> { Ok(Tensor::f_pow_scalar(theta, &exponents(dim)?)?) };
        let plain = || -> Result<Tensor> { Ok(powers()?.f_reciprocal()?) };
        let (short, beyond, scale) = match scaling {
            RopeScaling::Default => (plain()?, Beyond::Same, 1.0),
            RopeScaling::Linear { factor } => (plain()?.f_div_scalar(*factor)?, Beyond::Same, 1.0),
            RopeScaling::Proportional {
                partial_rotary_factor,
                factor,
            } => {
                let kept = (partial_rotary_factor * dim as f64 / 2.0).floor() as i64;
                let frequencies = plain()?.f_div_scalar(*factor)?;
                // A handle, through which the others are set to zero.
                let _same = frequencies.f_narrow(0, kept, dim / 2 - kept)?.f_zero_()?;
                (frequencies, Beyond::Same, 1.0)
            }
            RopeScaling::Dynamic { factor } => {
                let beyond = Beyond::Dynamic {
                    context,
                    factor: *factor,
                    theta,
                    dim,
                };
                (plain()?, beyond, 1.0)
            }
            RopeScaling::Yarn(yarn) => {
                let frequencies = stretched(&powers()?, dim, theta, yarn)?;
                (frequencies, Beyond::Same, yarn.attention_scale())
            }
            RopeScaling::LongRope(long) => {
                let divided = |factors: &[f64]| divided(&powers()?, factors);
                let beyond = Beyond::Long {
                    context: long.original_max_position_embeddings,
                    frequencies: to_vec(&divided(&long.long_factor)?)?,
                };
                (
                    divided(&long.short_factor)?,
                    beyond,
                    LongRope::attention_scale(long),
                )
            }
            RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max_position_embeddings,
            } => {
                let bands = Bands {
                    factor: *factor,
                    low: *low_freq_factor,
                    high: *high_freq_factor,
                    context: *original_max_position_embeddings as f64,
                };
                let frequencies = to_vec(&plain()?)?.into_iter();
                let banded: Vec<f32> = frequencies
                    .map(|frequency| bands.scaled(frequency))
                    .collect();
                (Tensor::f_from_slice(&banded)?, Beyond::Same, 1.0)
            }
        };
        Ok(Frequencies {
            short: to_vec(&short)?,
            beyond,
            scale,
        })
    }

    /// Returns frequencies of zero, which rotate nothing.
    pub(super) fn zero(dim: i64) -> Frequencies {
        Frequencies {
            short: vec![0.0; (dim / 2).unsigned_abs() as usize],
            beyond: Beyond::Same,
            scale: 1.0,
        }
    }

    /// Returns the frequencies within the original context.
    pub(super) fn short(&self) -> &[f32] {
        &self.short
    }

    /// Returns `true` if a forward pass over positions up to `len - 1` uses them.
    pub(super) fn is_short(&self, len: i64) -> bool {
        match &self.beyond {
            Beyond::Same => true,
            Beyond::Long { context, .. } | Beyond::Dynamic { context, .. } => len <= *context,
        }
    }

    /// Returns the frequencies of a forward pass over positions up to `len - 1`.
    pub(super) fn at(&self, len: i64) -> Result<Cow<'_, [f32]>> {
        match &self.beyond {
            // Borrowed: the common case must not copy the table in every forward pass.
            _ if self.is_short(len) => Ok(Cow::Borrowed(&self.short)),
            Beyond::Same => Ok(Cow::Borrowed(&self.short)),
            Beyond::Long { frequencies, .. } => Ok(Cow::Borrowed(frequencies)),
            Beyond::Dynamic {
                context,
                factor,
                theta,
                dim,
            } => {
                // transformers has the length in a tensor, so all of this is computed in fp32.
                let exponent = *dim as f64 / (*dim as f64 - 2.0);
                let base = Tensor::f_from_slice(&[len])?
                    .f_mul_scalar(*factor)?
                    .f_div_scalar(*context)?
                    .f_sub_scalar(*factor - 1.0)?
                    .f_pow_tensor_scalar(exponent)?
                    .f_mul_scalar(*theta)?;
                let powers = base.f_pow(&exponents(*dim)?)?;
                Ok(Cow::Owned(to_vec(&powers.f_reciprocal()?)?))
            }
        }
    }

    /// Returns the factor of cosines and sines.
    pub(super) fn scale(&self) -> f64 {
        self.scale
    }
}

fn to_vec(tensor: &Tensor) -> Result<Vec<f32>> {
    Ok(Vec::<f32>::try_from(tensor)?)
}

/// Returns the exponents `2i / D`.
fn exponents(dim: i64) -> Result<Tensor> {
    let even = Tensor::f_arange_start_step(0, dim, 2, (Kind::Float, Device::Cpu))?;
    Ok(even.f_div_scalar(dim)?)
}

/// Computes YaRN's frequencies: fast ones are kept, slow ones divided by the factor.
fn stretched(powers: &Tensor, dim: i64, theta: f64, yarn: &Yarn) -> Result<Tensor> {
    let context = yarn.original_max_position_embeddings as f64;
    let width = dim as f64;
    // The channel whose pair rotates this many times within the original context.
    let channel = |rotations: f64| width * (context / (rotations * TAU)).ln() / (2.0 * theta.ln());
    let (mut low, mut high) = (channel(yarn.beta_fast), channel(yarn.beta_slow));
    if yarn.truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    // transformers bounds these indices of pairs by the number of channels.
    (low, high) = (low.max(0.0), high.min(width - 1.0));
    if low == high {
        high += 0.001; // a ramp has some width
    }
    let ramp = Tensor::f_arange(dim / 2, (Kind::Float, Device::Cpu))?
        .f_sub_scalar(low)?
        .f_div_scalar(high - low)?
        .f_clamp(0.0, 1.0)?;
    let kept = one_minus(&ramp)?;
    let fast = powers.f_reciprocal()?.f_mul(&kept)?;
    let slow = powers.f_mul_scalar(yarn.factor)?.f_reciprocal()?;
    Ok(slow.f_mul(&one_minus(&kept)?)?.f_add(&fast)?)
}

fn one_minus(x: &Tensor) -> Result<Tensor> {
    Ok(x.f_ones_like()?.f_sub(x)?)
}

/// Computes LongRoPE's frequencies.
fn divided(powers: &Tensor, factors: &[f64]) -> Result<Tensor> {
    let factors = Tensor::f_from_slice(factors)?.f_to_kind(Kind::Float)?;
    Ok(factors.f_mul(powers)?.f_reciprocal()?)
}

/// The three bands of Llama 3.1's frequencies: kept, interpolated and divided.
struct Bands {
    factor: f64,
    low: f64,
    high: f64,
    context: f64,
}

impl Bands {
    fn scaled(&self, frequency: f32) -> f32 {
        // In f32 throughout, as transformers computes the bands from fp32 tensors.
        let factor = self.factor as f32;
        let wavelength = TAU as f32 / frequency;
        if wavelength > (self.context / self.low) as f32 {
            return frequency / factor;
        }
        if wavelength < (self.context / self.high) as f32 {
            return frequency;
        }
        let smooth =
            (self.context as f32 / wavelength - self.low as f32) / (self.high - self.low) as f32;
        (1.0 - smooth) * frequency / factor + smooth * frequency
    }
}
