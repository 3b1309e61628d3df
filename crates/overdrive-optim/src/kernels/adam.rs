//! The arithmetic of one Adam update on float32 slices.

use super::multiply_add;

/// The numbers of one update, ready for the loop.
#[derive(Debug, Clone, Copy)]
pub(crate) struct AdamNumbers {
    /// Counted from 1.
    pub(crate) step: f64,
    pub(crate) learning_rate: f64,
    pub(crate) weight_decay: f64,
    pub(crate) maximize: bool,
    pub(crate) betas: (f64, f64),
    pub(crate) eps: f64,
    /// What the parameter is multiplied by: 1 - learning rate · weight decay.
    pub(crate) decay: f64,
    /// Learning rate by the bias correction of the average.
    pub(crate) step_size: f64,
    /// Root of the bias correction of the squares.
    pub(crate) correction2: f64,
}

impl AdamNumbers {
    /// The numbers of step `step`, counted from 1.
    pub(crate) fn new(
        step: f64,
        learning_rate: f64,
        weight_decay: f64,
        betas: (f64, f64),
        eps: f64,
        maximize: bool,
    ) -> Self {
        Self {
            step,
            learning_rate,
            weight_decay,
            maximize,
            betas,
            eps,
            decay: 1.0 - learning_rate * weight_decay,
            step_size: learning_rate / (1.0 - betas.0.powf(step)),
            correction2: (1.0 - betas.1.powf(step)).sqrt(),
        }
    }
}

/// One update. All slices have the same length.
#[inline(always)]
pub(super) fn update<const FUSED: bool>(
    numbers: &AdamNumbers,
    parameter: &mut [f32],
    gradient: &[f32],
    average: &mut [f32],
    squares: &mut [f32],
) {
    let (beta1, beta2) = (numbers.betas.0 as f32, numbers.betas.1 as f32);
    let sign = if numbers.maximize { -1.0 } else { 1.0 };
    let (rest1, rest2) = (
        sign * (1.0 - numbers.betas.0) as f32,
        (1.0 - numbers.betas.1) as f32,
    );
    let (decay, step_size) = (numbers.decay as f32, numbers.step_size as f32);
    let (correction2, eps) = ((1.0 / numbers.correction2) as f32, numbers.eps as f32);
    let states = average.iter_mut().zip(squares);
    for ((p, &g), (m, v)) in parameter.iter_mut().zip(gradient).zip(states) {
        *m = multiply_add::<FUSED>(beta1, *m, rest1 * g);
        *v = multiply_add::<FUSED>(beta2, *v, rest2 * g * g);
        let denominator = multiply_add::<FUSED>(v.sqrt(), correction2, eps);
        *p = multiply_add::<FUSED>(-step_size, *m / denominator, *p * decay);
    }
}
