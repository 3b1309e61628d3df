//! Gated activations; their arithmetic on a CPU is in `kernel/activation.rs`, on a GPU in `gate` of overdrive-gpu.

use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use tch::Tensor;

use crate::error::{check_floating, wrong_shape};
use crate::kernel::activation::{Gated, GatedMut, biased, biased_backward, gated, gated_backward};
use crate::tensors::promoted;
use crate::{Activation, Result, gpu};
use overdrive_kernels::tensors::{Fresh, elements, has_kernel};
use overdrive_kernels::with_element;

/// Returns `silu(gate) · up`, `(…, I)`, from the joint projection `gate_up (…, 2·I)`, whose rows are the gates
/// followed by the gated values. It is [`glu`] with [`Activation::Silu`].
///
/// # Errors
/// As [`glu`].
pub fn swiglu(gate_up: &Tensor) -> Result<Tensor> {
    glu(gate_up, Activation::Silu)
}

/// Returns `silu(gate) · up` from two tensors of one shape. It is [`glu_pair`] with [`Activation::Silu`].
///
/// # Errors
/// As [`glu_pair`].
pub fn swiglu_pair(gate: &Tensor, up: &Tensor) -> Result<Tensor> {
    glu_pair(gate, up, Activation::Silu)
}

/// Returns `activation(gate) · up` from the joint projection `gate_up (…, 2·I)`, to `(…, I)`, in one pass (gated
/// linear units, Shazeer 2020, arXiv:2002.05202).
///
/// Gates come first in a row (PyTorch's `glu` has them last). The arithmetic is in f32, and results are rounded
/// once. Backward saves only `gate_up`, recomputes the activation and writes one joint gradient.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if the last dimension is odd or the dtype is not a floating-point one.
///
/// ```
/// use tch::Tensor;
/// let y = overdrive_fused::swiglu(&Tensor::from_slice(&[1.0_f32, 0.0, 3.0, 5.0]))?;
/// assert!((y.double_value(&[0]) - 3.0 * 0.731_058_578_6).abs() < 1e-6);
/// assert_eq!(y.double_value(&[1]), 0.0);
/// # Ok::<(), overdrive_fused::Error>(())
/// ```
pub fn glu(gate_up: &Tensor, activation: Activation) -> Result<Tensor> {
    check_floating("glu", "gate_up", gate_up)?;
    let width = gate_up.size().last().copied().unwrap_or(1);
    if width % 2 != 0 {
        return Err(wrong_shape(
            "glu",
            "gate_up",
            gate_up,
            "(…, 2·I), with as many gates as gated values",
        ));
    }
    let half = width / 2;
    let gpu = gpu::gate(gate_up, half, activation)?;
    if gpu.is_some() || (has_kernel(gate_up) && gate_up.numel() > 0) {
        return Ok(apply(JointGlu { activation, gpu }, &[gate_up])?.remove(0));
    }
    let gate = activation.apply(&gate_up.f_narrow(-1, 0, half)?)?;
    Ok(gate.f_mul(&gate_up.f_narrow(-1, half, half)?)?)
}

/// Returns `activation(gate) · up` from two tensors of one shape, in one pass; otherwise as [`glu`].
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if the shapes differ or a dtype is not a floating-point one.
pub fn glu_pair(gate: &Tensor, up: &Tensor, activation: Activation) -> Result<Tensor> {
    check_floating("glu_pair", "gate", gate)?;
    check_floating("glu_pair", "up", up)?;
    if gate.size() != up.size() {
        return Err(wrong_shape(
            "glu_pair",
            "up",
            up,
            format!("{:?}, the shape of gate", gate.size()),
        ));
    }
    let kind = promoted(gate.kind(), up.kind());
    let (gate, up) = (gate.f_to_kind(kind)?, up.f_to_kind(kind)?);
    let width = gate.size().last().copied().unwrap_or(1);
    let gpu = gpu::gate(&gate, width, activation)?;
    if gpu.is_some() || (has_kernel(&gate) && has_kernel(&up) && gate.numel() > 0) {
        return Ok(apply(PairGlu { activation, gpu }, &[&gate, &up])?.remove(0));
    }
    Ok(activation.apply(&gate)?.f_mul(&up)?)
}

/// Returns `activation(x + bias)` over the last dimension, in one pass: the middle of GPT-2's feed-forward
/// block, whose first linear layer can then omit its bias.
///
/// `x (…, I)`, `bias (I,)`. Backward saves `x` and `bias`; the gradient of `bias` does not depend on
/// the number of threads.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if `bias` is not as long as a row of `x` or a dtype is not a floating-point
/// one.
pub fn bias_activation(x: &Tensor, bias: &Tensor, activation: Activation) -> Result<Tensor> {
    check_floating("bias_activation", "x", x)?;
    check_floating("bias_activation", "bias", bias)?;
    if x.dim() == 0 || bias.size() != x.size()[x.dim() - 1..] {
        return Err(wrong_shape(
            "bias_activation",
            "bias",
            bias,
            format!(
                "(I,), one element for each channel of x, whose shape is {:?}",
                x.size()
            ),
        ));
    }
    let kind = promoted(x.kind(), bias.kind());
    let (x, bias) = (x.f_to_kind(kind)?, bias.f_to_kind(kind)?);
    if has_kernel(&x) && has_kernel(&bias) && x.numel() > 0 {
        return Ok(apply(Biased { activation }, &[&x, &bias])?.remove(0));
    }
    Ok(activation.apply(&x.f_add(&bias)?)?)
}

struct JointGlu {
    activation: Activation,
    gpu: Option<overdrive_gpu::Gate>,
}

impl Function for JointGlu {
    const NAME: &'static str = "glu";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let x = inputs[0].f_contiguous()?;
        // Backward recomputes the activation, so no tensor of the size of the result is saved.
        context.save_for_backward(&[&x]);
        if let Some(kernels) = &self.gpu {
            return Ok(vec![kernels.joint(&x)?]);
        }
        let mut size = x.size();
        let width = half_width(&mut size);
        with_element!(x.kind(), T => {
            let mut y = Fresh::<T>::new(&size)?;
            gated(self.activation, Gated::Joint(elements(&x)?, width), y.elements_mut()?);
            Ok(vec![y.into_tensor()])
        })
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let ([x], Some(dy)) = (context.saved(), &gradients[0]) else {
            return Ok(vec![None]);
        };
        if let Some(kernels) = &self.gpu {
            return Ok(vec![Some(kernels.joint_backward(x, dy)?)]);
        }
        let dy = dy.f_contiguous()?;
        let width = half_width(&mut x.size());
        with_element!(x.kind(), T => {
            let mut dx = Fresh::<T>::new(&x.size())?;
            gated_backward(
                self.activation,
                Gated::Joint(elements(x)?, width),
                elements(&dy)?,
                GatedMut::Joint(dx.elements_mut()?, width),
            );
            Ok(vec![Some(dx.into_tensor())])
        })
    }
}

/// Returns the shape with half the last dimension, and that half.
fn half_width(size: &mut [i64]) -> usize {
    match size.last_mut() {
        Some(last) => {
            *last /= 2;
            *last as usize
        }
        None => unreachable!("a last dimension was asked for"),
    }
}

struct PairGlu {
    activation: Activation,
    gpu: Option<overdrive_gpu::Gate>,
}

impl Function for PairGlu {
    const NAME: &'static str = "glu_pair";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let (gate, up) = (inputs[0].f_contiguous()?, inputs[1].f_contiguous()?);
        context.save_for_backward(&[&gate, &up]);
        if let Some(kernels) = &self.gpu {
            return Ok(vec![kernels.pair(&gate, &up)?]);
        }
        with_element!(gate.kind(), T => {
            let mut y = Fresh::<T>::new(&gate.size())?;
            let x = Gated::Pair(elements(&gate)?, elements(&up)?);
            gated(self.activation, x, y.elements_mut()?);
            Ok(vec![y.into_tensor()])
        })
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let ([gate, up], Some(dy)) = (context.saved(), &gradients[0]) else {
            return Ok(vec![None, None]);
        };
        if let Some(kernels) = &self.gpu {
            let (d_gate, d_up) = kernels.pair_backward(gate, up, dy)?;
            return Ok(vec![Some(d_gate), Some(d_up)]);
        }
        let dy = dy.f_contiguous()?;
        with_element!(gate.kind(), T => {
            let mut d_gate = Fresh::<T>::new(&gate.size())?;
            let mut d_up = Fresh::<T>::new(&gate.size())?;
            gated_backward(
                self.activation,
                Gated::Pair(elements(gate)?, elements(up)?),
                elements(&dy)?,
                GatedMut::Pair(d_gate.elements_mut()?, d_up.elements_mut()?),
            );
            Ok(vec![Some(d_gate.into_tensor()), Some(d_up.into_tensor())])
        })
    }
}

struct Biased {
    activation: Activation,
}

impl Function for Biased {
    const NAME: &'static str = "bias_activation";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        let (x, bias) = (inputs[0].f_contiguous()?, inputs[1].f_contiguous()?);
        context.save_for_backward(&[&x, &bias]);
        with_element!(x.kind(), T => {
            let mut y = Fresh::<T>::new(&x.size())?;
            biased::<T>(self.activation, elements(&x)?, elements(&bias)?, y.elements_mut()?);
            Ok(vec![y.into_tensor()])
        })
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let ([x, bias], Some(dy)) = (context.saved(), &gradients[0]) else {
            return Ok(vec![None, None]);
        };
        let dy = dy.f_contiguous()?;
        with_element!(x.kind(), T => {
            let mut dx = Fresh::<T>::new(&x.size())?;
            let mut d_bias = Fresh::<f32>::new(&bias.size())?;
            biased_backward::<T>(
                self.activation,
                elements(x)?,
                elements(bias)?,
                elements(&dy)?,
                dx.elements_mut()?,
                d_bias.elements_mut()?,
            );
            let d_bias = d_bias.into_tensor().f_to_kind(bias.kind())?;
            Ok(vec![Some(dx.into_tensor()), Some(d_bias)])
        })
    }
}
