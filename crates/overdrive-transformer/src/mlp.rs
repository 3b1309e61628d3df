use overdrive_fused::{Activation, glu, rows};
use overdrive_nn::{Linear, joint_forward_into};
use tch::Tensor;

use crate::activation::{activate, activation_named};
use crate::parameters::ParameterMap;
use crate::projections::{JointLinear, LinearVisitor, visit_linear};
use crate::{LlamaConfig, Result};

/// The gated feed-forward block: `down(act(gate(x)) · up(x))`.
#[derive(Debug)]
pub(crate) struct GatedMlp {
    gate_up: JointLinear,
    down: Linear,
    activation: Activation,
}

impl GatedMlp {
    /// Returns the names of the layers whose weights lie together, without `.weight`.
    pub(crate) fn joint_names(prefix: &str, config: &LlamaConfig) -> Vec<String> {
        let name = |part: &str| format!("{prefix}.mlp.{part}_proj");
        if config.fused_projections() {
            return vec![name("gate_up")];
        }
        vec![name("gate"), name("up")]
    }

    pub(crate) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
    ) -> Result<GatedMlp> {
        let (joint, bias) = (Self::joint_names(prefix, config), config.mlp_bias);
        Ok(GatedMlp {
            gate_up: JointLinear::take(parameters, &joint, bias)?,
            down: parameters.take_linear(&format!("{prefix}.mlp.down_proj"), bias)?,
            activation: activation_named("hidden_act", &config.hidden_act)?,
        })
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.gate_up.layers().chain([&self.down])
    }

    pub(crate) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        self.gate_up.visit(visit)?;
        visit_linear(&mut self.down, visit)
    }

    pub(crate) fn forward(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let inner = if fused {
            glu(&self.gate_up.forward_joint(x)?, self.activation)?
        } else {
            let inner = self.gate_up.outputs() as i64 / 2;
            let [gate, up] = self.gate_up.forward_each(x, [inner, inner])?;
            activate(self.activation, &gate)?.f_mul(&up)?
        };
        Ok(self.down.forward_with(&inner, fused)?)
    }

    /// Computes the block for rows of f32 in slices; `joint` and `inner` are memory to compute in.
    pub(crate) fn forward_rows(
        &self,
        x: &[f32],
        joint: &mut Vec<f32>,
        inner: &mut Vec<f32>,
        y: &mut [f32],
    ) -> Result<()> {
        let both = self.gate_up.outputs();
        let rows = x.len() / self.gate_up.inputs().max(1);
        joint.resize(rows * both, 0.0);
        inner.resize(rows * both / 2, 0.0);
        self.gate_up.forward_rows(x, joint)?;
        rows::glu(joint, both / 2, self.activation, inner)?;
        Ok(joint_forward_into(inner, &[&self.down], y)?)
    }
}
