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
    /// `(len, D/2)`, fp32.
    cos: Tensor,
    /// `(len, D/2)`, fp32.
    sin: Tensor,
}

/// The rotation of one forward pass, shared by all its layers: `(T, D/2)`, or `(B, T, D/2)` where rows
/// have positions of their own; fp32, or fp64 for a model of that kind.
#[derive(Debug)]
pub(crate) struct Rotation {
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
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

    /// The rotation for the positions of `input`, for a model of `kind`.
    pub(crate) fn rotation(
        &self,
        input: &ForwardInput<'_>,
        shape: Shape,
        kind: Kind,
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
        let kind = match kind {
            Kind::Double => Kind::Double,
            _ => Kind::Float,
        };
        let select = |table: &Tensor| -> Result<Tensor> {
            let rows = match input.position_ids {
                None => table.f_narrow(0, shape.past, shape.tokens)?,
                Some(positions) => {
                    let size = positions.size();
                    let rows = table.f_index_select(0, &positions.f_reshape([-1])?)?;
                    let rows = rows.f_view([size[0], size[1], -1])?;
                    match size[0] {
                        1 => rows.f_squeeze_dim(0)?,
                        _ => rows,
                    }
                }
            };
            Ok(rows.f_to_kind(kind)?)
        };
        Ok(Rotation {
            cos: select(&tables.cos)?,
            sin: select(&tables.sin)?,
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
            cos,
            sin,
        })
    }
}

impl Rotation {
    /// Turns the heads of `x (B, T, H, D)` by libtorch's operators; the kind of `x` is kept, and the
    /// arithmetic is in that of the tables.
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let heads = |halves: [&Tensor; 2]| Tensor::f_cat(&halves, -1)?.f_unsqueeze(-2);
        let cos = heads([&self.cos, &self.cos])?;
        // The sign that goes with a roll by half a head.
        let sin = heads([&self.sin.f_neg()?, &self.sin])?;
        let wide = x.f_to_kind(cos.kind())?;
        let rolled = wide.f_roll([sin.size().last().copied().unwrap_or(0) / 2], [-1])?;
        Ok(wide
            .f_mul(&cos)?
            .f_addcmul_(&rolled, &sin)?
            .f_to_kind(x.kind())?)
    }

    pub(crate) fn share(&self) -> Rotation {
        Rotation {
            cos: self.cos.shallow_clone(),
            sin: self.sin.shallow_clone(),
        }
    }
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

    fn input_rotation(positions: Option<&Tensor>) -> Rotation {
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
            .rotation(&input, shape, Kind::Float)
            .unwrap()
    }

    #[test]
    fn a_rotation_keeps_lengths_and_depends_on_distance_only() {
        let q = Tensor::randn([1, 1, 1, 8], (Kind::Float, Device::Cpu));
        let k = Tensor::randn([1, 1, 1, 8], (Kind::Float, Device::Cpu));
        let at = |x: &Tensor, position: i64| {
            let positions = Tensor::from_slice(&[position; 5]).view([1, 5]);
            input_rotation(Some(&positions))
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
