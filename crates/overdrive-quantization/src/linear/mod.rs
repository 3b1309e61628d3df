//! Linear layers with quantized weights: the checks, the dtype of the computation, and the gradients.

mod blocks;
mod cpu;
mod operators;
mod plan;

use overdrive_autograd::{
    BackwardContext, ForwardContext, Function, FunctionResult, apply, is_grad_enabled,
};
use overdrive_kernels::tensors::has_element;
use overdrive_sys::autocast;
use overdrive_sys::named_operator::{self, NamedOperator};
use tch::{Device, Kind, Tensor};

use crate::{Error, QuantizedWeight, Result};
use overdrive_core::Error as CoreError;

/// Returns `x · weightᵀ + bias` for a quantized weight.
///
/// `x (…, I)`, `bias (O,)`; the result is `(…, O)` in the dtype of `x`, or under autocast in autocast's
/// dtype. It is differentiable in `x` and `bias`; the weight is frozen.
///
/// The weight's [`Scheme`](crate::Scheme) and [`Activations`](crate::Activations) select the computation.
/// Either activations are quantized to 8 bits, by row or by group, and multiplied in integers, or they stay
/// floats and the codes are dequantized, in registers for few rows and in blocks of some megabytes for many.
/// On the CPU the whole dense weight is never allocated. The gradient of `x` is `dy · weight` with the
/// dequantized weight; the rounding of activations has the gradient of the identity.
///
/// ```
/// use overdrive_quantization::{QuantizedWeight, Scheme, linear};
/// use tch::{Device, Kind, Tensor};
///
/// let dense = Tensor::randn([96, 64], (Kind::Float, Device::Cpu));
/// let weight = QuantizedWeight::quantize(&dense, Scheme::Int8Dynamic)?;
/// let x = Tensor::randn([3, 64], (Kind::Float, Device::Cpu)).set_requires_grad(true);
/// let y = linear(&x, &weight, None)?;
/// y.sum(Kind::Float).backward();
/// assert_eq!((y.size(), x.grad().size()), (vec![3, 96], vec![3, 64]));
/// # Ok::<(), overdrive_quantization::Error>(())
/// ```
///
/// # Errors
/// [`Error::Common`] if shapes, dtypes or devices do not fit.
pub fn linear(x: &Tensor, weight: &QuantizedWeight, bias: Option<&Tensor>) -> Result<Tensor> {
    joint_linear(x, &[weight], &[bias])
}

impl QuantizedWeight {
    /// Returns `true` if [`linear`] without gradients gives a row of `x` the same bits alone and beside any others: on
    /// a CPU, with activations that are rounded to integers.
    pub fn is_batch_invariant(&self) -> bool {
        // A weight that cannot be read fails where it is used.
        self.device() == Device::Cpu && cpu::is_batch_invariant(self).unwrap_or(false)
    }
}

/// Computes several linear layers of the same `x` and returns their results side by side, `(…, ΣO)`. The
/// activations are read and quantized once, and the outputs of all layers are divided among the threads
/// together.
///
/// # Errors
/// As [`linear`]; [`Error::Common`] for no weights, or if the number of biases differs.
pub fn joint_linear(
    x: &Tensor,
    weights: &[&QuantizedWeight],
    biases: &[Option<&Tensor>],
) -> Result<Tensor> {
    check(x, weights, biases)?;
    let compute = compute_kind(x);
    let recording = is_grad_enabled();
    let differentiated = recording
        && (x.requires_grad() || biases.iter().flatten().any(|bias| bias.requires_grad()));
    if !differentiated {
        // In training, the input of a model's first layer needs no gradient; it must not be rounded if those of later
        // layers are not.
        return forward(x, weights, biases, compute, recording);
    }
    let function = Linear {
        weights: weights
            .iter()
            .map(|weight| weight.shallow_clone())
            .collect(),
        biased: biases.iter().map(Option::is_some).collect(),
        compute,
    };
    let inputs: Vec<&Tensor> = std::iter::once(x)
        .chain(biases.iter().copied().flatten())
        .collect();
    Ok(apply(function, &inputs)?.remove(0))
}

/// Computes [`joint_linear`] on f32 slices: `y (rows, ΣO)` from `x (rows, I)`, the weights and their biases. It is for
/// decoders that reuse their buffers. Returns `false` and leaves `y` undefined if a tensor is not on the CPU, a bias is
/// not f32, or a weight has no kernel for this number of rows.
///
/// # Errors
/// [`Error::Common`] for slices of the wrong length.
pub fn joint_linear_into(
    x: &[f32],
    layers: &[(&QuantizedWeight, Option<&Tensor>)],
    y: &mut [f32],
) -> Result<bool> {
    let on_cpu = layers.iter().all(|(weight, bias)| {
        weight.device() == Device::Cpu
            && bias.is_none_or(|bias| {
                bias.device() == Device::Cpu && bias.kind() == Kind::Float && bias.is_contiguous()
            })
    });
    let Some((first, _)) = layers.first().filter(|_| on_cpu) else {
        return Ok(false);
    };
    let width = first.inputs.unsigned_abs() as usize;
    let rows = x.len().checked_div(width).unwrap_or(0);
    let outputs: i64 = layers.iter().map(|(weight, _)| weight.outputs).sum();
    let outputs = outputs.unsigned_abs() as usize;
    let same = layers.iter().all(|(weight, bias)| {
        let biased = |bias: &&Tensor| bias.size() == [weight.outputs];
        weight.inputs == first.inputs && bias.as_ref().is_none_or(biased)
    });
    if !same || x.len() != rows * width || y.len() != rows * outputs {
        let expected = format!(
            "({rows}, {width}) elements for a result of {} elements",
            y.len()
        );
        return Err(Error::shape("x", vec![x.len() as i64], expected));
    }
    cpu::forward_into(x, width, layers, y)
}

/// Returns the result without recording it; `recording` is `true` if gradients are enabled.
fn forward(
    x: &Tensor,
    weights: &[&QuantizedWeight],
    biases: &[Option<&Tensor>],
    compute: Kind,
    recording: bool,
) -> Result<Tensor> {
    let has_kernels = x.device() == Device::Cpu && has_element(compute) && x.numel() > 0;
    if has_kernels {
        cpu::forward(x, weights, biases, compute, recording)
    } else {
        operators::forward(x, weights, biases, compute, recording)
    }
}

/// Returns the results of libtorch's operators.
#[cfg(test)]
pub(crate) fn operators_forward(
    x: &Tensor,
    weights: &[&QuantizedWeight],
    biases: &[Option<&Tensor>],
) -> Result<Tensor> {
    operators::forward(x, weights, biases, x.kind(), false)
}

/// Returns the dtype of the matmul: autocast's, or that of `x`.
fn compute_kind(x: &Tensor) -> Kind {
    match autocast::state(x.device()) {
        Ok(state) if state.enabled && x.kind() != Kind::Double => state.dtype,
        _ => x.kind(),
    }
}

fn check(x: &Tensor, weights: &[&QuantizedWeight], biases: &[Option<&Tensor>]) -> Result<()> {
    if weights.is_empty() || weights.len() != biases.len() {
        let found = format!("{} with {} biases", weights.len(), biases.len());
        let expected = "at least one weight, with a bias or `None` for each";
        return Err(Error::option("number of weights", found, expected));
    }
    let floating = |kind| {
        matches!(
            kind,
            Kind::Float | Kind::Double | Kind::Half | Kind::BFloat16
        )
    };
    if !floating(x.kind()) {
        let expected = "Float, Double, Half or BFloat16";
        return Err(CoreError::dtype("x", x.kind(), expected).into());
    }
    let size = x.size();
    for (weight, bias) in weights.iter().zip(biases) {
        if size.last() != Some(&weight.inputs) {
            let (inputs, shape) = (weight.inputs, weight.size());
            let expected = format!("(…, {inputs}), since the weight is {shape:?}");
            return Err(Error::shape("x", size, expected));
        }
        if weight.device() != x.device() {
            let expected = format!("on {:?}, as the weight is", weight.device());
            return Err(CoreError::device("x", x.device(), expected).into());
        }
        let Some(bias) = bias else { continue };
        if bias.size() != [weight.outputs] {
            let expected = format!("({},)", weight.outputs);
            return Err(Error::shape("bias", bias.size(), expected));
        }
        if !floating(bias.kind()) {
            let expected = "Float, Double, Half or BFloat16";
            return Err(CoreError::dtype("bias", bias.kind(), expected).into());
        }
        if bias.device() != x.device() {
            let expected = format!("on {:?}, as the input is", x.device());
            return Err(CoreError::device("bias", bias.device(), expected).into());
        }
    }
    Ok(())
}

/// The function of `x` and of the biases that are given, in this order.
struct Linear {
    /// The weights, which are not saved tensors, so that hooks that move saved tensors (offloading) do not move
    /// a frozen weight.
    weights: Vec<QuantizedWeight>,
    biased: Vec<bool>,
    compute: Kind,
}

impl Function for Linear {
    const NAME: &'static str = "quantized_linear";

    fn forward(
        &mut self,
        _: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let x = inputs[0];
        let mut given = inputs[1..].iter().copied();
        let biases: Vec<Option<&Tensor>> = self
            .biased
            .iter()
            .map(|biased| if *biased { given.next() } else { None })
            .collect();
        let weights: Vec<&QuantizedWeight> = self.weights.iter().collect();
        let product = || {
            let y = forward(x, &weights, &biases, self.compute, true)?;
            Ok(vec![y])
        };
        // Selective checkpointing selects results by the name of their operator.
        let codes = weights.iter().map(|weight| weight.storage.codes());
        let operands: Vec<&Tensor> = std::iter::once(x).chain(codes).collect();
        Ok(named_operator::call(NamedOperator::Mm, &operands, product)?)
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let biases = self.biased.iter().filter(|biased| **biased).count();
        let mut results: Vec<Option<Tensor>> = Vec::new();
        results.resize_with(1 + biases, || None);
        let Some(dy) = &gradients[0] else {
            return Ok(results);
        };
        let outputs: i64 = self.weights.iter().map(|weight| weight.outputs).sum();
        let dy = dy.f_to_kind(self.compute)?;
        if context.needs_input_grad(0) {
            // The engine casts gradients to the dtypes of their inputs.
            results[0] = Some(blocks::backward(&dy, &self.weights)?);
        }
        if (1..=biases).any(|input| context.needs_input_grad(input)) {
            let sums = dy.f_reshape([-1, outputs])?.f_sum_dim_intlist(
                [0i64].as_slice(),
                false,
                dy.kind(),
            )?;
            let (mut first, mut input) = (0, 1);
            for (weight, biased) in self.weights.iter().zip(&self.biased) {
                if *biased {
                    results[input] = Some(sums.f_narrow(0, first, weight.outputs)?);
                    input += 1;
                }
                first += weight.outputs;
            }
        }
        Ok(results)
    }
}

#[cfg(test)]
mod tests;
