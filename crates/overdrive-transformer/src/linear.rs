use tch::Tensor;

use crate::Result;
use crate::parameters::ParameterMap;

/// An affine map of the last dimension.
#[derive(Debug)]
pub(crate) struct Linear {
    /// `(out, in)`, or `(in, out)` where `transposed`.
    pub(crate) weight: Tensor,
    /// `(out,)`.
    pub(crate) bias: Option<Tensor>,
    /// The layout of GPT-2's `Conv1D`.
    transposed: bool,
}

impl Linear {
    /// `{name}.weight (out, in)`, and `{name}.bias` where there is one.
    pub(crate) fn take(parameters: &mut ParameterMap, name: &str, bias: bool) -> Result<Linear> {
        Ok(Linear {
            weight: parameters.take(&format!("{name}.weight"))?,
            bias: bias
                .then(|| parameters.take(&format!("{name}.bias")))
                .transpose()?,
            transposed: false,
        })
    }

    /// `{name}.weight (in, out)` and `{name}.bias`.
    pub(crate) fn take_conv1d(parameters: &mut ParameterMap, name: &str) -> Result<Linear> {
        Ok(Linear {
            transposed: true,
            ..Linear::take(parameters, name, true)?
        })
    }

    /// `x (…, in)` to `(…, out)`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        Ok(if self.transposed {
            x.f_linear(&self.weight.f_tr()?, self.bias.as_ref())?
        } else {
            x.f_linear(&self.weight, self.bias.as_ref())?
        })
    }
}
