//! Rotary position embeddings. The `D` rotated channels of a head, which are all of them except in Phi and GLM-4, are
//! `D/2` pairs `(i, i + D/2)`, or neighbours `(2i, 2i + 1)` in GLM-4; the pair `i` of the token at position `p` is
//! rotated by the angle `p · inv_freq[i]`.

mod frequencies;

use std::cell::RefCell;

use overdrive_fused::Convention;
use tch::{Device, Kind, Tensor};

use crate::input::{ForwardInput, Shape};
use crate::{Result, RopeScaling};
use frequencies::Frequencies;

/// The largest number of positions in the tables for a forward pass without a bound on its positions; rows beyond it
/// are computed when needed. With 64 frequencies, the tables take 16 MiB.
const MOST_POSITIONS: i64 = 1 << 15;

/// The frequencies of a model, and the tables of their cosines and sines.
#[derive(Debug)]
pub(crate) struct Rotary {
    frequencies: Frequencies,
    /// The tables. The first forward pass makes them for the length that it needs; a longer pass adds longer ones.
    /// Tables are freed only with the model, because captured CUDA graphs hold their addresses.
    tables: RefCell<Vec<Tables>>,
    /// The channels that form a pair.
    convention: Convention,
    /// The factor of queries.
    query_scaling: Option<QueryScaling>,
    /// The axis of the position that each frequency belongs to, if a token has three positions.
    axes: Option<Vec<i64>>,
}

/// The factor `1 + beta · ln(1 + floor(p / original))` of the query at position `p`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct QueryScaling {
    pub(crate) beta: f64,
    pub(crate) original: i64,
}

#[derive(Debug)]
struct Tables {
    len: i64,
    device: Device,
    /// The cosines `(len, D/2)`, fp32.
    cos: Tensor,
    /// The sines `(len, D/2)`, fp32.
    sin: Tensor,
    /// The factors of queries `(len, 1)`, fp32, if there are any.
    query_scale: Option<Tensor>,
}

/// The rotation of one forward pass, which all its layers share: `(T, D/2)`, or `(B, T, D/2)` if rows have
/// their own positions; fp32, or fp64 for a model in fp64.
#[derive(Debug)]
pub(crate) struct Rotation {
    pub(crate) cos: Tensor,
    pub(crate) sin: Tensor,
    /// The channels that form a pair.
    pub(crate) convention: Convention,
    /// The factors of the rotated queries, `(T, 1)` or `(B, T, 1)`.
    pub(crate) query_scale: Option<Tensor>,
}

impl Rotary {
    /// Makes the rotary positions of heads of `dim` channels with the base `theta`, in a model with a context
    /// of `context`.
    pub(crate) fn new(dim: i64, theta: f64, scaling: &RopeScaling, context: i64) -> Result<Rotary> {
        Ok(Rotary {
            frequencies: Frequencies::new(dim, theta, scaling, context)?,
            tables: RefCell::default(),
            convention: Convention::default(),
            query_scaling: None,
            axes: None,
        })
    }

    /// Makes the positions of layers without rotary embedding: all cosines are 1 and all sines 0, so that a rotation
    /// returns its input exactly.
    pub(crate) fn identity(dim: i64) -> Rotary {
        Rotary {
            frequencies: Frequencies::zero(dim),
            tables: RefCell::default(),
            convention: Convention::default(),
            query_scaling: None,
            axes: None,
        }
    }

    /// Sets the factor of queries.
    pub(crate) fn with_query_scaling(self, query_scaling: Option<QueryScaling>) -> Rotary {
        Rotary {
            query_scaling,
            ..self
        }
    }

    /// Sets the numbers of frequencies of time, row and column. Frequencies of the three take turns, until those of rows or
    /// columns are used up (Qwen3-VL).
    pub(crate) fn with_sections(self, sections: Option<[i64; 3]>) -> Rotary {
        let channels = self.frequencies.short().len() as i64;
        let axes = sections.map(|sections| {
            let axis = |channel: i64| match channel % 3 {
                1 if channel < 3 * sections[1] => 1,
                2 if channel < 3 * sections[2] => 2,
                _ => 0,
            };
            (0..channels).map(axis).collect()
        });
        Rotary { axes, ..self }
    }

    /// Sets the channels that form a pair.
    pub(crate) fn with_convention(self, convention: Convention) -> Rotary {
        Rotary { convention, ..self }
    }

    /// Returns the frequencies within the original context, `(D/2,)`.
    pub(crate) fn inverse_frequencies(&self) -> &[f32] {
        self.frequencies.short()
    }

    /// Returns the rotation for the positions of `input`, in a model of dtype `kind`.
    pub(crate) fn rotation(
        &self,
        input: &ForwardInput<'_>,
        shape: Shape,
        kind: Kind,
    ) -> Result<Rotation> {
        let device = input.input_ids.device();
        let needed = shape.end;
        // Cosines in 16 bits would be too coarse at large positions.
        let kind = match kind {
            Kind::Double => Kind::Double,
            _ => Kind::Float,
        };
        // Computing rows copies the frequencies to the device, which a captured step cannot do. A caller that states a
        // bound runs many steps, so long tables pay off.
        let too_long = needed > MOST_POSITIONS && input.position_bound.is_none();
        // Frequencies beyond the original context may depend on the length, so tables of them would not be reused.
        if too_long || !self.frequencies.is_short(needed) {
            return self.computed(input, shape, needed, kind);
        }
        // tch's tensors are `Send` but not `Sync`, so only one thread at a time gets here.
        let mut tables = self.tables.borrow_mut();
        let fits = |t: &Tables| t.len >= needed && t.device == device;
        let index = match tables.iter().position(fits) {
            Some(index) => index,
            None => {
                // A power of two, so that a growing sequence makes few tables.
                let len = needed.max(64).unsigned_abs().next_power_of_two() as i64;
                let positions = Tensor::f_arange(len, (Kind::Float, device))?;
                let (cos, sin) = self.cos_sin(&positions, self.frequencies.short())?;
                tables.push(Tables {
                    len,
                    device,
                    cos,
                    sin,
                    query_scale: self.query_scale(&positions, len)?,
                });
                tables.len() - 1
            }
        };
        let tables = &tables[index];
        let select = |table: &Tensor| -> Result<Tensor> {
            let rows = match input.position_ids {
                None => table.f_narrow(0, shape.past, shape.tokens)?,
                Some(positions) => {
                    let rows = table.f_index_select(0, &positions.f_reshape([-1])?)?;
                    self.of_rows(&rows, positions)?
                }
            };
            Ok(rows.f_to_kind(kind)?)
        };
        Ok(Rotation {
            cos: select(&tables.cos)?,
            sin: select(&tables.sin)?,
            convention: self.convention,
            query_scale: tables.query_scale.as_ref().map(select).transpose()?,
        })
    }

    /// Computes the rotation without tables, the largest position being `needed - 1`.
    fn computed(
        &self,
        input: &ForwardInput<'_>,
        shape: Shape,
        needed: i64,
        kind: Kind,
    ) -> Result<Rotation> {
        let device = input.input_ids.device();
        let positions = match input.position_ids {
            None => {
                let (from, to) = (shape.past, shape.past + shape.tokens);
                Tensor::f_arange_start(from, to, (Kind::Float, device))?
            }
            Some(positions) => positions.f_reshape([-1])?.f_to_kind(Kind::Float)?,
        };
        let frequencies = self.frequencies.at(needed)?;
        let (cos, sin) = self.cos_sin(&positions, &frequencies)?;
        let query_scale = self.query_scale(&positions, needed)?;
        let shaped = |rows: Tensor| -> Result<Tensor> {
            let rows = match input.position_ids {
                None => rows,
                Some(positions) => self.of_rows(&rows, positions)?,
            };
            Ok(rows.f_to_kind(kind)?)
        };
        Ok(Rotation {
            cos: shaped(cos)?,
            sin: shaped(sin)?,
            convention: self.convention,
            query_scale: query_scale.map(shaped).transpose()?,
        })
    }

    /// Views `rows (B·T, D/2)` as `(B, T, D/2)`, or as `(T, D/2)` if all rows of the batch share positions. Of the three
    /// `rows` of a token with three positions, each frequency takes that of its axis.
    fn of_rows(&self, rows: &Tensor, positions: &Tensor) -> Result<Tensor> {
        let mut size = positions.size();
        size.push(-1);
        let mut rows = rows.f_view(size.as_slice())?;
        if let (Some(axes), 4) = (&self.axes, rows.dim()) {
            let axes = Tensor::f_from_slice(axes)?.f_to_device(rows.device())?;
            let mut one = rows.size();
            one[0] = 1;
            let axes = axes.f_expand(one.as_slice(), false)?;
            rows = rows.f_gather(0, &axes, false)?.f_squeeze_dim(0)?;
        }
        Ok(match rows.size()[0] {
            1 => rows.f_squeeze_dim(0)?,
            _ => rows,
        })
    }

    /// Computes the factors of queries at `positions (N,)`, all below `end`, as `(N, 1)`; `None` if all are 1.
    fn query_scale(&self, positions: &Tensor, end: i64) -> Result<Option<Tensor>> {
        let Some(scaling) = self.query_scaling.filter(|scaling| end > scaling.original) else {
            return Ok(None);
        };
        let passed = positions.f_div_scalar(scaling.original)?.f_floor()?;
        let growth = passed.f_log1p()?.f_mul_scalar(scaling.beta)?;
        Ok(Some(growth.f_add_scalar(1.0)?.f_unsqueeze(1)?))
    }

    /// Computes the cosines and sines of `positions (N,)`, each `(N, D/2)`.
    fn cos_sin(&self, positions: &Tensor, frequencies: &[f32]) -> Result<(Tensor, Tensor)> {
        let frequencies = Tensor::f_from_slice(frequencies)?.f_to_device(positions.device())?;
        let angles = positions
            .f_unsqueeze(1)?
            .f_mul(&frequencies.f_unsqueeze(0)?)?;
        let (cos, sin) = (angles.f_cos()?, angles.f_sin()?);
        Ok(match self.frequencies.scale() {
            1.0 => (cos, sin),
            scale => (cos.f_mul_scalar(scale)?, sin.f_mul_scalar(scale)?),
        })
    }
}

impl Rotation {
    /// Rotates the heads of `x (B, T, H, D)` by libtorch's operators, or their first channels if the tables are
    /// of fewer. The result has the dtype of `x`; the arithmetic is in that of the tables.
    pub(crate) fn apply(&self, x: &Tensor) -> Result<Tensor> {
        let width = |tensor: &Tensor| tensor.size().last().copied().unwrap_or(0);
        let (channels, rotated) = (width(x), 2 * width(&self.cos));
        if rotated < channels {
            let first = self.apply(&x.f_narrow(-1, 0, rotated)?)?;
            let rest = x.f_narrow(-1, rotated, channels - rotated)?;
            return Ok(Tensor::f_cat(&[first, rest], -1)?);
        }
        if self.convention == Convention::Interleaved {
            return self.apply_to_neighbours(x);
        }
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

    /// Rotates the pairs of neighbouring channels of `x (B, T, H, D)`.
    fn apply_to_neighbours(&self, x: &Tensor) -> Result<Tensor> {
        let (cos, sin) = (self.cos.f_unsqueeze(-2)?, self.sin.f_unsqueeze(-2)?);
        let pairs = x.f_to_kind(cos.kind())?.f_unflatten(-1, [-1, 2])?;
        let (first, second) = (pairs.f_select(-1, 0)?, pairs.f_select(-1, 1)?);
        let rotated = [
            first.f_mul(&cos)?.f_sub(&second.f_mul(&sin)?)?,
            second.f_mul(&cos)?.f_add(&first.f_mul(&sin)?)?,
        ];
        let rotated = Tensor::f_stack(&rotated, -1)?.f_flatten(-2, -1)?;
        Ok(rotated.f_to_kind(x.kind())?)
    }

    /// Multiplies the rotated queries `(B, H, T, D)` by their factors, if there are any.
    pub(crate) fn scale_queries(&self, query: Tensor) -> Result<Tensor> {
        let Some(scale) = &self.query_scale else {
            return Ok(query);
        };
        let scale = match scale.dim() {
            3 => scale.f_unsqueeze(1)?,
            _ => scale.shallow_clone(),
        };
        Ok(query.f_mul(&scale.f_to_kind(query.kind())?)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use tch::Tensor;

    fn input_rotation(positions: Option<&Tensor>) -> Rotation {
        let ids = Tensor::zeros([1, 5], (Kind::Int64, Device::Cpu));
        let input = ForwardInput {
            position_ids: positions,
            ..ForwardInput::new(&ids)
        };
        let shape = input.shape().unwrap();
        Rotary::new(8, 1e4, &RopeScaling::Default, 2048)
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
