//! The expert of a mixture that computes every token.

use overdrive_nn::{Linear, joint_forward_into};
use tch::Tensor;

use super::names::{shared_gate_module, shared_modules};
use crate::Result;
use crate::config::LlamaConfig;
use crate::feed_forward::GatedMlp;
use crate::parameters::ParameterMap;
use crate::projections::{LinearVisitor, visit_linear};
use crate::sigmoid_gates::{scale_by_sigmoids, sigmoid};

/// A feed-forward block whose output is multiplied by a gate of each token, `sigmoid(gate(x)) · mlp(x)` (Qwen2-MoE), or
/// that has no gate (DeepSeek).
#[derive(Debug)]
pub(super) struct SharedExpert {
    mlp: GatedMlp,
    gate: Option<Linear>,
}

impl SharedExpert {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
    ) -> Result<SharedExpert> {
        let [gate, up, down] = shared_modules(config.family, prefix);
        let has_gate = !config.family.is_deepseek();
        let own_gate = has_gate.then(|| parameters.take_linear(&shared_gate_module(prefix), false));
        Ok(SharedExpert {
            mlp: GatedMlp::take(parameters, &[gate, up], &down, config)?,
            gate: own_gate.transpose()?,
        })
    }

    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.mlp.layers().chain(&self.gate)
    }

    pub(super) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        self.mlp.visit(visit)?;
        self.gate
            .iter_mut()
            .try_for_each(|gate| visit_linear(gate, visit))
    }

    /// Computes the block for the rows `x (N, C)`.
    pub(super) fn forward(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let y = self.mlp.forward(x, fused)?;
        match &self.gate {
            None => Ok(y),
            Some(gate) => Ok(y.f_mul(&sigmoid(&gate.forward_with(x, fused)?, fused)?)?),
        }
    }

    /// Adds the block for rows of `width` elements of f32 in slices to `y`; `joint` and `inner` are scratch buffers.
    /// Returns `false` if it needed operators on tensors.
    pub(super) fn add_rows(
        &self,
        x: &[f32],
        width: usize,
        [joint, inner]: [&mut Vec<f32>; 2],
        y: &mut [f32],
    ) -> Result<bool> {
        let (mut factors, mut outputs) = (vec![1.0; x.len() / width.max(1)], vec![0.0; x.len()]);
        let gated = match &self.gate {
            Some(gate) => {
                let mut gates = vec![0.0; factors.len()];
                let is_gated = joint_forward_into(x, &[gate], &mut gates)?;
                scale_by_sigmoids(&mut factors, &gates);
                is_gated
            }
            None => true,
        };
        let computed = self.mlp.forward_rows(x, joint, inner, &mut outputs)?;
        let rows = y.chunks_exact_mut(width).zip(outputs.chunks_exact(width));
        for ((y, outputs), factor) in rows.zip(factors) {
            for (y, output) in y.iter_mut().zip(outputs) {
                *y += factor * output;
            }
        }
        Ok(gated && computed)
    }
}
