//! Activations after a bias, and gated linear units.

use overdrive_kernels::math::{normal, sigmoid};
use overdrive_kernels::threads::{block_rows, run_jobs};
use overdrive_kernels::{Element, Kernel, Simd, dispatch, each_vector, load, store};

use crate::Activation;

/// Gates and gated values: `(rows, 2·width)` in one buffer, or in two.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Gated<'a, T> {
    /// The rows of `width` gates and `width` gated values, and the width.
    Joint(&'a [T], usize),
    /// The gates, and the gated values.
    Pair(&'a [T], &'a [T]),
}

/// A mutable [`Gated`].
#[derive(Debug)]
pub(crate) enum GatedMut<'a, T> {
    Joint(&'a mut [T], usize),
    Pair(&'a mut [T], &'a mut [T]),
}

/// Computes `y = activation(gate) · up`.
pub(crate) fn gated<T: Element>(activation: Activation, x: Gated<'_, T>, y: &mut [T]) {
    let step = step::<T>(x.width(), y.len(), 3);
    let blocks = y.chunks_mut(step).enumerate();
    let run = |gate: &[T], up: &[T], y: &mut [T]| {
        dispatch(Forward {
            activation,
            gate,
            up,
            y,
        });
    };
    run_jobs(blocks, |(block, y)| match x.range(block * step, y.len()) {
        Gated::Pair(gate, up) => run(gate, up, y),
        Gated::Joint(x, width) => {
            for (x, y) in x.chunks_exact(2 * width).zip(y.chunks_exact_mut(width)) {
                let (gate, up) = x.split_at(width);
                run(gate, up, y);
            }
        }
    });
}

/// Computes the gradients of gate and up from `dy`.
pub(crate) fn gated_backward<T: Element>(
    activation: Activation,
    x: Gated<'_, T>,
    dy: &[T],
    dx: GatedMut<'_, T>,
) {
    // Five streams: gate, up and dy are read, two gradients are written.
    let step = step::<T>(x.width(), dy.len(), 5);
    let run = |(block, (dy, dx)): (usize, (&[T], GatedMut<'_, T>))| {
        let run = |[gate, up, dy]: [&[T]; 3], d_gate: &mut [T], d_up: &mut [T]| {
            dispatch(Backward {
                activation,
                gate,
                up,
                dy,
                d_gate,
                d_up,
            });
        };
        match (x.range(block * step, dy.len()), dx) {
            (Gated::Joint(x, width), GatedMut::Joint(dx, _)) => {
                let rows = x
                    .chunks_exact(2 * width)
                    .zip(dx.chunks_exact_mut(2 * width));
                for ((x, dx), dy) in rows.zip(dy.chunks_exact(width)) {
                    let (gate, up) = x.split_at(width);
                    let (d_gate, d_up) = dx.split_at_mut(width);
                    run([gate, up, dy], d_gate, d_up);
                }
            }
            (Gated::Pair(gate, up), GatedMut::Pair(d_gate, d_up)) => {
                run([gate, up, dy], d_gate, d_up);
            }
            // Gradients have the layout of their inputs.
            _ => {}
        }
    };
    let dy = dy.chunks(step);
    match dx {
        GatedMut::Joint(dx, width) => {
            let gradients = dx.chunks_mut(2 * step);
            let gradients = gradients.map(|dx| GatedMut::Joint(dx, width));
            run_jobs(dy.zip(gradients).enumerate(), run);
        }
        GatedMut::Pair(gate, up) => {
            let gradients = gate.chunks_mut(step).zip(up.chunks_mut(step));
            let gradients = gradients.map(|(gate, up)| GatedMut::Pair(gate, up));
            run_jobs(dy.zip(gradients).enumerate(), run);
        }
    }
}

/// Computes `y = activation(x + bias)`, row by row.
pub(crate) fn biased<T: Element>(activation: Activation, x: &[T], bias: &[T], y: &mut [T]) {
    let step = step::<T>(Some(bias.len()), y.len(), 2);
    run_jobs(x.chunks(step).zip(y.chunks_mut(step)), |(x, y)| {
        dispatch(BiasedForward {
            activation,
            x,
            bias,
            y,
        });
    });
}

/// Computes the gradients of `x` and `bias` from `dy`.
pub(crate) fn biased_backward<T: Element>(
    activation: Activation,
    x: &[T],
    bias: &[T],
    dy: &[T],
    dx: &mut [T],
    d_bias: &mut [f32],
) {
    let width = bias.len();
    let step = step::<T>(Some(width), dy.len(), 3);
    let mut partial = vec![0.0_f32; dy.len().div_ceil(step) * width];
    let blocks = x
        .chunks(step)
        .zip(dy.chunks(step))
        .zip(dx.chunks_mut(step).zip(partial.chunks_mut(width)));
    run_jobs(blocks, |((x, dy), (dx, d_bias))| {
        dispatch(BiasedBackward {
            activation,
            x,
            bias,
            dy,
            dx,
            d_bias,
        });
    });
    // In the order of the blocks, which do not depend on the number of threads, so the sum does not either.
    d_bias.fill(0.0);
    for block in partial.chunks(width) {
        for (sum, partial) in d_bias.iter_mut().zip(block) {
            *sum += partial;
        }
    }
}

/// Returns the number of elements in a block of `total`, where each element accesses `streams` values in memory. If
/// there are rows, a block has whole rows.
fn step<T>(width: Option<usize>, total: usize, streams: usize) -> usize {
    // Without rows, any number of whole vectors works.
    let width = width.unwrap_or(1024).max(1);
    width * block_rows(total.div_ceil(width), width * size_of::<T>() * streams)
}

impl<'a, T> Gated<'a, T> {
    fn width(&self) -> Option<usize> {
        match *self {
            Self::Joint(_, width) => Some(width),
            Self::Pair(..) => None,
        }
    }

    /// Returns the inputs of the elements `at .. at + len` of the result.
    fn range(self, at: usize, len: usize) -> Self {
        match self {
            Self::Joint(x, width) => Self::Joint(&x[2 * at..2 * (at + len)], width),
            Self::Pair(gate, up) => Self::Pair(&gate[at..at + len], &up[at..at + len]),
        }
    }
}

/// An activation, known when a kernel is compiled.
trait Function: Copy {
    fn value<S: Simd>(self, s: S, x: S::F) -> S::F;
    fn value_and_slope<S: Simd>(self, s: S, x: S::F) -> (S::F, S::F);
}

#[derive(Clone, Copy)]
struct Silu;

impl Function for Silu {
    #[inline(always)]
    fn value<S: Simd>(self, s: S, x: S::F) -> S::F {
        s.mul(x, sigmoid(s, x))
    }

    #[inline(always)]
    fn value_and_slope<S: Simd>(self, s: S, x: S::F) -> (S::F, S::F) {
        let sigmoid = sigmoid(s, x);
        let value = s.mul(x, sigmoid);
        // σ + x·σ·(1 - σ)
        (
            value,
            s.mul_add(value, s.sub(s.splat(1.0), sigmoid), sigmoid),
        )
    }
}

/// `x·σ(2u)` with `u = √(2/π)·(x + 0.044715 x³)`, which is `x/2·(1 + tanh u)` without cancellation.
#[derive(Clone, Copy)]
struct GeluTanh;

const TWICE_SQRT_2_OVER_PI: f32 = 1.595_769;
const CUBIC: f32 = 0.044_715;

impl Function for GeluTanh {
    #[inline(always)]
    fn value<S: Simd>(self, s: S, x: S::F) -> S::F {
        let one = s.splat(1.0);
        let inner = s.mul_add(s.splat(CUBIC), s.mul(x, x), one);
        let inner = s.mul(s.mul(x, s.splat(TWICE_SQRT_2_OVER_PI)), inner);
        s.mul(x, sigmoid(s, inner))
    }

    #[inline(always)]
    fn value_and_slope<S: Simd>(self, s: S, x: S::F) -> (S::F, S::F) {
        let one = s.splat(1.0);
        let scale = s.splat(TWICE_SQRT_2_OVER_PI);
        // Bounded, far beyond where the sigmoid is 0 or 1, so that 0 · ∞ cannot occur.
        let square = s.min(s.splat(1e10), s.mul(x, x));
        let inner = s.mul_add(s.splat(CUBIC), square, one);
        let sigmoid = sigmoid(s, s.mul(s.mul(x, scale), inner));
        let value = s.mul(x, sigmoid);
        let inner_slope = s.mul(scale, s.mul_add(s.splat(3.0 * CUBIC), square, one));
        let rest = s.mul(s.sub(one, sigmoid), inner_slope);
        (value, s.mul_add(value, rest, sigmoid))
    }
}

#[derive(Clone, Copy)]
struct Gelu;

impl Function for Gelu {
    #[inline(always)]
    fn value<S: Simd>(self, s: S, x: S::F) -> S::F {
        s.mul(x, normal(s, x).0)
    }

    #[inline(always)]
    fn value_and_slope<S: Simd>(self, s: S, x: S::F) -> (S::F, S::F) {
        let (below, density) = normal(s, x);
        (s.mul(x, below), s.mul_add(x, density, below))
    }
}

#[derive(Clone, Copy)]
struct Relu;

impl Function for Relu {
    #[inline(always)]
    fn value<S: Simd>(self, s: S, x: S::F) -> S::F {
        let zero = s.splat(0.0);
        // NaN is not below zero, so it passes through.
        s.select_lt(x, zero, zero, x)
    }

    #[inline(always)]
    fn value_and_slope<S: Simd>(self, s: S, x: S::F) -> (S::F, S::F) {
        let zero = s.splat(0.0);
        // The slope at 0 is 0, as in PyTorch.
        (self.value(s, x), s.select_lt(zero, x, s.splat(1.0), zero))
    }
}

/// Runs `$body` with `$function` bound to the activation's type.
macro_rules! with_function {
    ($activation:expr, $function:ident => $body:expr) => {
        match $activation {
            Activation::Silu => {
                let $function = Silu;
                $body
            }
            Activation::Gelu => {
                let $function = Gelu;
                $body
            }
            Activation::GeluTanh => {
                let $function = GeluTanh;
                $body
            }
            Activation::Relu => {
                let $function = Relu;
                $body
            }
        }
    };
}

/// The forward pass of one row, or of all values if gates and gated values are in separate buffers, so that one loop
/// serves both layouts.
struct Forward<'a, T> {
    activation: Activation,
    gate: &'a [T],
    up: &'a [T],
    y: &'a mut [T],
}

impl<T: Element> Kernel for Forward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        with_function!(self.activation, function => {
            multiply(s, function, self.gate, self.up, self.y);
        });
    }
}

#[inline(always)]
fn multiply<S: Simd, T: Element>(s: S, function: impl Function, gate: &[T], up: &[T], y: &mut [T]) {
    each_vector(
        y.len(),
        #[inline(always)]
        |span| {
            let gate = function.value(s, load(s, gate, span));
            store(s, s.mul(gate, load(s, up, span)), y, span);
        },
    );
}

/// The backward pass, with the layouts of [`Forward`].
struct Backward<'a, T> {
    activation: Activation,
    gate: &'a [T],
    up: &'a [T],
    dy: &'a [T],
    d_gate: &'a mut [T],
    d_up: &'a mut [T],
}

impl<T: Element> Kernel for Backward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        with_function!(self.activation, function => {
            multiply_backward(s, function, [self.gate, self.up, self.dy], self.d_gate, self.d_up);
        });
    }
}

#[inline(always)]
fn multiply_backward<S: Simd, T: Element>(
    s: S,
    function: impl Function,
    [gate, up, dy]: [&[T]; 3],
    d_gate: &mut [T],
    d_up: &mut [T],
) {
    each_vector(
        dy.len(),
        #[inline(always)]
        |span| {
            let dy = load(s, dy, span);
            // Both are computed from one exponential.
            let (value, slope) = function.value_and_slope(s, load(s, gate, span));
            store(s, s.mul(dy, value), d_up, span);
            let through = s.mul(dy, load(s, up, span));
            store(s, s.mul(through, slope), d_gate, span);
        },
    );
}

struct BiasedForward<'a, T> {
    activation: Activation,
    x: &'a [T],
    bias: &'a [T],
    y: &'a mut [T],
}

impl<T: Element> Kernel for BiasedForward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let bias = self.bias;
        let width = bias.len();
        let y = self.y;
        with_function!(self.activation, function => {
            for (x, y) in self.x.chunks_exact(width).zip(y.chunks_exact_mut(width)) {
                each_vector(
                    width,
                    #[inline(always)]
                    |span| {
                        let x = s.add(load(s, x, span), load(s, bias, span));
                        store(s, function.value(s, x), y, span);
                    },
                );
            }
        });
    }
}

struct BiasedBackward<'a, T> {
    activation: Activation,
    x: &'a [T],
    bias: &'a [T],
    dy: &'a [T],
    dx: &'a mut [T],
    d_bias: &'a mut [f32],
}

impl<T: Element> Kernel for BiasedBackward<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let bias = self.bias;
        let width = bias.len();
        let (dx, d_bias) = (self.dx, self.d_bias);
        with_function!(self.activation, function => {
            let rows = self.x.chunks_exact(width).zip(self.dy.chunks_exact(width));
            for ((x, dy), dx) in rows.zip(dx.chunks_exact_mut(width)) {
                each_vector(
                    width,
                    #[inline(always)]
                    |span| {
                        let x = s.add(load(s, x, span), load(s, bias, span));
                        let (_, slope) = function.value_and_slope(s, x);
                        let gradient = s.mul(load(s, dy, span), slope);
                        store(s, gradient, dx, span);
                        store(s, s.add(load(s, d_bias, span), gradient), d_bias, span);
                    },
                );
            }
        });
    }
}
