use tch::Tensor;

use crate::{Error, Result};

/// The non-linearity of a feed-forward block, by transformers' names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[non_exhaustive]
pub enum Activation {
    /// `silu` or `swish`: x · sigmoid(x).
    Silu,
    /// `gelu`: the exact form with erf.
    Gelu,
    /// `gelu_new`, `gelu_pytorch_tanh` or `gelu_fast`: the tanh approximation.
    GeluTanh,
    /// `relu`.
    Relu,
}

impl Activation {
    /// The activation that transformers calls `name`; `key` names the config key in an error.
    pub(crate) fn from_name(key: &str, name: &str) -> Result<Activation> {
        match name {
            "silu" | "swish" => Ok(Activation::Silu),
            "gelu" => Ok(Activation::Gelu),
            "gelu_new" | "gelu_pytorch_tanh" | "gelu_fast" => Ok(Activation::GeluTanh),
            "relu" => Ok(Activation::Relu),
            other => Err(Error::Unsupported {
                key: key.to_owned(),
                found: format!("{other:?}"),
                supported: "silu, gelu, gelu_new, gelu_pytorch_tanh, gelu_fast, relu".to_owned(),
            }),
        }
    }

    /// Applies it element by element.
    pub(crate) fn apply(self, x: &Tensor) -> Result<Tensor> {
        Ok(match self {
            Activation::Silu => x.f_silu()?,
            Activation::Gelu => x.f_gelu("none")?,
            Activation::GeluTanh => x.f_gelu("tanh")?,
            Activation::Relu => x.f_relu()?,
        })
    }
}
