use overdrive_quantization::QuantizedWeight;
use tch::Tensor;

use crate::{BaseWeight, Result};

/// A linear map of the last dimension, with any number of adapters beside its weight.
#[derive(Debug)]
pub struct AdaptedLinear {
    base: BaseWeight,
    /// `(O,)`.
    bias: Option<Tensor>,
}

impl AdaptedLinear {
    /// Of `weight (O, I)` and `bias (O,)`. The tensors are shared, not copied.
    pub fn dense(weight: Tensor, bias: Option<Tensor>) -> AdaptedLinear {
        AdaptedLinear::new(
            BaseWeight::Dense {
                weight,
                transposed: false,
            },
            bias,
        )
    }

    /// Of a packed weight and `bias (O,)`.
    pub fn quantized(weight: QuantizedWeight, bias: Option<Tensor>) -> AdaptedLinear {
        AdaptedLinear::new(BaseWeight::Quantized(weight), bias)
    }

    /// Of any weight and `bias (O,)`.
    pub fn new(base: BaseWeight, bias: Option<Tensor>) -> AdaptedLinear {
        AdaptedLinear { base, bias }
    }

    /// The weight without its adapters.
    pub fn base(&self) -> &BaseWeight {
        &self.base
    }

    /// The weight `(O, I)`, where it is dense and the map is nothing else: no adapter is active beside
    /// it.
    pub fn dense_weight(&self) -> Option<&Tensor> {
        match &self.base {
            BaseWeight::Dense {
                weight,
                transposed: false,
            } if self.bias.is_none() => Some(weight),
            _ => None,
        }
    }

    /// Exchanges the weight for another of the same map, and returns the old one.
    pub fn replace_base(&mut self, base: BaseWeight) -> BaseWeight {
        std::mem::replace(&mut self.base, base)
    }

    /// The bias.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// `x (…, I)` to `(…, O)`: the base and all active adapters. `fused`: whether products of dense
    /// weights are made by overdrive-fused, or by libtorch's operator.
    ///
    /// # Errors
    /// When shapes do not fit or libtorch fails.
    pub fn forward(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let bias = self.bias.as_ref();
        Ok(match &self.base {
            BaseWeight::Dense {
                weight,
                transposed: true,
            } => x.f_linear(&weight.f_tr()?, bias)?,
            BaseWeight::Dense { weight, .. } if fused => overdrive_fused::linear(x, weight, bias)?,
            BaseWeight::Dense { weight, .. } => x.f_linear(weight, bias)?,
            BaseWeight::Quantized(weight) => overdrive_quantization::linear(x, weight, bias)?,
        })
    }
}

/// The results of several maps of the same `x` side by side, `(…, ΣO)`: one product where all bases are
/// dense, or all quantized.
///
/// # Errors
/// As [`AdaptedLinear::forward`].
pub fn joint_forward(x: &Tensor, maps: &[&AdaptedLinear]) -> Result<Tensor> {
    let dense = |map: &&AdaptedLinear| match &map.base {
        BaseWeight::Dense {
            weight,
            transposed: false,
        } => Some(weight.shallow_clone()),
        _ => None,
    };
    let quantized = maps.iter().map(|map| match &map.base {
        BaseWeight::Quantized(weight) => Some(weight),
        BaseWeight::Dense { .. } => None,
    });
    if let Some(weights) = quantized.collect::<Option<Vec<_>>>() {
        let biases: Vec<_> = maps.iter().map(|map| map.bias.as_ref()).collect();
        return Ok(overdrive_quantization::joint_linear(x, &weights, &biases)?);
    }
    let biases: Vec<&Tensor> = maps.iter().filter_map(|map| map.bias.as_ref()).collect();
    let weights = maps.iter().map(dense).collect::<Option<Vec<_>>>();
    match weights {
        Some(weights) if biases.is_empty() || biases.len() == maps.len() => {
            let weights: Vec<&Tensor> = weights.iter().collect();
            let biases = (!biases.is_empty()).then_some(biases.as_slice());
            Ok(overdrive_fused::joint_linear(x, &weights, biases)?)
        }
        _ => {
            let each = maps.iter().map(|map| map.forward(x, true));
            Ok(Tensor::f_cat(&each.collect::<Result<Vec<_>>>()?, -1)?)
        }
    }
}
