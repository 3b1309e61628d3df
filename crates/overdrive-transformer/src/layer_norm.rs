use tch::Tensor;

use crate::Result;
use crate::parameters::ParameterMap;
use crate::projections::ParameterVisitor;

/// A layer norm: `(x - mean) / sqrt(variance + eps) · weight + bias` (Ba et al. 2016, arXiv:1607.06450).
#[derive(Debug)]
pub(crate) struct LayerNorm {
    weight: Tensor,
    bias: Option<Tensor>,
    eps: f64,
}

impl LayerNorm {
    /// Takes `{name}.weight (C,)`, and `{name}.bias (C,)` if `bias`.
    pub(crate) fn take(
        parameters: &mut ParameterMap,
        name: &str,
        bias: bool,
        eps: f64,
    ) -> Result<LayerNorm> {
        let weight = parameters.take(&format!("{name}.weight"))?;
        let bias = bias.then(|| parameters.take(&format!("{name}.bias")));
        Ok(LayerNorm {
            weight,
            bias: bias.transpose()?,
            eps,
        })
    }

    /// Normalises the last dimension of `x (…, C)`.
    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let width = self.weight.size()[0];
        Ok(x.f_layer_norm(
            [width],
            Some(&self.weight),
            self.bias.as_ref(),
            self.eps,
            // `cudnn_enable`, which libtorch ignores.
            true,
        )?)
    }

    pub(crate) fn visit_parameters(
        &mut self,
        name: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        visit(&format!("{name}.weight"), &mut self.weight)?;
        match &mut self.bias {
            Some(bias) => visit(&format!("{name}.bias"), bias),
            None => Ok(()),
        }
    }
}
