//! Unscaling the gradients of one optimizer, and checking them for infinities.

use std::collections::HashMap;

use overdrive_optim::Optimizer;
use overdrive_sys::{amp, grad};
use tch::{Device, Kind, Tensor};

use crate::{Error, Result};

/// The handling of fp16 gradients, in which unscaled values would underflow again.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum HalfGradients {
    Allow,
    Refuse,
}

/// Multiplies the gradients of `optimizer` by `inverse`, with one kernel for each device and dtype. Returns a
/// flag for each device: 1 if a gradient contained an infinity or a NaN.
pub(crate) fn unscale_gradients(
    optimizer: &(impl Optimizer + ?Sized),
    inverse: &Tensor,
    half: HalfGradients,
) -> Result<Vec<(Device, Tensor)>> {
    let mut groups: HashMap<(Device, Kind), Vec<Tensor>> = HashMap::new();
    // All are checked before any is changed.
    let mut gradients = Vec::new();
    for parameter in optimizer.parameters() {
        let gradient = parameter.f_grad()?;
        if !gradient.defined() {
            continue;
        }
        if gradient.kind() == Kind::Half && half == HalfGradients::Refuse {
            return Err(Error::HalfGradients);
        }
        gradients.push((parameter, gradient));
    }
    for (parameter, gradient) in gradients {
        let values = values_of(&parameter, gradient)?;
        groups
            .entry((values.device(), values.kind()))
            .or_default()
            .push(values);
    }
    let mut flags: Vec<(Device, Tensor)> = Vec::new();
    // The kernel takes tensors of one device and one dtype; the flag is one per device.
    for ((device, _), gradients) in &groups {
        let known = flags.iter().position(|(on_device, _)| on_device == device);
        let flag = match known {
            Some(index) => flags[index].1.shallow_clone(),
            None => {
                let flag = Tensor::f_zeros([] as [i64; 0], (Kind::Float, *device))?;
                flags.push((*device, flag.shallow_clone()));
                flag
            }
        };
        amp::non_finite_check_and_unscale(gradients, &flag, &on(inverse, *device)?)?;
    }
    Ok(flags)
}

/// Returns the elements of a gradient: itself, or the values of a sparse one. Duplicate entries of a sparse fp16
/// gradient are summed first, since their sum may overflow where they do not.
fn values_of(parameter: &Tensor, gradient: Tensor) -> Result<Tensor> {
    if !gradient.is_sparse() {
        return Ok(gradient);
    }
    let gradient = if gradient.kind() == Kind::Half {
        let coalesced = gradient.f_coalesce()?;
        grad::set(parameter, &coalesced)?;
        coalesced
    } else {
        gradient
    };
    Ok(gradient.f_internal_values()?)
}

/// Returns `tensor` on `device`, itself if it is there already. Does not wait for the device.
pub(crate) fn on(tensor: &Tensor, device: Device) -> Result<Tensor> {
    if tensor.device() == device {
        return Ok(tensor.shallow_clone());
    }
    Ok(tensor.f_to_device_(device, tensor.kind(), true, false)?)
}
