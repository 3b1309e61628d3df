//! Gates of inference on a CPU in fp32, whose bits for an element do not depend on its neighbours.
//!
//! libtorch computes the elements that fill a vector by another exponential than the rest, and which those are depends on
//! the number of rows and on how threads divide them.

use overdrive_fused::rows;
use overdrive_kernels::{InstructionSet, Kernel, Simd, each_vector, load, math, store};
use overdrive_sys::engine::is_grad_enabled;
use tch::{Device, Kind, Tensor};

use crate::Result;

/// Returns `true` if the functions below take tensors like `x`.
fn applies(x: &Tensor) -> bool {
    // A trained parameter requires a gradient in inference, too.
    let is_recorded = is_grad_enabled() && x.requires_grad();
    x.device() == Device::Cpu && x.kind() == Kind::Float && !is_recorded
}

/// Computes `x · sigmoid(gate)`.
pub(crate) fn gated(x: &Tensor, gate: &Tensor, fused: bool) -> Result<Tensor> {
    if !fused || !applies(x) || !applies(gate) || x.size() != gate.size() {
        return Ok(x.f_mul(&gate.f_sigmoid()?)?);
    }
    let x = x.f_contiguous()?;
    with_gates(rows::elements(&x)?.to_vec(), gate)
}

/// Computes `sigmoid(x)`.
pub(crate) fn sigmoid(x: &Tensor, fused: bool) -> Result<Tensor> {
    match fused && applies(x) {
        true => with_gates(vec![1.0; x.numel()], x),
        false => Ok(x.f_sigmoid()?),
    }
}

/// Multiplies each element by the sigmoid of its gate, and returns them in the shape of the gates.
fn with_gates(mut x: Vec<f32>, gate: &Tensor) -> Result<Tensor> {
    let gate = gate.f_contiguous()?;
    scale_by_sigmoids(&mut x, rows::elements(&gate)?);
    Ok(Tensor::f_from_slice(&x)?.f_view(gate.size().as_slice())?)
}

/// Multiplies each element of `x` by the sigmoid of its gate.
pub(crate) fn scale_by_sigmoids(x: &mut [f32], gate: &[f32]) {
    InstructionSet::best().run(Gate { x, gate });
}

struct Gate<'a> {
    x: &'a mut [f32],
    gate: &'a [f32],
}

impl Kernel for Gate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Gate { x, gate } = self;
        each_vector(
            x.len(),
            #[inline(always)]
            |span| {
                let gate = math::sigmoid(s, load(s, gate, span));
                let product = s.mul(load(s, x, span), gate);
                store(s, product, x, span);
            },
        );
    }
}

/// Computes the logarithm of the decay, `-exp(a_log) · softplus(speed + bias)`, in fp32, and the rate `sigmoid(rate)`, of
/// `speed` and `rate (…, H)`.
pub(crate) fn decay_and_rate(
    [speed, rate]: [&Tensor; 2],
    [bias, a_log]: [&Tensor; 2],
    fused: bool,
) -> Result<[Tensor; 2]> {
    // In fp32, as in transformers: in a low precision, the speed of decay could be infinite.
    let factor = a_log.f_to_kind(Kind::Float)?.f_exp()?.f_neg()?;
    let own = [speed, rate, bias, &factor];
    if !fused || !own.into_iter().all(applies) {
        let speed = speed.f_to_kind(Kind::Float)?.f_add(bias)?.f_softplus()?;
        return Ok([factor.f_mul(&speed)?, rate.f_sigmoid()?]);
    }
    let size = speed.size();
    let speed = speed.f_contiguous()?;
    let (bias, factor) = (bias.f_contiguous()?, factor.f_contiguous()?);
    let heads = rows::elements(&bias)?.iter().zip(rows::elements(&factor)?);
    let speeds = rows::elements(&speed)?.iter();
    let decay = speeds
        .zip(heads.cycle())
        .map(|(speed, (bias, factor))| factor * softplus(speed + bias));
    let decay = Tensor::f_from_slice(&decay.collect::<Vec<f32>>())?.f_view(size.as_slice())?;
    Ok([decay, with_gates(vec![1.0; rate.numel()], rate)?])
}

/// Computes `log(1 + exp(x))`, beyond 20 as `x`, as libtorch does.
fn softplus(x: f32) -> f32 {
    match x > 20.0 {
        true => x,
        false => x.exp().ln_1p(),
    }
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn gates_equal_libtorchs_and_no_element_depends_on_its_neighbours() {
        let rows = |from: f64| {
            let x = Tensor::arange_start_step(from, from + 35.0, 1.0, (Kind::Float, Device::Cpu));
            (x * 0.7).view([5, 7])
        };
        let (x, gate) = (rows(-20.0), rows(-14.0));
        let all = gated(&x, &gate, true).unwrap();
        assert!(all.allclose(&gated(&x, &gate, false).unwrap(), 1e-6, 1e-7, false));
        let sigmoids = sigmoid(&gate, true).unwrap();
        assert!(sigmoids.allclose(&gate.sigmoid(), 1e-6, 1e-7, false));
        let [bias, a_log] = [0.1, -0.5].map(|by| x.get(0) * 0.0 + by);
        let of =
            |rows: &Tensor, fused| decay_and_rate([rows, rows], [&bias, &a_log], fused).unwrap();
        let ([decay, rate], [wanted_decay, wanted_rate]) = (of(&x, true), of(&x, false));
        assert!(decay.allclose(&wanted_decay, 1e-6, 1e-7, false));
        assert!(rate.allclose(&wanted_rate, 1e-6, 1e-7, false));
        for row in 0..5 {
            let (one, own) = (x.narrow(0, row, 1), gate.narrow(0, row, 1));
            assert_eq!(gated(&one, &own, true).unwrap(), all.narrow(0, row, 1));
            assert_eq!(sigmoid(&own, true).unwrap(), sigmoids.narrow(0, row, 1));
            let [of_row, rate_of_row] = of(&one, true);
            assert_eq!(of_row, decay.narrow(0, row, 1));
            assert_eq!(rate_of_row, rate.narrow(0, row, 1));
        }
        // In inference with a trained parameter, too.
        let trained = bias.set_requires_grad(true);
        let inferred = tch::no_grad(|| decay_and_rate([&x, &x], [&trained, &a_log], true).unwrap());
        assert_eq!(inferred, [decay, rate]);
    }
}
