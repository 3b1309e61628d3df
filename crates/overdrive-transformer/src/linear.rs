use tch::Tensor;

use crate::parameters::ParameterMap;
use crate::{Error, Result};

/// An affine map of the last dimension.
#[derive(Debug)]
pub(crate) struct Linear {
    /// `(out, in)`, or `(in, out)` where `transposed`.
    weight: Tensor,
    /// `(out,)`.
    bias: Option<Tensor>,
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
    pub(crate) fn forward(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        if self.transposed {
            return Ok(x.f_linear(&self.weight.f_tr()?, self.bias.as_ref())?);
        }
        if fused {
            return Ok(overdrive_fused::linear(
                x,
                &self.weight,
                self.bias.as_ref(),
            )?);
        }
        Ok(x.f_linear(&self.weight, self.bias.as_ref())?)
    }
}

/// Several affine maps of one input.
#[derive(Debug)]
pub(crate) struct JointLinear(Vec<Linear>);

impl JointLinear {
    pub(crate) fn take(
        parameters: &mut ParameterMap,
        names: &[String],
        bias: bool,
    ) -> Result<JointLinear> {
        let maps = names
            .iter()
            .map(|name| Linear::take(parameters, name, bias));
        Ok(JointLinear(maps.collect::<Result<_>>()?))
    }

    /// All results side by side, `(…, Σ out)`, by one product.
    pub(crate) fn forward_joint(&self, x: &Tensor) -> Result<Tensor> {
        let weights: Vec<&Tensor> = self.0.iter().map(|map| &map.weight).collect();
        let biases: Vec<&Tensor> = self.0.iter().filter_map(|map| map.bias.as_ref()).collect();
        let biases = (!biases.is_empty()).then_some(biases.as_slice());
        Ok(overdrive_fused::joint_linear(x, &weights, biases)?)
    }

    /// The results one by one, by libtorch's operator.
    pub(crate) fn forward_each<const N: usize>(&self, x: &Tensor) -> Result<[Tensor; N]> {
        let each = self.0.iter().map(|map| map.forward(x, false));
        let each: Vec<Tensor> = each.collect::<Result<_>>()?;
        each.try_into().map_err(|each: Vec<_>| Error::BadConfig {
            key: "a joint linear map".to_owned(),
            found: format!("{} parts", each.len()),
            expected: format!("{N} (please report this)"),
        })
    }
}
