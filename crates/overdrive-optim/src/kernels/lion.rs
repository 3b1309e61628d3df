//! Lion in one pass over parameter, gradient and momentum.

use overdrive_sys::threads::parallel_for;
use tch::Tensor;

use super::multiply_add;
use super::shared::{Real, Shared, read, write};
use crate::Result;

/// Elements that are worth a thread.
const GRAIN: usize = 1 << 14;
/// Elements that pass through a buffer at once.
const CHUNK: usize = 256;

/// The numbers of one update.
#[derive(Debug, Clone, Copy)]
pub(crate) struct LionNumbers {
    pub(crate) betas: (f64, f64),
    pub(crate) learning_rate: f64,
    /// What the parameter is multiplied by: 1 - learning rate · weight decay.
    pub(crate) decay: f64,
}

/// Updates a contiguous parameter on the CPU; the momentum is float32.
pub(crate) fn lion<T: Real>(
    numbers: &LionNumbers,
    parameter: &Tensor,
    gradient: &Tensor,
    momentum: &Tensor,
) -> Result<()> {
    // SAFETY: a tensor of this parameter, taken once; see `shared::write`.
    let gradient: &[T] = unsafe { read(gradient) }?;
    // SAFETY: a tensor of this parameter, taken once; see `shared::write`.
    let parameter = Shared::new(unsafe { write::<T>(parameter) }?);
    // SAFETY: a tensor of this parameter, taken once; see `shared::write`.
    let momentum = Shared::new(unsafe { write::<f32>(momentum) }?);
    parallel_for(gradient.len(), GRAIN, |range| {
        // SAFETY: the ranges of one `parallel_for` do not overlap.
        let (parameter, momentum) = unsafe {
            (
                parameter.range(range.clone()),
                momentum.range(range.clone()),
            )
        };
        let gradient = &gradient[range];
        super::dispatch!(run::<T>, run_avx2, (numbers, parameter, gradient, momentum));
    });
    Ok(())
}

#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
fn run_avx2<T: Real>(
    numbers: &LionNumbers,
    parameter: &mut [T],
    gradient: &[T],
    momentum: &mut [f32],
) {
    run::<T, true>(numbers, parameter, gradient, momentum);
}

#[inline(always)]
fn run<T: Real, const FUSED: bool>(
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
        T::widen(parameter, &mut p[..len]);
        T::widen(gradient, &mut g[..len]);
        for ((p, &g), m) in p[..len].iter_mut().zip(&g[..len]).zip(momentum) {
            let direction = *m * beta1 + g * rest1;
            // The sign of 0 is 0, and that of NaN, as torch has it.
            let up = if direction > 0.0 { rate } else { 0.0 };
            let down = if direction < 0.0 { rate } else { 0.0 };
            *p = *p * decay - up + down;
            *m = multiply_add::<FUSED>(beta2, *m, rest2 * g);
        }
        T::narrow(&p[..len], parameter);
    }
}
