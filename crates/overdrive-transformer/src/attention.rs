use overdrive_kv_cache::KvCache;
use tch::Tensor;

use crate::linear::Linear;
use crate::mask::Mask;
use crate::parameters::ParameterMap;
use crate::rms_norm::RmsNorm;
use crate::rope::{Rotation, interleave_heads};
use crate::{Execution, LlamaConfig, Result};

/// Softmax attention of `query (B, H, T, D)` over keys and values `(B, H_kv, S, D)`, as `(B, T, H·D)`.
///
/// libtorch chooses the kernel: the flash one wherever the mask is none or causal. Its output is laid
/// out as `(B, T, H, D)`, so that joining the heads copies nothing.
pub(crate) fn attend(
    query: &Tensor,
    key: &Tensor,
    value: &Tensor,
    mask: &Mask,
    dropout: f64,
    scale: Option<f64>,
) -> Result<Tensor> {
    let grouped = query.size()[1] != key.size()[1];
    let last = |tensor: &Tensor, n: i64| tensor.f_narrow(2, tensor.size()[2] - n, n);
    let sdpa = |key: &Tensor, value: &Tensor, marked: Option<&Tensor>, causal: bool| {
        // A causal mask of one query over one key masks nothing.
        let causal = causal && query.size()[2] > 1;
        Tensor::f_scaled_dot_product_attention(
            query, key, value, marked, dropout, causal, scale, grouped,
        )
    };
    let mixed = match mask {
        Mask::Everything => sdpa(key, value, None, false)?,
        Mask::Causal => sdpa(key, value, None, true)?,
        Mask::LastKeys(n) => sdpa(&last(key, *n)?, &last(value, *n)?, None, false)?,
        Mask::Marked(marked) => sdpa(key, value, Some(marked), false)?,
    };
    Ok(mixed.f_transpose(1, 2)?.f_flatten(2, 3)?)
}

/// What one forward pass gives to each attention layer.
pub(crate) struct AttentionStep<'a, 'c> {
    pub(crate) layer: usize,
    pub(crate) rotation: &'a Rotation,
    pub(crate) mask: &'a Mask,
    pub(crate) cache: Option<&'a mut (dyn KvCache + 'c)>,
    pub(crate) dropout: f64,
    pub(crate) execution: &'a Execution,
}

/// Grouped-query attention with rotary positions.
#[derive(Debug)]
pub(crate) struct RotaryAttention {
    q: Linear,
    k: Linear,
    v: Linear,
    o: Linear,
    /// Qwen3: queries and keys are normalised head by head.
    norms: Option<(RmsNorm, RmsNorm)>,
    head_dim: i64,
}

impl RotaryAttention {
    pub(crate) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
    ) -> Result<RotaryAttention> {
        let prefix = format!("{prefix}.self_attn");
        let mut linear =
            |name: &str, bias| Linear::take(parameters, &format!("{prefix}.{name}_proj"), bias);
        let (q, k) = (
            linear("q", config.qkv_bias())?,
            linear("k", config.qkv_bias())?,
        );
        let (v, o) = (
            linear("v", config.qkv_bias())?,
            linear("o", config.output_bias())?,
        );
        let mut norm = |name: &str| {
            RmsNorm::take(
                parameters,
                &format!("{prefix}.{name}_norm"),
                config.rms_norm_eps,
            )
        };
        let norms = config
            .qk_norm()
            .then(|| Ok::<_, crate::Error>((norm("q")?, norm("k")?)));
        Ok(RotaryAttention {
            q,
            k,
            v,
            o,
            norms: norms.transpose()?,
            head_dim: config.head_dim(),
        })
    }

    /// `x (B, T, C)` to `(B, T, C)`.
    pub(crate) fn forward(&self, x: &Tensor, step: AttentionStep<'_, '_>) -> Result<Tensor> {
        let interleaved = step.rotation.is_interleaved();
        let [mut query, mut key, value] = if step.execution.fused_qkv && step.cache.is_none() {
            self.project_fused(x, interleaved)?
        } else {
            self.project(x, interleaved)?
        };
        if let Some((q_norm, k_norm)) = &self.norms {
            query = self.normalise(q_norm, &query, interleaved)?;
            key = self.normalise(k_norm, &key, interleaved)?;
        }
        let query = step.rotation.apply(&query)?.f_transpose(1, 2)?;
        let key = step.rotation.apply(&key)?.f_transpose(1, 2)?;
        let value = value.f_transpose(1, 2)?;
        let mixed = match step.cache {
            None => attend(&query, &key, &value, step.mask, step.dropout, None)?,
            Some(cache) => {
                let held = cache.append(step.layer, &key, &value)?;
                attend(
                    &query,
                    &held.keys,
                    &held.values,
                    step.mask,
                    step.dropout,
                    None,
                )?
            }
        };
        self.o.forward(&mixed)
    }

    /// Query, key and value, each `(B, T, heads, D)`.
    fn project(&self, x: &Tensor, interleaved: bool) -> Result<[Tensor; 3]> {
        let heads = |y: Tensor| y.f_unflatten(-1, [-1, self.head_dim]);
        if !interleaved {
            return Ok([
                heads(self.q.forward(x)?)?,
                heads(self.k.forward(x)?)?,
                heads(self.v.forward(x)?)?,
            ]);
        }
        let turned = |linear: &Linear| -> Result<Tensor> {
            let (weight, bias) = self.interleaved(linear)?;
            Ok(heads(x.f_linear(&weight, bias.as_ref())?)?)
        };
        Ok([
            turned(&self.q)?,
            turned(&self.k)?,
            heads(self.v.forward(x)?)?,
        ])
    }

    /// As [`RotaryAttention::project`], in one product.
    fn project_fused(&self, x: &Tensor, interleaved: bool) -> Result<[Tensor; 3]> {
        let parts = if interleaved {
            [
                self.interleaved(&self.q)?,
                self.interleaved(&self.k)?,
                plain(&self.v),
            ]
        } else {
            [plain(&self.q), plain(&self.k), plain(&self.v)]
        };
        let weights = parts.each_ref().map(|(weight, _)| weight);
        let weight = Tensor::f_cat(&weights, 0)?;
        let biases: Vec<_> = parts.iter().filter_map(|(_, bias)| bias.as_ref()).collect();
        let bias = (biases.len() == 3)
            .then(|| Tensor::f_cat(&biases, 0))
            .transpose()?;
        let heads = weights.map(|weight| weight.size()[0] / self.head_dim);
        let joined = x
            .f_linear(&weight, bias.as_ref())?
            .f_unflatten(-1, [-1, self.head_dim])?;
        // One split: its backward is one concatenation, where narrowing three times would add three
        // gradients of full size.
        let mut parts = joined.f_split_with_sizes(heads.as_slice(), 2)?.into_iter();
        match (parts.next(), parts.next(), parts.next()) {
            (Some(query), Some(key), Some(value)) => Ok([query, key, value]),
            _ => unreachable!("three sizes give three parts"),
        }
    }

    fn interleaved(&self, linear: &Linear) -> Result<(Tensor, Option<Tensor>)> {
        let bias = linear
            .bias
            .as_ref()
            .map(|bias| interleave_heads(bias, self.head_dim));
        Ok((
            interleave_heads(&linear.weight, self.head_dim)?,
            bias.transpose()?,
        ))
    }

    fn normalise(&self, norm: &RmsNorm, x: &Tensor, interleaved: bool) -> Result<Tensor> {
        if interleaved {
            norm.forward_with(x, &interleave_heads(&norm.weight, self.head_dim)?)
        } else {
            norm.forward_with(x, &norm.weight)
        }
    }
}

fn plain(linear: &Linear) -> (Tensor, Option<Tensor>) {
    (
        linear.weight.shallow_clone(),
        linear.bias.as_ref().map(Tensor::shallow_clone),
    )
}
