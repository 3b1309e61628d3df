//! Rotary positions. A head of `D` channels is `D/2` pairs `(i, i + D/2)`; the pair `i` of the token
//! at position `p` is turned by the angle `p · inv_freq[i]`.

use std::cell::RefCell;

use tch::{Device, Kind, Tensor};

use crate::input::{ForwardInput, Shape};
use crate::{LlamaConfig, Result, RopeScaling};

/// The angles of a model, and the tables of their cosines and sines.
#[derive(Debug)]
pub(crate) struct Rotary {
    /// `(D/2,)`, fp32.
    inverse_frequencies: Vec<f32>,
    /// Made at the first forward pass for the length it needs, and again when a longer one comes.
    tables: RefCell<Option<Tables>>,
}

#[derive(Debug)]
struct Tables {
    len: i64,
    device: Device,
    /// `(len, D)`: `cos, cos`.
    cos: Tensor,
    /// `(len, D)`: `-sin, sin`, the sign that goes with a roll by half a head.
    sin: Tensor,
    /// `(len, D/2)`: `cos + i sin`.
    complex: Tensor,
}

/// The rotation of one forward pass, shared by all its layers.
#[derive(Debug)]
pub(crate) enum Rotation {
    /// For heads as they are: `x · cos + roll(x, D/2) · sin`. `(1 or B, T, 1, D)`.
    Halves { cos: Tensor, sin: Tensor },
    /// For heads whose halves are interleaved: a product of complex numbers. `(1 or B, T, 1, D/2)`.
    Complex(Tensor),
}

impl Rotary {
    pub(crate) fn new(config: &LlamaConfig) -> Result<Rotary> {
        let dim = config.head_dim();
        // With libtorch's own `pow` and in transformers' order of operations: at position 100,000 a
        // last bit of an inverse frequency is 0.006 rad.
        let exponents = Tensor::f_arange_start_step(0, dim, 2, (Kind::Float, Device::Cpu))?
            .f_div_scalar(dim)?;
        let powers = Tensor::f_pow_scalar(config.rope_theta, &exponents)?;
        let mut frequencies = Vec::<f32>::try_from(powers.f_reciprocal()?)?;
        frequencies.iter_mut().for_each(|frequency| {
            *frequency = scaled(*frequency, &config.rope_scaling);
        });
        Ok(Rotary {
            inverse_frequencies: frequencies,
            tables: RefCell::new(None),
        })
    }

    /// The rotation for the positions of `input`, in `kind`.
    pub(crate) fn rotation(
        &self,
        input: &ForwardInput<'_>,
        shape: Shape,
        kind: Kind,
        complex: bool,
    ) -> Result<Rotation> {
        let device = input.input_ids.device();
        let needed = match input.position_ids {
            None => shape.past + shape.tokens,
            Some(positions) => i64::try_from(positions.f_max()?)? + 1,
        };
        let mut tables = self.tables.borrow_mut();
        let fits = tables
            .as_ref()
            .is_some_and(|t| t.len >= needed && t.device == device);
        if !fits {
            // In powers of two, so that a growing sequence makes few tables.
            let len = needed.max(64).unsigned_abs().next_power_of_two() as i64;
            *tables = Some(Tables::new(&self.inverse_frequencies, len, device)?);
        }
        let Some(tables) = tables.as_ref() else {
            unreachable!("filled above")
        };
        let select = |table: &Tensor| -> Result<Tensor> {
            let rows = match input.position_ids {
                None => table
                    .f_narrow(0, shape.past, shape.tokens)?
                    .f_unsqueeze(0)?,
                Some(positions) => {
                    let size = positions.size();
                    let rows = table.f_index_select(0, &positions.f_reshape([-1])?)?;
                    rows.f_view([size[0], size[1], -1])?
                }
            };
            Ok(rows.f_unsqueeze(2)?)
        };
        if complex {
            return Ok(Rotation::Complex(select(&tables.complex)?));
        }
        Ok(Rotation::Halves {
            cos: select(&tables.cos)?.f_to_kind(kind)?,
            sin: select(&tables.sin)?.f_to_kind(kind)?,
        })
    }
}

impl Tables {
    fn new(inverse_frequencies: &[f32], len: i64, device: Device) -> Result<Tables> {
        let half = inverse_frequencies.len() as i64;
        let positions = Tensor::f_arange(len, (Kind::Float, device))?;
        let frequencies = Tensor::f_from_slice(inverse_frequencies)?.f_to_device(device)?;
        let angles = positions
            .f_view([len, 1])?
            .f_mul(&frequencies.f_view([1, half])?)?;
        let (cos, sin) = (angles.f_cos()?, angles.f_sin()?);
        Ok(Tables {
            len,
            device,
            complex: Tensor::f_complex(&cos, &sin)?,
            cos: Tensor::f_cat(&[&cos, &cos], 1)?,
            sin: Tensor::f_cat(&[&sin.f_neg()?, &sin], 1)?,
        })
    }
}

impl Rotation {
    /// Turns the heads of `x (B, T, H, D)`; the kind of `x` is kept, and the arithmetic is in the
    /// kind of the tables (under autocast: fp32 for a low-precision `x`).
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        match self {
            Rotation::Halves { cos, sin } => {
                let wide = x.f_to_kind(cos.kind())?;
                let half = sin.size()[3] / 2;
                let rolled = wide.f_roll([half], [-1])?;
                Ok(wide
                    .f_mul(cos)?
                    .f_addcmul_(&rolled, sin)?
                    .f_to_kind(x.kind())?)
            }
            Rotation::Complex(turn) => {
                let wide = match x.kind() {
                    Kind::Float | Kind::Double => x.shallow_clone(),
                    _ => x.f_to_kind(Kind::Float)?,
                };
                let half = turn.size()[3];
                let pairs = wide.f_unflatten(-1, [half, 2])?.f_view_as_complex()?;
                let turned = pairs.f_mul(turn)?.f_view_as_real()?.f_flatten(-2, -1)?;
                Ok(turned.f_to_kind(x.kind())?)
            }
        }
    }

    /// Whether heads must be interleaved for [`Rotation::apply`].
    pub(crate) fn is_interleaved(&self) -> bool {
        matches!(self, Rotation::Complex(_))
    }
}

/// Reorders the leading dimension of `weight (heads · D, …)` so that channel `i + D/2` of each head
/// follows channel `i`.
pub(crate) fn interleave_heads(weight: &Tensor, head_dim: i64) -> Result<Tensor> {
    let size = weight.size();
    Ok(weight
        .f_unflatten(0, [-1, 2, head_dim / 2])?
        .f_transpose(1, 2)?
        .f_reshape(size.as_slice())?)
}

/// `inverse_frequency` after the scaling, each step rounded to fp32 as transformers rounds it.
fn scaled(inverse_frequency: f32, scaling: &RopeScaling) -> f32 {
    match *scaling {
        RopeScaling::Default => inverse_frequency,
        RopeScaling::Linear { factor } => inverse_frequency / factor as f32,
        RopeScaling::Llama3 {
            factor,
            low_freq_factor,
            high_freq_factor,
            original_max_position_embeddings,
        } => {
            let context = original_max_position_embeddings as f64;
            let wavelength = std::f64::consts::TAU as f32 / inverse_frequency;
            if wavelength > (context / low_freq_factor) as f32 {
                return inverse_frequency / factor as f32;
            }
            if wavelength < (context / high_freq_factor) as f32 {
                return inverse_frequency;
            }
            let smooth = (context as f32 / wavelength - low_freq_factor as f32)
                / (high_freq_factor - low_freq_factor) as f32;
            (1.0 - smooth) * inverse_frequency / factor as f32 + smooth * inverse_frequency
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Tensor;

    fn input_rotation(complex: bool, positions: Option<&Tensor>) -> Rotation {
        let config = LlamaConfig {
            hidden_size: 16,
            num_attention_heads: 2,
            ..LlamaConfig::default()
        };
        let ids = Tensor::zeros([1, 5], (Kind::Int64, Device::Cpu));
        let input = ForwardInput {
            position_ids: positions,
            ..ForwardInput::new(&ids)
        };
        let shape = input.shape().unwrap();
        Rotary::new(&config)
            .unwrap()
            .rotation(&input, shape, Kind::Float, complex)
            .unwrap()
    }

    #[test]
    fn the_complex_form_equals_the_form_in_halves() {
        let x = Tensor::randn([1, 5, 2, 8], (Kind::Float, Device::Cpu));
        let halves = input_rotation(false, None).apply(&x).unwrap();
        let interleaved = x
            .unflatten(3, [2i64, 4])
            .transpose(3, 4)
            .reshape([1, 5, 2, 8]);
        let complex = input_rotation(true, None).apply(&interleaved).unwrap();
        let complex = complex
            .unflatten(3, [4i64, 2])
            .transpose(3, 4)
            .reshape([1, 5, 2, 8]);
        assert!((halves - complex).abs().max().double_value(&[]) < 1e-6);
    }

    #[test]
    fn a_rotation_keeps_lengths_and_depends_on_distance_only() {
        let q = Tensor::randn([1, 1, 1, 8], (Kind::Float, Device::Cpu));
        let k = Tensor::randn([1, 1, 1, 8], (Kind::Float, Device::Cpu));
        let at = |x: &Tensor, position: i64| {
            let positions = Tensor::from_slice(&[position; 5]).view([1, 5]);
            input_rotation(false, Some(&positions))
                .apply(&x.expand([1, 5, 1, 8], false))
                .unwrap()
        };
        let dot = |i, j| {
            (at(&q, i) * at(&k, j))
                .select(1, 0)
                .sum(Kind::Float)
                .double_value(&[])
        };
        assert!((dot(7, 3) - dot(104, 100)).abs() < 1e-4);
        let length = at(&q, 50).select(1, 0).norm().double_value(&[]);
        assert!((length - q.norm().double_value(&[])).abs() < 1e-5);
    }
}
