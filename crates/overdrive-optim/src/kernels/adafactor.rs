//! Adafactor's update of a factored matrix in three passes over gradient and parameter.

use std::sync::{Mutex, PoisonError};

use overdrive_kernels::threads::{chunk_len, run_jobs};
use overdrive_kernels::{InstructionSet, LANES, Simd, vectorized};
use tch::Tensor;

use super::elements::{read, write};
use crate::Result;

/// The number of elements that are worth a thread.
const GRAIN: usize = 1 << 14;

/// The coefficients of one update.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FactoredUpdate {
    /// The decay of the running averages of squares in this step.
    pub(crate) beta2: f64,
    /// The addend of squares.
    pub(crate) eps: f64,
    pub(crate) clip_threshold: f64,
    pub(crate) learning_rate: f64,
    pub(crate) weight_decay: f64,
    /// The least scale (root mean square) of a parameter that the rate is multiplied by; `None` leaves the rate as
    /// it is.
    pub(crate) scale_floor: Option<f64>,
}

/// Updates a contiguous float32 matrix on the CPU and the averages of its rows and columns.
pub(crate) fn adafactor_step(
    update: &FactoredUpdate,
    parameter: &Tensor,
    gradient: &Tensor,
    row_average: &Tensor,
    column_average: &Tensor,
) -> Result<()> {
    // SAFETY: the tensors of one parameter, each taken once; see `elements::write`.
    let (gradient, parameter, rows, columns): (&[f32], &mut [f32], &mut [f32], &mut [f32]) = unsafe {
        (
            read(gradient)?,
            write(parameter)?,
            write(row_average)?,
            write(column_average)?,
        )
    };
    let width = columns.len();
    if gradient.is_empty() {
        return Ok(());
    }
    let set = InstructionSet::best();
    // Whole rows for each thread.
    let chunk = chunk_len(rows.len(), (GRAIN / width).max(1));
    let gradients = || gradient.chunks(chunk * width);

    // The sums of squares by row and by column, and the parameter's.
    let merged = Mutex::new((vec![0f64; width], 0f64));
    let jobs = gradients().zip(parameter.chunks(chunk * width));
    run_jobs(
        jobs.zip(rows.chunks_mut(chunk)),
        |((gradient, parameter), row_averages)| {
            let mut sums = vec![0f32; width];
            let mut squared = 0f64;
            let gradients = gradient
                .chunks_exact(width)
                .zip(parameter.chunks_exact(width));
            for ((gradient, parameter), average) in gradients.zip(row_averages) {
                let sum = row_sums(set, gradient, &mut sums);
                let mean = f64::from(sum) / width as f64 + update.eps;
                *average = lerp(*average, mean, update.beta2);
                if update.scale_floor.is_some() {
                    squared += f64::from(sum_of_squares(set, parameter));
                }
            }
            let mut merged = merged.lock().unwrap_or_else(PoisonError::into_inner);
            for (total, sum) in merged.0.iter_mut().zip(sums) {
                *total += f64::from(sum);
            }
            merged.1 += squared;
        },
    );
    let (sums, squared) = merged.into_inner().unwrap_or_else(PoisonError::into_inner);
    for (average, sum) in columns.iter_mut().zip(sums) {
        let mean = sum / rows.len() as f64 + update.eps;
        *average = lerp(*average, mean, update.beta2);
    }
    let rate = update.scale_floor.map_or(update.learning_rate, |floor| {
        update.learning_rate * (squared / gradient.len() as f64).sqrt().max(floor)
    });

    // The update is gradient · row factor · column factor.
    let mean = rows.iter().map(|&r| f64::from(r)).sum::<f64>() / rows.len() as f64;
    let row_factors: Vec<f32> = rows
        .iter()
        .map(|&row| (f64::from(row) / mean).powf(-0.5) as f32)
        .collect();
    let column_factors: Vec<f32> = columns.iter().map(|column| 1.0 / column.sqrt()).collect();
    let total = Mutex::new(0f64);
    run_jobs(
        gradients().zip(row_factors.chunks(chunk)),
        |(gradient, row_factors)| {
            let mut sum = 0f64;
            for (gradient, factor) in gradient.chunks_exact(width).zip(row_factors) {
                let of_row = sum_of_products(set, gradient, &column_factors);
                sum += f64::from(of_row) * f64::from(*factor).powi(2);
            }
            *total.lock().unwrap_or_else(PoisonError::into_inner) += sum;
        },
    );
    let total = total.into_inner().unwrap_or_else(PoisonError::into_inner);
    let rms = (total / gradient.len() as f64).sqrt();
    // NaN goes through, as it does in torch's clamp.
    let clip = rms / update.clip_threshold;
    let clip = if clip < 1.0 { 1.0 } else { clip };
    let scale = rate / clip;
    let decay = (1.0 - update.weight_decay * rate) as f32;

    let jobs = gradients().zip(row_factors.chunks(chunk));
    let jobs = jobs.zip(parameter.chunks_mut(chunk * width));
    run_jobs(jobs, |((gradient, row_factors), parameter)| {
        let gradients = gradient.chunks_exact(width).zip(row_factors);
        for ((gradient, row_factor), parameter) in gradients.zip(parameter.chunks_exact_mut(width))
        {
            let factor = -(scale * f64::from(*row_factor)) as f32;
            apply_row(set, parameter, gradient, &column_factors, factor, decay);
        }
    });
    Ok(())
}

fn lerp(average: f32, value: f64, beta: f64) -> f32 {
    (f64::from(average) * beta + value * (1.0 - beta)) as f32
}

/// Sums squares in as many lanes as any vector unit has, which also keeps the rounding small.
#[inline(always)]
fn sum_in_lanes<S: Simd>(s: S, len: usize, mut term: impl FnMut(usize) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let whole = len / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            let term = term(start + lane);
            *sum = s.mul_add_scalar(term, term, *sum);
        }
    }
    let rest: f32 = (whole..len).map(|i| term(i) * term(i)).sum();
    lanes.iter().sum::<f32>() + rest
}

vectorized! {
    fn sum_of_squares<S: Simd>(s: S, values: &[f32]) -> f32 {
        sum_in_lanes(s, values.len(), |i| values[i])
    }
}

vectorized! {
    /// Returns the sum of the squares of the products.
    fn sum_of_products<S: Simd>(s: S, values: &[f32], factors: &[f32]) -> f32 {
        let factors = &factors[..values.len()];
        sum_in_lanes(s, values.len(), |i| values[i] * factors[i])
    }
}

vectorized! {
    /// Adds the squares of a row to the sums of the columns; returns their sum.
    fn row_sums<S: Simd>(s: S, row: &[f32], columns: &mut [f32]) -> f32 {
        for (sum, &value) in columns.iter_mut().zip(row) {
            *sum = s.mul_add_scalar(value, value, *sum);
        }
        sum_in_lanes(s, row.len(), |i| row[i])
    }
}

vectorized! {
    fn apply_row<S: Simd>(
        s: S,
        parameter: &mut [f32],
        gradient: &[f32],
        columns: &[f32],
        factor: f32,
        decay: f32,
    ) {
        for ((p, &g), &column) in parameter.iter_mut().zip(gradient).zip(columns) {
            *p = s.mul_add_scalar(g * column, factor, *p * decay);
        }
    }
}
