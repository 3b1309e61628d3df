use overdrive_autograd::{BackwardContext, ForwardContext, Function, FunctionResult, apply};
use overdrive_gpu::NormGradients;
use overdrive_kernels::Element;
use tch::{Kind, Tensor};

use crate::error::{check_floating, wrong_shape};
use crate::kernel::rms_norm::{Saved, backward, forward};
use crate::tensors::promoted;
use crate::{Result, gpu};
use overdrive_kernels::tensors::{Fresh, elements, has_kernel};
use overdrive_kernels::with_element;

/// Returns `weight · x / sqrt(mean(x²) + eps)` over the last dimension, as `torch.nn.functional.rms_norm` does
/// (Zhang & Sennrich 2019, arXiv:1910.07467).
///
/// `x (…, C)`, `weight (C,)`; the result has the shape of `x` and the dtype that the two promote to.
/// The arithmetic is in f32, and results are rounded once. Backward saves `x` and one f32 for each
/// row. The gradient of `weight` does not depend on the number of threads.
///
/// # Errors
/// [`Error::Common`](crate::Error::Common) if `weight` is not as long as a row of `x`, or if a tensor is not
/// floating-point.
///
/// ```
/// use tch::Tensor;
/// let x = Tensor::from_slice2(&[[3.0_f32, 4.0], [0.0, 2.0]]);
/// let y = overdrive_fused::rms_norm(&x, &Tensor::from_slice(&[1.0_f32, 10.0]), 0.0)?;
/// assert!((y.double_value(&[0, 1]) - 40.0 / 12.5_f64.sqrt()).abs() < 1e-5);
/// # Ok::<(), overdrive_fused::Error>(())
/// ```
pub fn rms_norm(x: &Tensor, weight: &Tensor, eps: f64) -> Result<Tensor> {
    check("rms_norm", x, weight)?;
    let kind = promoted(x.kind(), weight.kind());
    let (x, weight) = (x.f_to_kind(kind)?, weight.f_to_kind(kind)?);
    let gpu = gpu::rms_norm(&x, false)?;
    let on_cpu = has_kernel(&x) && has_kernel(&weight) && x.numel() > 0;
    if gpu.is_none() && !on_cpu {
        return Ok(x.f_rms_norm(weight.size(), Some(&weight), eps)?);
    }
    Ok(apply(RmsNorm { eps, gpu }, &[&x, &weight])?.remove(0))
}

/// Returns `(rms_norm(sum), sum)` with `sum = x + residual`: the step from one block of a decoder to the next,
/// in one pass over memory in each direction.
///
/// `x` and `residual (…, C)`, `weight (C,)`. Both results have the dtype that the three promote to; the
/// norm is computed from the rounded sum. Backward takes the gradients of both results, and saves the sum and
/// one f32 for each row.
///
/// Under autocast on a GPU that uses the kernels of overdrive-gpu, one of the two may be f32, as is `weight`, and the
/// other in the dtype of autocast: the sum is f32, and the normalised values have the dtype of autocast, to which the
/// next linear layer would cast them. This saves two casts of all activations in each direction.
///
/// # Errors
/// As [`rms_norm`]; [`Error::Common`](crate::Error::Common) if the shapes of `x` and `residual` differ.
pub fn add_rms_norm(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    check("add_rms_norm", x, weight)?;
    check("add_rms_norm", residual, weight)?;
    if x.size() != residual.size() {
        return Err(wrong_shape(
            "add_rms_norm",
            "residual",
            residual,
            format!("{:?}, the shape of x", x.size()),
        ));
    }
    // A sum in either order: the one in f32 is the residual stream.
    let (stream, delta) = match x.kind() {
        Kind::Float => (x, residual),
        _ => (residual, x),
    };
    if let Some(kernels) = gpu::add_rms_norm_mixed(stream, delta, weight)? {
        let function = AddRmsNorm {
            eps,
            gpu: Some(kernels),
        };
        let mut both = apply(function, &[stream, delta, weight])?;
        let sum = both.remove(1);
        return Ok((both.remove(0), sum));
    }
    let kind = promoted(promoted(x.kind(), residual.kind()), weight.kind());
    let (x, weight) = (x.f_to_kind(kind)?, weight.f_to_kind(kind)?);
    let residual = residual.f_to_kind(kind)?;
    let gpu = gpu::rms_norm(&x, true)?;
    let all_have = [&x, &residual, &weight].into_iter().all(has_kernel);
    if gpu.is_none() && (!all_have || x.numel() == 0) {
        let sum = x.f_add(&residual)?;
        let normalised = sum.f_rms_norm(weight.size(), Some(&weight), eps)?;
        return Ok((normalised, sum));
    }
    let mut both = apply(AddRmsNorm { eps, gpu }, &[&x, &residual, &weight])?;
    let sum = both.remove(1);
    Ok((both.remove(0), sum))
}

fn check(function: &'static str, x: &Tensor, weight: &Tensor) -> Result<()> {
    for (name, tensor) in [("x", x), ("weight", weight)] {
        check_floating(function, name, tensor)?;
    }
    let width = x.size().last().copied();
    if width.is_none() || weight.size() != [width.unwrap_or(0)] {
        return Err(wrong_shape(
            function,
            "weight",
            weight,
            format!(
                "(C,), one element for each channel of x, whose shape is {:?}",
                x.size()
            ),
        ));
    }
    Ok(())
}

struct RmsNorm {
    eps: f64,
    gpu: Option<overdrive_gpu::RmsNorm>,
}

impl Function for RmsNorm {
    const NAME: &'static str = "rms_norm";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        if let Some(kernels) = &self.gpu {
            let out = kernels.forward(inputs[0], None, inputs[1], self.eps)?;
            context.save_for_backward(&[&out.x, inputs[1], &out.inverse]);
            return Ok(vec![out.y]);
        }
        let (x, weight) = (inputs[0].f_contiguous()?, inputs[1].f_contiguous()?);
        let (y, inverse) = with_element!(x.kind(), T => run::<T>(&x, None, &weight, self.eps)?);
        context.save_for_backward(&[&x, &weight, &inverse]);
        Ok(vec![y])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let Some(dy) = &gradients[0] else {
            return Ok(vec![None, None]);
        };
        let found = run_backward(self.gpu.as_ref(), context.saved(), dy, None)?;
        Ok(vec![Some(found.dx), Some(found.dw)])
    }
}

struct AddRmsNorm {
    eps: f64,
    gpu: Option<overdrive_gpu::RmsNorm>,
}

impl Function for AddRmsNorm {
    const NAME: &'static str = "add_rms_norm";

    fn forward(
        &mut self,
        context: &mut ForwardContext<'_>,
        inputs: &[&Tensor],
    ) -> FunctionResult<Vec<Tensor>> {
        // The gradient of an unused result stays `None` and is not added as a tensor of zeros.
        context.set_materialize_grads(false);
        if let Some(kernels) = &self.gpu {
            let out = kernels.forward(inputs[0], Some(inputs[1]), inputs[2], self.eps)?;
            context.save_for_backward(&[&out.x, inputs[2], &out.inverse]);
            return Ok(vec![out.y, out.x]);
        }
        let (x, residual) = (inputs[0].f_contiguous()?, inputs[1].f_contiguous()?);
        let weight = inputs[2].f_contiguous()?;
        let (y, inverse, sum) = with_element!(x.kind(), T => {
            let mut sum = Fresh::<T>::new(&x.size())?;
            let parts = (elements(&residual)?, sum.elements_mut()?);
            let (y, inverse) = run::<T>(&x, Some(parts), &weight, self.eps)?;
            (y, inverse, sum.into_tensor())
        });
        context.save_for_backward(&[&sum, &weight, &inverse]);
        Ok(vec![y, sum])
    }

    fn backward(
        &self,
        context: &BackwardContext,
        gradients: &[Option<Tensor>],
    ) -> FunctionResult<Vec<Option<Tensor>>> {
        let (dx, narrow, dw) = match (&gradients[0], &gradients[1]) {
            (None, None) => return Ok(vec![None, None, None]),
            (None, Some(d_sum)) => (d_sum.shallow_clone(), None, None),
            (Some(dy), d_sum) => {
                let found = run_backward(self.gpu.as_ref(), context.saved(), dy, d_sum.as_ref())?;
                (found.dx, found.narrow, Some(found.dw))
            }
        };
        // Both contribute equally to the sum, so one tensor is the gradient of both, unless their dtypes differ.
        let residual = narrow.unwrap_or_else(|| dx.shallow_clone());
        Ok(vec![Some(dx), Some(residual), dw])
    }
}

/// Returns the normalized rows and the reciprocal root mean square of each.
fn run<T: Element>(
    x: &Tensor,
    residual_and_sum: Option<(&[T], &mut [T])>,
    weight: &Tensor,
    eps: f64,
) -> Result<(Tensor, Tensor)> {
    let size = x.size();
    let mut y = Fresh::<T>::new(&size)?;
    let mut inverse = Fresh::<f32>::new(&size[..size.len() - 1])?;
    forward(
        elements(x)?,
        residual_and_sum,
        elements(weight)?,
        eps as f32,
        y.elements_mut()?,
        inverse.elements_mut()?,
    );
    Ok((y.into_tensor(), inverse.into_tensor()))
}

/// Returns the gradients of the rows, and of the weight in its dtype.
fn run_backward(
    gpu: Option<&overdrive_gpu::RmsNorm>,
    saved: &[Tensor],
    dy: &Tensor,
    extra: Option<&Tensor>,
) -> FunctionResult<NormGradients> {
    let [x, weight, inverse] = saved else {
        unreachable!("forward saves three tensors")
    };
    if let Some(kernels) = gpu {
        let found = kernels.backward(x, weight, inverse, dy, extra)?;
        let dw = found.dw.f_to_kind(weight.kind())?;
        return Ok(NormGradients { dw, ..found });
    }
    let dy = dy.f_contiguous()?;
    let extra = extra.map(Tensor::f_contiguous).transpose()?;
    with_element!(x.kind(), T => {
        let mut dx = Fresh::<T>::new(&x.size())?;
        let mut dw = Fresh::<f32>::new(&weight.size())?;
        let saved = Saved {
            x: elements::<T>(x)?,
            weight: elements(weight)?,
            inverse: elements(inverse)?,
        };
        let extra = extra.as_ref().map(elements).transpose()?;
        backward(saved, elements(&dy)?, extra, dx.elements_mut()?, dw.elements_mut()?);
        let dw = dw.into_tensor().f_to_kind(weight.kind())?;
        Ok(NormGradients {
            dx: dx.into_tensor(),
            narrow: None,
            dw,
        })
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dtypes_meet_as_in_libtorch() {
        assert_eq!(promoted(Kind::Half, Kind::BFloat16), Kind::Float);
        assert_eq!(promoted(Kind::BFloat16, Kind::Float), Kind::Float);
        assert_eq!(promoted(Kind::Double, Kind::Half), Kind::Double);
        assert_eq!(promoted(Kind::Half, Kind::Half), Kind::Half);
    }
}
