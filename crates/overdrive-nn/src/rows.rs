use overdrive_quantization::{is_observed, joint_linear_into};
use tch::Tensor;

use crate::{Linear, LinearWeight, Result, joint_forward};

/// Computes [`joint_forward`] on f32 slices, `y (rows, ΣO)` from `x (rows, I)`, without an autograd graph. It is for
/// decoders that reuse their buffers.
///
/// Returns `true` if the kernels on slices computed the result. If a weight has no such kernel or an adapter is
/// active, the result is computed on tensors and copied, and the function returns `false`.
///
/// ```
/// use overdrive_nn::{Linear, joint_forward_into};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> overdrive_nn::Result<()> {
/// let layer = Linear::dense(Tensor::ones([3, 8], (Kind::Float, Device::Cpu)), None)?;
/// let mut y = [0.0; 3];
/// let on_slices = joint_forward_into(&[0.5; 8], &[&layer], &mut y)?;
/// assert!(on_slices);
/// assert_eq!(y, [4.0; 3]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`Linear::forward`]; [`Error::Common`](crate::Error::Common) for slices of the wrong length.
pub fn joint_forward_into(x: &[f32], layers: &[&Linear], y: &mut [f32]) -> Result<bool> {
    let plain = |layer: &&Linear| layer.active_adapter().is_none();
    if !is_observed() && layers.iter().all(plain) && kernels(x, layers, y)? {
        return Ok(true);
    }
    let inputs = layers.first().map_or(1, |layer| layer.in_use().0.size()[1]);
    let rows = Tensor::f_from_slice(x)?.f_view([-1, inputs])?;
    let result = joint_forward(&rows, layers)?.f_contiguous()?;
    let result = overdrive_fused::rows::elements(&result)?.to_vec();
    if result.len() != y.len() {
        let expected = format!("({},), the outputs of all rows", result.len());
        return Err(overdrive_core::Error::shape("y", [y.len() as i64], expected).into());
    }
    y.copy_from_slice(&result);
    Ok(false)
}

/// Computes the layers with the kernels on slices; returns `false` if one of the layers has no such kernel.
fn kernels(x: &[f32], layers: &[&Linear], y: &mut [f32]) -> Result<bool> {
    let (mut quantized, mut dense) = (Vec::new(), Vec::new());
    for layer in layers {
        match layer.in_use() {
            (LinearWeight::Quantized(weight), bias) => quantized.push((weight, bias)),
            (
                LinearWeight::Dense {
                    weight,
                    transposed: false,
                },
                bias,
            ) => dense.push((weight, bias)),
            _ => return Ok(false),
        }
    }
    match (quantized.is_empty(), dense.is_empty()) {
        (false, true) => Ok(joint_linear_into(x, &quantized, y)?),
        (true, false) => Ok(overdrive_fused::rows::joint_linear(x, &dense, y)?),
        // Mixed weights.
        _ => Ok(false),
    }
}
