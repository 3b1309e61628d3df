use overdrive_nn::Linear;
use tch::{Kind, Tensor};

use super::attention::Attention;
use super::cross_attention::CrossLayer;
use super::feed_forward::FeedForward;
use super::norm::Norm;
use crate::attend::CachedLayer;
use crate::gpt2::dropped;
use crate::mask::Mask;
use crate::projections::{LinearVisitor, ParameterVisitor};
use crate::{AttentionImplementation, Result};

/// A block of an encoder or a decoder.
#[derive(Debug)]
pub(super) struct Block {
    pub(super) attention: Attention,
    pub(super) attention_norm: Norm,
    /// The attention over the encoder's states, in a decoder.
    pub(super) cross: Option<(Attention, Norm)>,
    pub(super) feed_forward: FeedForward,
    pub(super) feed_forward_norm: Norm,
    /// `true` if a norm comes before its sublayer (T5), `false` if it follows the sum (BART).
    pub(super) pre_norm: bool,
    /// The sums after which fp16 values are bounded.
    pub(super) bounded: Bounded,
}

/// The sums after which fp16 values are bounded, as in transformers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Bounded {
    /// The sum after each sublayer (T5).
    Sublayers,
    /// The sum after the block (BART's encoder).
    Block,
    /// No sum (BART's decoder).
    Never,
}

/// The values that all blocks of a forward pass share.
#[derive(Debug)]
pub(super) struct Context {
    pub(super) mask: Mask,
    pub(super) cross_mask: Mask,
    pub(super) implementation: AttentionImplementation,
    pub(super) fused: bool,
    pub(super) dropout: f64,
    pub(super) attention_dropout: f64,
    pub(super) activation_dropout: f64,
}

impl Block {
    pub(super) fn forward(
        &self,
        x: &Tensor,
        context: &Context,
        cross: Option<&CrossLayer>,
        cache: Option<CachedLayer<'_, '_>>,
    ) -> Result<Tensor> {
        let mut x = self.add(x, &self.attention_norm, context, |x| {
            self.attention.over_itself(x, &context.mask, context, cache)
        })?;
        if let (Some((attention, norm)), Some(source)) = (&self.cross, cross) {
            x = self.add(&x, norm, context, |x| {
                let computed;
                let (keys, values) = match source {
                    CrossLayer::KeysValues(keys, values) => (keys, values),
                    CrossLayer::States(states) => {
                        computed = attention.keys_values(states, context.fused)?;
                        (&computed.0, &computed.1)
                    }
                };
                attention.over(x, (keys, values), &context.cross_mask, context)
            })?;
        }
        let x = self.add(&x, &self.feed_forward_norm, context, |x| {
            self.feed_forward.forward(x, context)
        })?;
        match self.bounded {
            Bounded::Block => finite(x),
            Bounded::Sublayers | Bounded::Never => Ok(x),
        }
    }

    /// Adds a sublayer of `x` to `x`, with the norm before or after it.
    fn add(
        &self,
        x: &Tensor,
        norm: &Norm,
        context: &Context,
        sublayer: impl FnOnce(&Tensor) -> Result<Tensor>,
    ) -> Result<Tensor> {
        if !self.pre_norm {
            let sum = x.f_add(&dropped(sublayer(x)?, context.dropout)?)?;
            return norm.forward(&sum, context.fused);
        }
        let delta = sublayer(&norm.forward(x, context.fused)?)?;
        let sum = x.f_add(&dropped(delta, context.dropout)?)?;
        match self.bounded {
            Bounded::Sublayers => finite(sum),
            Bounded::Block | Bounded::Never => Ok(sum),
        }
    }

    pub(super) fn layers(&self) -> impl Iterator<Item = &Linear> {
        let cross = self
            .cross
            .iter()
            .flat_map(|(attention, _)| attention.layers());
        self.attention
            .layers()
            .into_iter()
            .chain(cross)
            .chain(self.feed_forward.layers())
    }

    pub(super) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        self.attention.visit(visit)?;
        if let Some((attention, _)) = &mut self.cross {
            attention.visit(visit)?;
        }
        self.feed_forward.visit(visit)
    }

    pub(super) fn visit_parameters(
        &mut self,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        self.attention_norm.visit_parameters(visit)?;
        if let Some((_, norm)) = &mut self.cross {
            norm.visit_parameters(visit)?;
        }
        self.feed_forward_norm.visit_parameters(visit)
    }
}

/// Bounds fp16 values that have overflowed to a number 1000 below the largest one, as transformers does to train
/// T5 in fp16. The host reads nothing.
fn finite(x: Tensor) -> Result<Tensor> {
    const LARGEST: f64 = 65504.0;
    if x.kind() != Kind::Half {
        return Ok(x);
    }
    let overflowed = x.f_isinf()?.f_any()?.f_to_kind(Kind::Half)?;
    let bound = overflowed.f_mul_scalar(-1000.0)?.f_add_scalar(LARGEST)?;
    Ok(x.f_clamp_tensor(Some(&bound.f_neg()?), Some(&bound))?)
}

#[cfg(test)]
mod tests {
    #![allow(clippy::unwrap_used, reason = "a test may panic")]

    use super::*;

    #[test]
    fn fp16_values_that_overflowed_are_bounded_as_in_transformers() {
        let half = |values: &[f64]| Tensor::from_slice(values).to_kind(Kind::Half);
        let values = |x: Tensor| Vec::<f64>::try_from(x.to_kind(Kind::Double)).unwrap();
        let inf = f64::INFINITY;
        // 64504 lies between two numbers of fp16, 64480 and 64512.
        assert_eq!(
            values(finite(half(&[1.0, inf, -inf, 65504.0])).unwrap()),
            [1.0, 64512.0, -64512.0, 64512.0]
        );
        assert_eq!(
            values(finite(half(&[1.0, 65504.0])).unwrap()),
            [1.0, 65504.0]
        );
        let wide = Tensor::from_slice(&[f64::INFINITY]);
        assert_eq!(values(finite(wide).unwrap()), [inf]);
    }
}
