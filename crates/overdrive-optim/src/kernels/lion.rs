//! Lion in one pass over parameter, gradient and momentum.

use overdrive_kernels::threads::{chunk_len, run_jobs};
use overdrive_kernels::{Element, InstructionSet, convert, vectorized};
use tch::Tensor;

use super::elements::{read, write};
use crate::Result;

/// The number of elements that are worth a thread.
const GRAIN: usize = 1 << 14;
/// The number of elements that pass through a buffer at once.
const CHUNK: usize = 256;

/// The coefficients of one update.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LionNumbers {
    pub(crate) betas: (f64, f64),
    pub(crate) learning_rate: f64,
    /// The factor of the parameter: 1 - learning rate · weight decay.
    pub(crate) decay: f64,
}

/// Updates a contiguous parameter on the CPU; the momentum is float32.
pub(crate) fn lion<T: Element>(
    numbers: &LionNumbers,
    parameter: &Tensor,
    gradient: &Tensor,
    momentum: &Tensor,
) -> Result<()> {
    // SAFETY: the tensors of one parameter, each taken once; see `elements::write`.
    let (parameter, gradient, momentum): (&mut [T], &[T], &mut [f32]) =
        unsafe { (write(parameter)?, read(gradient)?, write(momentum)?) };
    let chunk = chunk_len(gradient.len(), GRAIN);
    let jobs = parameter
        .chunks_mut(chunk)
        .zip(gradient.chunks(chunk).zip(momentum.chunks_mut(chunk)));
    run_jobs(jobs, |(parameter, (gradient, momentum))| {
        update(
            InstructionSet::best(),
            numbers,
            parameter,
            gradient,
            momentum,
        );
    });
    Ok(())
}

vectorized! {
    fn update<S: Simd, T: Element>(
        s: S,
        numbers: &LionNumbers,
        parameter: &mut [T],
        gradient: &[T],
        momentum: &mut [f32],
    ) {
        let (beta1, beta2) = (numbers.betas.0 as f32, numbers.betas.1 as f32);
        let (rest1, rest2) = (
            (1.0 - numbers.betas.0) as f32,
            (1.0 - numbers.betas.1) as f32,
        );
        let (rate, decay) = (numbers.learning_rate as f32, numbers.decay as f32);
        let (mut p, mut g) = ([0f32; CHUNK], [0f32; CHUNK]);
        let values = parameter.chunks_mut(CHUNK).zip(gradient.chunks(CHUNK));
        for ((parameter, gradient), momentum) in values.zip(momentum.chunks_mut(CHUNK)) {
            let len = parameter.len();
            convert(s, parameter, &mut p[..len]);
            convert(s, gradient, &mut g[..len]);
            for ((p, &g), m) in p[..len].iter_mut().zip(&g[..len]).zip(momentum) {
                let direction = *m * beta1 + g * rest1;
                // The sign of 0 is 0, and that of NaN, as torch has it.
                let up = if direction > 0.0 { rate } else { 0.0 };
                let down = if direction < 0.0 { rate } else { 0.0 };
                *p = *p * decay - up + down;
                *m = s.mul_add_scalar(beta2, *m, rest2 * g);
            }
            convert(s, &p[..len], parameter);
        }
    }
}
