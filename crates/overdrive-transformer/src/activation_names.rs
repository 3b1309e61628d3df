//! The names of activations. A new one begins at [`Activation`] in overdrive-fused.

use overdrive_fused::Activation;
use tch::Tensor;

use crate::{Error, Result};

/// The activation of a dense layer over pooled states, which may be tanh, too.
#[derive(Debug, Clone, Copy)]
pub(crate) enum DenseActivation {
    Tanh,
    Named(Activation),
}

impl DenseActivation {
    pub(crate) fn apply(self, x: &Tensor) -> Result<Tensor> {
        match self {
            DenseActivation::Tanh => Ok(x.f_tanh()?),
            DenseActivation::Named(activation) => Ok(activation.apply(x)?),
        }
    }
}

/// Returns the activation that transformers calls `name`. `key` is the config key for an error.
pub(crate) fn activation_named(key: &str, name: &str) -> Result<Activation> {
    match name {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" => Ok(Activation::Gelu),
        // transformers has three names for one tanh approximation.
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Activation::GeluTanh),
        "relu" => Ok(Activation::Relu),
        other => Err(Error::unsupported(
            key,
            format!("{other:?}"),
            "silu, gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, relu",
        )),
    }
}
