use overdrive_fused::Activation;
use tch::Tensor;

use crate::{Error, Result};

/// Returns the activation that transformers calls `name`. `key` is the config key for an error.
pub(crate) fn activation_named(key: &str, name: &str) -> Result<Activation> {
    match name {
        "silu" | "swish" => Ok(Activation::Silu),
        "gelu" => Ok(Activation::Gelu),
        // transformers has three names for one tanh approximation.
        "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Activation::GeluTanh),
        "relu" => Ok(Activation::Relu),
        other => Err(Error::Unsupported {
            key: key.to_owned(),
            found: format!("{other:?}"),
            supported: "silu, gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, relu".to_owned(),
        }),
    }
}

/// Applies the activation by libtorch's operator.
pub(crate) fn activate(activation: Activation, x: &Tensor) -> Result<Tensor> {
    match activation {
        Activation::Silu => Ok(x.f_silu()?),
        Activation::Gelu => Ok(x.f_gelu("none")?),
        Activation::GeluTanh => Ok(x.f_gelu("tanh")?),
        Activation::Relu => Ok(x.f_relu()?),
        other => Err(Error::Unsupported {
            key: "activation".to_owned(),
            found: format!("{other:?}"),
            supported: "Silu, Gelu, GeluTanh, Relu".to_owned(),
        }),
    }
}
