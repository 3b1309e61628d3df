//! The names of activations. A new one begins at [`Activation`] in overdrive-fused.

use overdrive_fused::Activation;

use crate::{Error, Result};

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
