use overdrive_fused::Activation;
use overdrive_nn::Linear;
use tch::Tensor;

use crate::Result;
use crate::layer_norm::LayerNorm;
use crate::parameters::ParameterMap;

/// The merger of adjacent patches into one token of the text model's width.
#[derive(Debug)]
pub(super) struct Merger {
    norm: LayerNorm,
    /// If `true`, the norm is of joined patches.
    after_join: bool,
    linears: [Linear; 2],
    /// The width of joined patches.
    width: i64,
}

impl Merger {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        name: &str,
        width: i64,
        after_join: bool,
    ) -> Result<Merger> {
        let mut linear = |part: &str| parameters.take_linear(&format!("{name}.{part}"), true);
        Ok(Merger {
            linears: [linear("linear_fc1")?, linear("linear_fc2")?],
            norm: LayerNorm::take(parameters, &format!("{name}.norm"), true, super::tower::EPS)?,
            after_join,
            width,
        })
    }

    /// Computes the tokens of patches `(N, C)`.
    pub(super) fn forward(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let joined = |x: &Tensor| x.f_reshape([-1, self.width]);
        let x = match self.after_join {
            true => self.norm.forward(&joined(x)?)?,
            false => joined(&self.norm.forward(x)?)?,
        };
        let inner = self.linears[0].forward_with(&x, fused)?;
        let inner = Activation::Gelu.apply(&inner)?;
        Ok(self.linears[1].forward_with(&inner, fused)?)
    }
}
