//! The choice of the GPU kernels of overdrive-gpu; `None` if a function runs libtorch's operators or CPU kernels.

use overdrive_gpu::{
    CrossEntropy, Fp8Format, Fp8Matrix, Gate, GateActivation, Kernels, LossTerms, RmsNorm, Rotary,
};
use overdrive_sys::autocast;
use tch::{Kind, Tensor};

use crate::{Activation, CrossEntropyOptions, Result};

/// Returns the kernels for the device of a tensor that is not empty.
fn kernels(tensor: &Tensor) -> Result<Option<&'static Kernels>> {
    match tensor.numel() {
        0 => Ok(None),
        _ => Ok(overdrive_gpu::kernels(tensor.device())?),
    }
}

pub(crate) fn rms_norm(x: &Tensor, add: bool) -> Result<Option<RmsNorm>> {
    let width = x.size().last().copied().unwrap_or(1);
    match kernels(x)? {
        Some(kernels) => Ok(kernels.rms_norm(x.kind(), width, add)?),
        None => Ok(None),
    }
}

/// Returns the kernels that add `residual` in the dtype of autocast to `x` in f32 and normalise the sum, as mixed precision
/// has them.
pub(crate) fn add_rms_norm_mixed(
    x: &Tensor,
    residual: &Tensor,
    weight: &Tensor,
) -> Result<Option<RmsNorm>> {
    let (device, low) = (x.device(), residual.kind());
    let is_wide = |tensor: &Tensor| tensor.kind() == Kind::Float && tensor.device() == device;
    let is_mixed = low != Kind::Float && is_wide(x) && is_wide(weight);
    if !is_mixed || residual.device() != device {
        return Ok(None);
    }
    let Some(kernels) = kernels(x)? else {
        return Ok(None);
    };
    match autocast::state(device) {
        Ok(state) if state.enabled && state.dtype == low => {
            let width = x.size().last().copied().unwrap_or(1);
            Ok(kernels.add_rms_norm_mixed(low, width)?)
        }
        _ => Ok(None),
    }
}

/// Returns the kernels for rows of `width` gates.
pub(crate) fn gate(x: &Tensor, width: i64, activation: Activation) -> Result<Option<Gate>> {
    let activation = match activation {
        Activation::Silu => GateActivation::Silu,
        Activation::Gelu => GateActivation::Gelu,
        Activation::GeluTanh => GateActivation::GeluTanh,
        Activation::Relu => GateActivation::Relu,
    };
    match kernels(x)? {
        Some(kernels) => Ok(kernels.gate(x.kind(), width, activation)?),
        None => Ok(None),
    }
}

/// Returns the kernels for heads of `dim` channels.
pub(crate) fn rotary(
    x: &Tensor,
    dim: i64,
    pairs: i64,
    interleaved: bool,
) -> Result<Option<Rotary>> {
    match kernels(x)? {
        Some(kernels) => Ok(kernels.rotary(x.kind(), dim, pairs, interleaved)?),
        None => Ok(None),
    }
}

/// Returns the kernels for rows of logits.
pub(crate) fn cross_entropy(
    logits: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<Option<CrossEntropy>> {
    let classes = logits.size().last().copied().unwrap_or(1);
    let terms = LossTerms {
        ignore_index: options.ignore_index,
        label_smoothing: options.label_smoothing,
        z_loss: options.z_loss,
        softcap: options.softcap,
    };
    match kernels(logits)? {
        Some(kernels) => Ok(kernels.cross_entropy(logits.kind(), classes, terms)?),
        None => Ok(None),
    }
}

/// Returns a matrix in FP8 by our kernels.
pub(crate) fn to_fp8(x: &Tensor, format: Fp8Format, columns: bool) -> Result<Option<Fp8Matrix>> {
    match kernels(x)? {
        Some(kernels) => Ok(kernels.to_fp8(x, format, columns)?),
        None => Ok(None),
    }
}
