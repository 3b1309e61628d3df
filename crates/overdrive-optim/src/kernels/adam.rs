//! The arithmetic of one Adam update on float32 slices.

use overdrive_kernels::Simd;

/// The coefficients of one update, ready for the loop.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AdamNumbers {
    /// The number of this step, counted from 1.
    pub(crate) step: f64,
    pub(crate) learning_rate: f64,
    pub(crate) weight_decay: f64,
    pub(crate) maximize: bool,
    pub(crate) betas: (f64, f64),
    pub(crate) eps: f64,
    /// The factor of the parameter: 1 - learning rate · weight decay.
    pub(crate) decay: f64,
    /// The learning rate divided by the bias correction of the average.
    pub(crate) step_size: f64,
    /// The root of the bias correction of the squares.
    pub(crate) correction2: f64,
}

impl AdamNumbers {
    /// Returns the coefficients of step `step`, counted from 1.
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

/// Does one update. All slices have the same length.
#[inline(always)]
pub(super) fn update<S: Simd>(
    s: S,
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
        *m = s.mul_add_scalar(beta1, *m, rest1 * g);
        *v = s.mul_add_scalar(beta2, *v, rest2 * g * g);
        let denominator = s.mul_add_scalar(v.sqrt(), correction2, eps);
        *p = s.mul_add_scalar(-step_size, *m / denominator, *p * decay);
    }
}
