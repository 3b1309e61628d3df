use tch::Tensor;

use crate::Result;
use crate::parameters::ParameterMap;
use crate::projections::ParameterVisitor;

/// Normalisation of the last dimension to mean 0 and variance 1, with a gain and a bias (Ba et al. 2016,
/// arXiv:1607.06450).
#[derive(Debug)]
pub(crate) struct LayerNorm {
    weight: Tensor,
    bias: Tensor,
    eps: f64,
}

impl LayerNorm {
    pub(crate) fn take(parameters: &mut ParameterMap, name: &str, eps: f64) -> Result<LayerNorm> {
        Ok(LayerNorm {
            weight: parameters.take(&format!("{name}.weight"))?,
            bias: parameters.take(&format!("{name}.bias"))?,
            eps,
        })
    }

    /// Lends `{name}.weight` and `{name}.bias`, which the visitor may replace.
    pub(crate) fn visit_parameters(
        &mut self,
        name: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        visit(&format!("{name}.weight"), &mut self.weight)?;
        visit(&format!("{name}.bias"), &mut self.bias)
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let width = self.weight.size()[0];
        Ok(x.f_layer_norm(
            [width],
            Some(&self.weight),
            Some(&self.bias),
            self.eps,
            // `cudnn_enable`, which libtorch ignores.
            true,
        )?)
    }
}

/// Drops elements of `x` with probability `p`.
pub(crate) fn dropped(x: Tensor, p: f64) -> Result<Tensor> {
    Ok(if p > 0.0 { x.f_dropout(p, true)? } else { x })
}
