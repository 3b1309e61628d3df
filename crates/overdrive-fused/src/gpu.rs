//! The choice of the GPU kernels of overdrive-gpu; `None` if a function runs libtorch's operators or CPU kernels.

use overdrive_gpu::{CrossEntropy, Fp8Format, Fp8Matrix, Gate, Kernels, RmsNorm, Rotary};
use overdrive_sys::autocast;
use tch::{Device, Kind, Tensor};

use crate::{Activation, CrossEntropyOptions, Result};

/// Returns what `find` finds among the kernels for the device of a tensor that is not empty.
fn found<T>(
    tensor: &Tensor,
    find: impl FnOnce(&'static Kernels) -> overdrive_gpu::Result<Option<T>>,
) -> Result<Option<T>> {
    if tensor.numel() == 0 {
        return Ok(None);
    }
    match overdrive_gpu::kernels(tensor.device())? {
        Some(kernels) => Ok(find(kernels)?),
        None => Ok(None),
    }
}

pub(crate) fn rms_norm(x: &Tensor, add: bool) -> Result<Option<RmsNorm>> {
    found(x, |kernels| kernels.rms_norm(x.kind(), width_of(x), add))
}

fn width_of(x: &Tensor) -> i64 {
    x.size().last().copied().unwrap_or(1)
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
    found(x, |kernels| match autocast::state(device) {
        Ok(state) if state.enabled && state.dtype == low => {
            kernels.add_rms_norm_mixed(low, width_of(x))
        }
        _ => Ok(None),
    })
}

/// Returns the kernels for rows of `width` gates.
pub(crate) fn gate(x: &Tensor, width: i64, activation: Activation) -> Result<Option<Gate>> {
    found(x, |kernels| kernels.gate(x.kind(), width, activation))
}

/// Returns the kernels for heads of `dim` channels.
pub(crate) fn rotary(
    x: &Tensor,
    dim: i64,
    pairs: i64,
    interleaved: bool,
) -> Result<Option<Rotary>> {
    found(x, |kernels| {
        kernels.rotary(x.kind(), dim, pairs, interleaved)
    })
}

/// Returns the kernels for rows of logits.
pub(crate) fn cross_entropy(
    logits: &Tensor,
    options: &CrossEntropyOptions,
) -> Result<Option<CrossEntropy>> {
    found(logits, |kernels| {
        kernels.cross_entropy(logits.kind(), width_of(logits), options.terms())
    })
}

/// Returns `true` if [`cross_entropy`] finds kernels for logits on a device.
#[doc(hidden)]
pub fn has_loss_kernel(device: Device) -> bool {
    matches!(overdrive_gpu::kernels(device), Ok(Some(_)))
}

/// Returns a matrix in FP8 by our kernels.
pub(crate) fn to_fp8(x: &Tensor, format: Fp8Format, columns: bool) -> Result<Option<Fp8Matrix>> {
    found(x, |kernels| kernels.to_fp8(x, format, columns))
}
