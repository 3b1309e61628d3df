use overdrive_core::check_option;
use overdrive_kernels::threads::run_jobs;
use serde::{Deserialize, Serialize};
use tch::{Device, Kind, Tensor};

use super::grid::{Grid, floats};
use super::statistics::InputStatistics;
use crate::codec::units_of_job;
use crate::{Error, Result};

/// The number of columns whose errors go to the later ones together, by one matmul (the lazy batches of the
/// paper).
const BLOCK: i64 = 128;

/// The options of GPTQ (Frantar et al. 2022, arXiv:2210.17323): the weight is rounded column by column, and
/// columns that are not rounded yet compensate for the errors, as far as their inputs are correlated.
///
/// The scales are chosen in advance from the whole weight (the authors' static groups), so that columns can be
/// rounded in any order and the result is stored like any weight of its scheme.
///
/// The defaults are the authors' damping and the better order of columns. transformers' `GPTQConfig` has 0.1 and
/// `false`: there the order of `desc_act` is stored and slows inference down, and `act_group_aware` orders columns within
/// their groups. With static groups the order costs nothing at inference.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GptqOptions {
    /// The damping: this fraction of the mean of the second moments' diagonal is added to the diagonal; default
    /// 0.01. A small calibration set needs more.
    pub damp_percent: f64,
    /// If `true` (the default), the columns with the largest mean squares of their inputs are rounded first.
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
        let valid = self.damp_percent > 0.0 && self.damp_percent.is_finite();
        let expected = "positive; 0.01 to 0.1 is usual";
        check_option(valid, "damp_percent", self.damp_percent, expected)?;
        Ok(())
    }
}

/// Returns the codes `(O·I,)` of `grid` for `weight (O, I)`.
pub(super) fn gptq(
    grid: &Grid,
    weight: &Tensor,
    statistics: &InputStatistics,
    options: &GptqOptions,
) -> Result<Vec<u8>> {
    let moments = statistics.second_moments()?.ok_or_else(|| {
        let found = "enabled without second moments of the inputs";
        let expected = "given statistics with `Moments::Full` over a calibration set";
        Error::option("gptq", found, expected)
    })?;
    let [outputs, inputs] = weight.size()[..] else {
        return Err(Error::shape("weight", weight.size(), "(O, I)"));
    };
    let moments = moments.f_to_device(weight.device())?;
    // An input that is always 0 makes the moments singular. A 1 on the diagonal keeps its column apart from
    // the others.
    let diagonal = moments.f_diagonal(0, 0, 1)?;
    let dead = diagonal.f_le(0.0)?.f_to_kind(Kind::Float)?;
    let moments = moments.f_add(&dead.f_diag(0)?)?;
    // The columns of the largest inputs first: their errors have the most columns left to compensate them.
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
    // The columns are rounded in `order`, but their codes are stored in the order of the weight.
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
            // A view: the subtraction changes `rest`.
            let mut later = rest.f_narrow(1, start + columns, later)?;
            let _same = later.f_sub_(&errors.f_matmul(&factor)?)?;
        }
    }
    Ok(codes)
}

/// Rounds the columns `order` of all rows; `rest` is the weight `(O, B)` with the errors of earlier columns,
/// `factor` the block of the factor `(B, B)`. Returns the errors `(O, B)` that later columns compensate.
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
    // Rounding a row costs the square of the columns.
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
            for (index, &column) in order.iter().enumerate() {
                let (code, number) = grid.nearest((first + column) / grid.group, rest[index]);
                codes[column] = code;
                let factor = &factor[index * columns..][..columns];
                let error = (rest[index] - number) / factor[index];
                errors[index] = error;
                for (rest, factor) in rest[index + 1..].iter_mut().zip(&factor[index + 1..]) {
                    *rest -= error * factor;
                }
            }
        }
    });
    errors
}

/// Returns the upper Cholesky factor `U` of `moments⁻¹ = UᵀU`, with as much damping as necessary.
fn inverse_factor(moments: &Tensor, damp_percent: f64) -> Result<Tensor> {
    let mean = moments
        .f_diagonal(0, 0, 1)?
        .f_mean(Kind::Double)?
        .f_double_value(&[])?;
    let identity = Tensor::f_eye(moments.size()[0], (moments.kind(), moments.device()))?;
    let mut damp = damp_percent * mean;
    // Rounding can leave the moments of few rows slightly indefinite.
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
        // A larger damping keeps the result defined, at the price of less compensation.
        damp *= 10.0;
    }
    let found = format!("{damp_percent} (up to a thousand times as much was tried)");
    let expected = "large enough for the second moments of the inputs to be invertible; use more calibration data";
    Err(Error::option("damp_percent", found, expected))
}
