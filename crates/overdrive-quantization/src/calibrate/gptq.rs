use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::grid::Grid;
use super::statistics::InputStatistics;
use crate::codec::jobs::{run_jobs, units_of_job};
use crate::{Error, Result};

/// Columns whose errors are taken to the later ones together, by one product.
const BLOCK: i64 = 128;

/// GPTQ (Frantar et al. 2022, arXiv:2210.17323): weights are rounded column by column, and the error of
/// each is made good by the columns that are not rounded yet, as far as their inputs go together.
///
/// Scales are chosen before, from the whole weight (what GPTQ's authors call static groups), so that
/// columns may be rounded in any order and the result is stored as any weight of its scheme.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GptqOptions {
    /// What is added to the second moments' diagonal, as a part of its mean; default 0.01. More where
    /// the calibration set is small.
    pub damp_percent: f64,
    /// Whether columns are rounded in the falling order of their inputs' squares; default true.
    pub desc_act: bool,
}

impl Default for GptqOptions {
    fn default() -> Self {
        GptqOptions {
            damp_percent: 0.01,
            desc_act: true,
        }
    }
}

impl GptqOptions {
    pub(super) fn validate(&self) -> Result<()> {
        if self.damp_percent > 0.0 && self.damp_percent.is_finite() {
            return Ok(());
        }
        Err(Error::BadOption {
            option: "damp_percent",
            found: self.damp_percent.to_string(),
            expected: "above 0; 0.01 to 0.1 is usual".to_owned(),
        })
    }
}

/// The codes `(O·I,)` for `weight (O, I)` among the numbers of `grid`.
pub(super) fn gptq(
    grid: &Grid,
    weight: &Tensor,
    statistics: &InputStatistics,
    options: &GptqOptions,
) -> Result<Vec<u8>> {
    let moments = statistics
        .second_moments()?
        .ok_or_else(|| Error::BadOption {
            option: "gptq",
            found: "without second moments of the inputs".to_owned(),
            expected: "statistics with `Moments::Full` over a calibration set".to_owned(),
        })?;
    let [outputs, inputs] = weight.size()[..] else {
        return Err(Error::BadInput {
            name: "weight",
            found: format!("of shape {:?}", weight.size()),
            expected: "(O, I)".to_owned(),
        });
    };
    let moments = moments.f_to_device(weight.device())?;
    // An input that is always 0: its weight means nothing, and is rounded by itself.
    let diagonal = moments.f_diagonal(0, 0, 1)?;
    let dead = diagonal.f_le(0.0)?.f_to_kind(Kind::Float)?;
    let moments = moments.f_add(&dead.f_diag(0)?)?;
    let order = match options.desc_act {
        true => diagonal.f_argsort(0, true)?,
        false => Tensor::f_arange(inputs, (Kind::Int64, weight.device()))?,
    };
    let moments = moments
        .f_index_select(0, &order)?
        .f_index_select(1, &order)?;
    let upper = inverse_factor(&moments, options.damp_percent)?;
    let rest = weight.f_to_kind(Kind::Float)?.f_index_select(1, &order)?;
    let order: Vec<i64> = Vec::try_from(&order.f_to_device(Device::Cpu)?)?;
    let order: Vec<usize> = order.iter().map(|&i| i.unsigned_abs() as usize).collect();
    let width = order.len();
    let mut codes = vec![0u8; rest.numel()];
    for start in (0..inputs).step_by(BLOCK as usize) {
        let columns = BLOCK.min(inputs - start);
        let own = floats(&rest.f_narrow(1, start, columns)?)?;
        let factor = floats(
            &upper
                .f_narrow(0, start, columns)?
                .f_narrow(1, start, columns)?,
        )?;
        let order = &order[start.unsigned_abs() as usize..][..columns.unsigned_abs() as usize];
        let errors = round_block(grid, own, &factor, order, &mut codes, width);
        let later = inputs - start - columns;
        if later > 0 {
            let errors = Tensor::f_from_slice(&errors)?.f_view([outputs, columns])?;
            let errors = errors.f_to_device(weight.device())?;
            let factor = upper.f_narrow(0, start, columns)?;
            let factor = factor.f_narrow(1, start + columns, later)?;
            let mut later = rest.f_narrow(1, start + columns, later)?;
            let _same = later.f_sub_(&errors.f_matmul(&factor)?)?;
        }
    }
    Ok(codes)
}

/// Rounds the columns `order` of all rows, of which `rest` is what is left of the weight `(O, B)` and
/// `factor` their part of the factor `(B, B)`. Gives the errors `(O, B)` that later columns make good.
fn round_block(
    grid: &Grid,
    mut rest: Vec<f32>,
    factor: &[f32],
    order: &[usize],
    codes: &mut [u8],
    width: usize,
) -> Vec<f32> {
    let columns = order.len();
    let mut errors = vec![0f32; rest.len()];
    let rows = units_of_job(columns * columns);
    let jobs = rest
        .chunks_mut(rows * columns)
        .zip(errors.chunks_mut(rows * columns))
        .zip(codes.chunks_mut(rows * width))
        .enumerate();
    run_jobs(jobs, |(job, ((rest, errors), codes))| {
        let each = rest
            .chunks_exact_mut(columns)
            .zip(errors.chunks_exact_mut(columns))
            .zip(codes.chunks_exact_mut(width));
        for (row, ((rest, errors), codes)) in each.enumerate() {
            let first = (job * rows + row) * width;
            for (place, &column) in order.iter().enumerate() {
                let (code, number) = grid.nearest((first + column) / grid.group, rest[place]);
                codes[column] = code;
                let factor = &factor[place * columns..][..columns];
                let error = (rest[place] - number) / factor[place];
                errors[place] = error;
                for (rest, factor) in rest[place + 1..].iter_mut().zip(&factor[place + 1..]) {
                    *rest -= error * factor;
                }
            }
        }
    });
    errors
}

/// The upper factor `U` of `moments⁻¹ = UᵀU`, with as much on the diagonal as it takes.
fn inverse_factor(moments: &Tensor, damp_percent: f64) -> Result<Tensor> {
    let mean = moments
        .f_diagonal(0, 0, 1)?
        .f_mean(Kind::Double)?
        .f_double_value(&[])?;
    let identity = Tensor::f_eye(moments.size()[0], (moments.kind(), moments.device()))?;
    let mut damp = damp_percent * mean;
    // Rounding may leave moments of few rows a little indefinite.
    for _ in 0..4 {
        let damped = moments.f_add(&identity.f_mul_scalar(damp)?)?;
        let (lower, failed) = damped.f_linalg_cholesky_ex(false, false)?;
        if failed.f_int64_value(&[])? == 0 {
            let inverse = lower.f_cholesky_inverse(false)?;
            let (upper, failed) = inverse.f_linalg_cholesky_ex(true, false)?;
            if failed.f_int64_value(&[])? == 0 {
                return Ok(upper);
            }
        }
        damp *= 10.0;
    }
    Err(Error::BadOption {
        option: "damp_percent",
        found: format!("{damp_percent}, and up to a thousand times that"),
        expected: "so much that the inputs' second moments have an inverse; give more text"
            .to_owned(),
    })
}

fn floats(tensor: &Tensor) -> Result<Vec<f32>> {
    let flat = tensor.f_to_device(Device::Cpu)?.f_reshape([-1])?;
    Ok(Vec::try_from(&flat)?)
}
