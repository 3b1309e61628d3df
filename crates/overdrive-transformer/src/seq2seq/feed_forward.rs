use overdrive_fused::{Activation, glu_pair};
use overdrive_nn::Linear;
use tch::Tensor;

use super::block::Context;
use crate::Result;
use crate::gpt2::dropped;
use crate::projections::{LinearVisitor, visit_linear};

/// A feed-forward block: two projections with an activation between them, or with a gate (Shazeer 2020,
/// arXiv:2002.05202).
#[derive(Debug)]
pub(super) struct FeedForward {
    pub(super) input: Linear,
    /// The projection that the activated input is multiplied with.
    pub(super) gate: Option<Linear>,
    pub(super) output: Linear,
    pub(super) activation: Activation,
}

impl FeedForward {
    pub(super) fn forward(&self, x: &Tensor, context: &Context) -> Result<Tensor> {
        let inner = self.input.forward_with(x, context.fused)?;
        let inner = match &self.gate {
            None => self.activation.apply(&inner)?,
            Some(gate) => {
                let gate = gate.forward_with(x, context.fused)?;
                match context.fused {
                    true => glu_pair(&inner, &gate, self.activation)?,
                    false => self.activation.apply(&inner)?.f_mul(&gate)?,
                }
            }
        };
        let inner = dropped(inner, context.activation_dropout)?;
        // T5 in fp16 keeps this weight in fp32, because its sums overflow.
        let inner = match self.output.weight().kind() {
            Some(kind) if kind != inner.kind() => inner.f_to_kind(kind)?,
            _ => inner,
        };
        Ok(self.output.forward_with(&inner, context.fused)?)
    }

    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        [Some(&self.input), self.gate.as_ref(), Some(&self.output)]
            .into_iter()
            .flatten()
    }

    pub(super) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        visit_linear(&mut self.input, visit)?;
        if let Some(gate) = &mut self.gate {
            visit_linear(gate, visit)?;
        }
        visit_linear(&mut self.output, visit)
    }
}
