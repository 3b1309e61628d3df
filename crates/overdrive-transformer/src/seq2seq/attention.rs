use overdrive_core::Error;
use overdrive_nn::{Linear, joint_forward};
use tch::Tensor;

use super::block::Context;
use crate::Result;
use crate::attend::{AttendOptions, CachedLayer, attend, attend_with_cache};
use crate::mask::Mask;
use crate::parameters::ParameterMap;
use crate::projections::{LinearVisitor, visit_linear};

/// The names and sizes of an attention layer.
#[derive(Debug, Clone, Copy)]
pub(super) struct AttentionLayout {
    /// The names of the projections of queries, keys, values and the output.
    pub(super) names: [&'static str; 4],
    pub(super) bias: bool,
    pub(super) heads: i64,
    /// The factor of the scores; `None` is 1/sqrt(D).
    pub(super) scale: Option<f64>,
}

/// Self-attention, or attention over the states of an encoder.
#[derive(Debug)]
pub(super) struct Attention {
    query: Linear,
    key: Linear,
    value: Linear,
    output: Linear,
    heads: i64,
    scale: Option<f64>,
}

impl Attention {
    pub(super) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        layout: AttentionLayout,
    ) -> Result<Attention> {
        let mut take =
            |name: &str| parameters.take_linear(&format!("{prefix}.{name}"), layout.bias);
        let [query, key, value, output] = layout.names;
        Ok(Attention {
            query: take(query)?,
            key: take(key)?,
            value: take(value)?,
            output: take(output)?,
            heads: layout.heads,
            scale: layout.scale,
        })
    }

    /// Computes attention of `x (B, T, C)` over itself and the tokens of the cache.
    pub(super) fn over_itself(
        &self,
        x: &Tensor,
        mask: &Mask,
        context: &Context,
        cache: Option<CachedLayer<'_, '_>>,
    ) -> Result<Tensor> {
        let layers = [&self.query, &self.key, &self.value];
        let [query, key, value] = self.projected(x, layers, context.fused)?;
        let options = self.options(context);
        let mixed = attend_with_cache(&query, &key, &value, mask, &options, cache)?;
        Ok(self.output.forward_with(&mixed, context.fused)?)
    }

    /// Computes attention of `x (B, T, C)` over keys and values `(B, H, S, D)`.
    pub(super) fn over(
        &self,
        x: &Tensor,
        (keys, values): (&Tensor, &Tensor),
        mask: &Mask,
        context: &Context,
    ) -> Result<Tensor> {
        let [query] = self.projected(x, [&self.query], context.fused)?;
        let mixed = attend(&query, keys, values, mask, &self.options(context))?;
        Ok(self.output.forward_with(&mixed, context.fused)?)
    }

    /// Computes the keys and values `(B, H, S, D)` of an encoder's states `(B, S, C)`.
    pub(super) fn keys_values(&self, states: &Tensor, fused: bool) -> Result<(Tensor, Tensor)> {
        let [keys, values] = self.projected(states, [&self.key, &self.value], fused)?;
        Ok((keys, values))
    }

    /// Applies layers of the same width, and splits the results into heads.
    fn projected<const N: usize>(
        &self,
        x: &Tensor,
        layers: [&Linear; N],
        fused: bool,
    ) -> Result<[Tensor; N]> {
        let parts = if fused && N > 1 {
            let width = layers[0].weight().size()[0];
            joint_forward(x, &layers)?.f_split(width, -1)?
        } else {
            let each = layers.iter().map(|layer| layer.forward_with(x, fused));
            each.collect::<overdrive_nn::Result<_>>()?
        };
        let heads = parts.iter().map(|part| -> Result<Tensor> {
            Ok(part.f_unflatten(2, [self.heads, -1])?.f_transpose(1, 2)?)
        });
        let heads = heads.collect::<Result<Vec<_>>>()?;
        heads.try_into().map_err(|heads: Vec<_>| {
            let count = heads.len();
            Error::internal(format!("{count} joint layers instead of {N}")).into()
        })
    }

    fn options(&self, context: &Context) -> AttendOptions<'static> {
        AttendOptions {
            scale: self.scale,
            ..AttendOptions::plain(context.implementation, context.attention_dropout)
        }
    }

    pub(super) fn layers(&self) -> [&Linear; 4] {
        [&self.query, &self.key, &self.value, &self.output]
    }

    pub(super) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        visit_linear(&mut self.query, visit)?;
        visit_linear(&mut self.key, visit)?;
        visit_linear(&mut self.value, visit)?;
        visit_linear(&mut self.output, visit)
    }
}
