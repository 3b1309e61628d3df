//! Adafactor's update of a factored matrix in three passes over gradient and parameter.

use std::sync::Mutex;

use overdrive_sys::threads::parallel_for;
use tch::Tensor;

use super::multiply_add;
use super::shared::{Shared, read, write};
use crate::Result;

/// Elements that are worth a thread.
const GRAIN: usize = 1 << 14;

/// The numbers of one update.
#[derive(Debug, Clone, Copy)]
pub(crate) struct FactoredUpdate {
    /// Decay of the running averages of squares in this step.
    pub(crate) beta2: f64,
    /// Added to squares.
    pub(crate) eps: f64,
    pub(crate) clip_threshold: f64,
    pub(crate) learning_rate: f64,
    pub(crate) weight_decay: f64,
    /// The least scale that a parameter counts with; `None` leaves the rate as it is.
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
    // SAFETY: a tensor of this parameter, taken once; see `shared::write`.
    let gradient: &[f32] = unsafe { read(gradient) }?;
    // SAFETY: a tensor of this parameter, taken once; see `shared::write`.
    let parameter = unsafe { write::<f32>(parameter) }?;
    // SAFETY: a tensor of this parameter, taken once; see `shared::write`.
    let rows = unsafe { write::<f32>(row_average) }?;
    // SAFETY: a tensor of this parameter, taken once; see `shared::write`.
    let columns = unsafe { write::<f32>(column_average) }?;
    let width = columns.len();
    if gradient.is_empty() {
        return Ok(());
    }
    let grain = (GRAIN / width).max(1);

    // Sums of squares by row and by column, and the parameter's.
    let merged = Mutex::new((vec![0f64; width], 0f64));
    {
        let rows = Shared::new(&mut *rows);
        let parameter = &*parameter;
        parallel_for(gradient.len() / width, grain, |range| {
            let mut sums = vec![0f32; width];
            // SAFETY: the ranges of one `parallel_for` do not overlap.
            let row_averages = unsafe { rows.range(range.clone()) };
            let elements = range.start * width..range.end * width;
            let mut squared = 0f64;
            let gradients = gradient[elements.clone()].chunks_exact(width);
            let parameters = parameter[elements].chunks_exact(width);
            let scaled = update.scale_floor.is_some();
            for ((gradient, parameter), average) in gradients.zip(parameters).zip(row_averages) {
                let sum = super::dispatch!(row_sums, row_sums_avx2, (gradient, &mut sums));
                let mean = f64::from(sum) / width as f64 + update.eps;
                *average = lerp(*average, mean, update.beta2);
                if scaled {
                    squared += f64::from(super::dispatch!(
                        sum_of_squares,
                        sum_of_squares_avx2,
                        (parameter)
                    ));
                }
            }
            let mut merged = merged.lock().unwrap_or_else(|e| e.into_inner());
            for (total, sum) in merged.0.iter_mut().zip(sums) {
                *total += f64::from(sum);
            }
            merged.1 += squared;
        });
    }
    let (sums, squared) = merged.into_inner().unwrap_or_else(|e| e.into_inner());
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
    parallel_for(row_factors.len(), grain, |range| {
        let mut sum = 0f64;
        for row in range {
            let gradient = &gradient[row * width..(row + 1) * width];
            let of_row = super::dispatch!(
                sum_of_products,
                sum_of_products_avx2,
                (gradient, &column_factors)
            );
            sum += f64::from(of_row) * f64::from(row_factors[row]).powi(2);
        }
        *total.lock().unwrap_or_else(|e| e.into_inner()) += sum;
    });
    let total = total.into_inner().unwrap_or_else(|e| e.into_inner());
    let rms = (total / gradient.len() as f64).sqrt();
    // NaN goes through, as it does in torch's clamp.
    let clip = rms / update.clip_threshold;
    let clip = if clip < 1.0 { 1.0 } else { clip };
    let scale = rate / clip;
    let decay = 1.0 - update.weight_decay * rate;

    let parameter = Shared::new(parameter);
    parallel_for(row_factors.len(), grain, |range| {
        // SAFETY: as above.
        let of_rows = unsafe { parameter.range(range.start * width..range.end * width) };
        for (row, parameter) in range.zip(of_rows.chunks_exact_mut(width)) {
            let gradient = &gradient[row * width..(row + 1) * width];
            let factor = -(scale * f64::from(row_factors[row])) as f32;
            super::dispatch!(
                apply_row,
                apply_row_avx2,
                (parameter, gradient, &column_factors, factor, decay as f32)
            );
        }
    });
    Ok(())
}

fn lerp(average: f32, value: f64, beta: f64) -> f32 {
    (f64::from(average) * beta + value * (1.0 - beta)) as f32
}

const LANES: usize = 16;

/// Sums in as many lanes as any vector unit has, which also keeps the rounding small.
#[inline(always)]
fn sum_in_lanes<const FUSED: bool>(values: &[f32], mut term: impl FnMut(usize) -> f32) -> f32 {
    let mut lanes = [0f32; LANES];
    let whole = values.len() / LANES * LANES;
    for start in (0..whole).step_by(LANES) {
        for (lane, sum) in lanes.iter_mut().enumerate() {
            let term = term(start + lane);
            *sum = multiply_add::<FUSED>(term, term, *sum);
        }
    }
    let rest: f32 = (whole..values.len()).map(|i| term(i) * term(i)).sum();
    lanes.iter().sum::<f32>() + rest
}

#[inline(always)]
fn sum_of_squares<const FUSED: bool>(values: &[f32]) -> f32 {
    sum_in_lanes::<FUSED>(values, |i| values[i])
}

#[inline(always)]
fn sum_of_products<const FUSED: bool>(values: &[f32], factors: &[f32]) -> f32 {
    let factors = &factors[..values.len()];
    sum_in_lanes::<FUSED>(values, |i| values[i] * factors[i])
}

/// Adds the squares of a row to the sums of the columns; returns their sum.
#[inline(always)]
fn row_sums<const FUSED: bool>(row: &[f32], columns: &mut [f32]) -> f32 {
    for (sum, &value) in columns.iter_mut().zip(row) {
        *sum = multiply_add::<FUSED>(value, value, *sum);
    }
    sum_of_squares::<FUSED>(row)
}

#[inline(always)]
fn apply_row<const FUSED: bool>(
    parameter: &mut [f32],
    gradient: &[f32],
    columns: &[f32],
    factor: f32,
    decay: f32,
) {
    for ((p, &g), &column) in parameter.iter_mut().zip(gradient).zip(columns) {
        *p = multiply_add::<FUSED>(g * column, factor, *p * decay);
    }
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn sum_of_squares_avx2(values: &[f32]) -> f32 {
    sum_of_squares::<true>(values)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn sum_of_products_avx2(values: &[f32], factors: &[f32]) -> f32 {
    sum_of_products::<true>(values, factors)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn row_sums_avx2(row: &[f32], columns: &mut [f32]) -> f32 {
    row_sums::<true>(row, columns)
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn apply_row_avx2(
    parameter: &mut [f32],
    gradient: &[f32],
    columns: &[f32],
    factor: f32,
    decay: f32,
) {
    apply_row::<true>(parameter, gradient, columns, factor, decay);
}
