use overdrive_sys::autocast::WithoutFp8;
use tch::Tensor;

use crate::{Linear, LinearWeight, Result};

/// Computes the outputs of several layers of the same `x` side by side, `(…, ΣO)`.
///
/// It takes one matmul if all weights are dense, or all quantized, plus one for all adapters together. Nothing is
/// copied if the dense weights are adjacent in memory (see
/// [`overdrive_fused::joint_linear`]).
///
/// ```
/// use overdrive_nn::{Linear, joint_forward};
/// use tch::{Device, Kind, Tensor};
///
/// # fn main() -> overdrive_nn::Result<()> {
/// let linear = |outputs| Linear::dense(Tensor::ones([outputs, 8], (Kind::Float, Device::Cpu)), None);
/// let (query, key, value) = (linear(8)?, linear(4)?, linear(4)?);
/// let x = Tensor::ones([2, 8], (Kind::Float, Device::Cpu));
/// assert_eq!(joint_forward(&x, &[&query, &key, &value])?.size(), [2, 16]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// As [`Linear::forward`].
pub fn joint_forward(x: &Tensor, layers: &[&Linear]) -> Result<Tensor> {
    layers.iter().try_for_each(|layer| layer.observe(x))?;
    let Some(adapter) = layers.iter().find_map(|layer| layer.active_adapter()) else {
        return joint_base(x, layers);
    };
    if let Some(y) = adapter.forward_joint(layers, x)? {
        return Ok(y);
    }
    // Not `forward`: the inputs were reported above.
    let each = layers.iter().map(|layer| layer.compute(x, true));
    Ok(Tensor::f_cat(&each.collect::<Result<Vec<_>>>()?, -1)?)
}

/// Computes what [`joint_forward`] does, but without active adapters: from the weights and biases that are
/// [in use](Linear::in_use), in bf16 instead of FP8 if any layer is [`without_fp8`](Linear::without_fp8). An
/// implementation of [`Adapter::forward_joint`](crate::Adapter::forward_joint) adds its output to the result.
///
/// # Errors
/// As [`Linear::forward`].
pub fn joint_base(x: &Tensor, layers: &[&Linear]) -> Result<Tensor> {
    let without_fp8 = layers.iter().any(|layer| !layer.has_fp8());
    let _bf16 = without_fp8.then(WithoutFp8::enter);
    let in_use: Vec<(&LinearWeight, Option<&Tensor>)> =
        layers.iter().map(|layer| layer.in_use()).collect();
    let quantized = in_use.iter().map(|(weight, _)| match weight {
        LinearWeight::Quantized(weight) => Some(weight),
        LinearWeight::Dense { .. } => None,
    });
    if let Some(weights) = quantized.collect::<Option<Vec<_>>>() {
        let biases: Vec<_> = in_use.iter().map(|(_, bias)| *bias).collect();
        return Ok(overdrive_quantization::joint_linear(x, &weights, &biases)?);
    }
    let dense = in_use.iter().map(|(weight, _)| match weight {
        LinearWeight::Dense {
            weight,
            transposed: false,
        } => Some(weight),
        _ => None,
    });
    let weights = dense.collect::<Option<Vec<&Tensor>>>();
    let biases: Vec<&Tensor> = in_use.iter().filter_map(|(_, bias)| *bias).collect();
    match weights {
        // The fused kernel takes a bias for each layer or none at all.
        Some(weights) if biases.is_empty() || biases.len() == layers.len() => {
            let biases = (!biases.is_empty()).then_some(biases.as_slice());
            Ok(overdrive_fused::joint_linear(x, &weights, biases)?)
        }
        // Mixed weights, Conv1D layouts, or biases for only some layers: one matmul for each layer.
        _ => {
            let each = in_use
                .iter()
                .map(|(weight, bias)| weight.forward(x, *bias, true));
            Ok(Tensor::f_cat(&each.collect::<Result<Vec<_>>>()?, -1)?)
        }
    }
}
