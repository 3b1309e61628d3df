use tch::Tensor;

use crate::linear::Linear;
use crate::parameters::ParameterMap;
use crate::{Activation, LlamaConfig, Result};

/// The gated feed-forward block: `down(act(gate(x)) · up(x))`.
///
/// Gate and up stay two products: as one of twice the width the step was 3 % slower (the two halves
/// of its output are strided, and their gradients have to be joined).
#[derive(Debug)]
pub(crate) struct GatedMlp {
    gate: Linear,
    up: Linear,
    down: Linear,
    activation: Activation,
}

impl GatedMlp {
    pub(crate) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
    ) -> Result<GatedMlp> {
        let mut linear = |name: &str| {
            Linear::take(
                parameters,
                &format!("{prefix}.mlp.{name}_proj"),
                config.mlp_bias,
            )
        };
        Ok(GatedMlp {
            gate: linear("gate")?,
            up: linear("up")?,
            down: linear("down")?,
            activation: Activation::from_name("hidden_act", &config.hidden_act)?,
        })
    }

    pub(crate) fn forward(&self, x: &Tensor) -> Result<Tensor> {
        let gate = self.activation.apply(&self.gate.forward(x)?)?;
        self.down.forward(&gate.f_mul(&self.up.forward(x)?)?)
    }
}
