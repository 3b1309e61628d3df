use overdrive_quantization::{is_observed, joint_linear_into};
use tch::Tensor;

use crate::{Linear, LinearWeight, Result, joint_forward};

/// Computes what [`joint_forward`] does for rows of f32 in slices: `y (rows, ΣO)` of `x (rows, I)`, without a graph
/// for autograd. A decoder that keeps its buffers computes its steps by it.
///
/// Weights for which there is no kernel on slices, and adapters that are active, are computed on tensors, and copied.
/// Returns `false` then.
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
/// As [`Linear::forward`]; [`Error::Common`](crate::Error::Common) for slices that do not fit.
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

/// Computes the layers by the kernels on slices; returns `false` if there is none for one of them.
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
