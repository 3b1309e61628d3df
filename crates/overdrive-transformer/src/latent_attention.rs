//! Multi-head latent attention (DeepSeek-AI 2024, arXiv:2405.04434).

use overdrive_fused::{Layout, RotaryOptions, linear, rotary};
use overdrive_kv_cache::{Error as CacheError, attend_to_view};
use overdrive_nn::{Linear, LinearWeight};
use tch::{Device, Tensor};

use crate::attend::{AttendOptions, attend, attend_with_cache, view_options};
use crate::attention::AttentionStep;
use crate::config::MlaConfig;
use crate::parameters::{ParameterMap, ParameterRole};
use crate::projections::{LinearVisitor, ParameterVisitor, visit_linear};
use crate::rms_norm::RmsNorm;
use crate::{Error, LlamaConfig, Result};

/// transformers makes the norms of the latent vectors with the default of its norm, whatever the configuration says.
const NORM_EPS: f64 = 1e-6;

/// Attention whose keys and values are computed from one latent vector `(R,)` of each token, and from rotated channels
/// that all heads share.
///
/// A cache holds the latent vector and the rotated channels, as one head. Attention over a cache multiplies the matrix
/// that expands keys into the queries, and the one that expands values into the sums over tokens, so that the keys and
/// values of the heads never exist (section 2.1.2 of the paper). Without a cache, keys and values are expanded: there
/// are as many queries as keys, and scores over `R` channels would cost more.
#[derive(Debug)]
pub(crate) struct LatentAttention {
    /// The projection to the vector that queries are computed from, and its norm; `None`: the hidden states.
    low_rank: Option<(Linear, RmsNorm)>,
    query: Linear,
    kv_a: Linear,
    kv_a_norm: RmsNorm,
    kv_b: Linear,
    o: Linear,
    sizes: MlaConfig,
    heads: i64,
    /// The factor of the scores.
    scale: f64,
}

/// A weight of a layer: its name without `.weight`, its shape, its role, and whether it has a bias.
pub(crate) type LayerSpec = (String, [i64; 2], ParameterRole, bool);

impl LatentAttention {
    /// Returns the linear layers and norms of a block in transformers' order; a norm has one row.
    pub(crate) fn layers_of(
        prefix: &str,
        config: &LlamaConfig,
        sizes: &MlaConfig,
    ) -> Vec<LayerSpec> {
        use ParameterRole::{Expansion, Linear, Other};
        let (hidden, heads) = (config.hidden_size, config.num_attention_heads);
        let name = |part: &str| format!("{prefix}.self_attn.{part}");
        let (queries, bias) = (heads * sizes.qk_head_dim(), config.attention_bias);
        let mut layers = match sizes.q_lora_rank {
            None => vec![(name("q_proj"), [queries, hidden], Linear, false)],
            Some(rank) => vec![
                (name("q_a_proj"), [rank, hidden], Linear, bias),
                (name("q_a_layernorm"), [1, rank], Other, false),
                (name("q_b_proj"), [queries, rank], Linear, false),
            ],
        };
        let rank = sizes.kv_lora_rank;
        let expanded = heads * (sizes.qk_nope_head_dim + sizes.v_head_dim);
        layers.extend([
            (
                name("kv_a_proj_with_mqa"),
                [sizes.cached_dim(), hidden],
                Linear,
                bias,
            ),
            (name("kv_a_layernorm"), [1, rank], Other, false),
            (name("kv_b_proj"), [expanded, rank], Expansion, false),
            (
                name("o_proj"),
                [hidden, heads * sizes.v_head_dim],
                Linear,
                bias,
            ),
        ]);
        layers
    }

    pub(crate) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
        sizes: &MlaConfig,
    ) -> Result<LatentAttention> {
        let name = |part: &str| format!("{prefix}.self_attn.{part}");
        let bias = config.attention_bias;
        let (low_rank, query) = match sizes.q_lora_rank {
            None => (None, "q_proj"),
            Some(_) => {
                let a = parameters.take_linear(&name("q_a_proj"), bias)?;
                let norm = RmsNorm::take_plain(parameters, &name("q_a_layernorm"), NORM_EPS)?;
                (Some((a, norm)), "q_b_proj")
            }
        };
        Ok(LatentAttention {
            low_rank,
            query: parameters.take_linear(&name(query), false)?,
            kv_a: parameters.take_linear(&name("kv_a_proj_with_mqa"), bias)?,
            kv_a_norm: RmsNorm::take_plain(parameters, &name("kv_a_layernorm"), NORM_EPS)?,
            kv_b: parameters.take_linear(&name("kv_b_proj"), false)?,
            o: parameters.take_linear(&name("o_proj"), bias)?,
            sizes: sizes.clone(),
            heads: config.num_attention_heads,
            scale: config.mla_scale(sizes),
        })
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = &Linear> {
        let low_rank = self.low_rank.iter().map(|(a, _)| a);
        low_rank.chain([&self.query, &self.kv_a, &self.kv_b, &self.o])
    }

    pub(crate) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        if let Some((a, _)) = &mut self.low_rank {
            visit_linear(a, visit)?;
        }
        for layer in [&mut self.query, &mut self.kv_a, &mut self.kv_b, &mut self.o] {
            visit_linear(layer, visit)?;
        }
        Ok(())
    }

    pub(crate) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        if let Some((_, norm)) = &mut self.low_rank {
            norm.visit_parameters(&format!("{prefix}.self_attn.q_a_layernorm"), visit)?;
        }
        let name = format!("{prefix}.self_attn.kv_a_layernorm");
        self.kv_a_norm.visit_parameters(&name, visit)
    }

    /// Computes attention of `x (B, T, C)`, as `(B, T, C)`.
    pub(crate) fn forward(&self, x: &Tensor, step: AttentionStep<'_, '_>) -> Result<Tensor> {
        let fused = step.execution.fused_kernels;
        let [plain, rotated, latent, key] = self.project(x, &step)?;
        let options = AttendOptions {
            scale: Some(self.scale),
            ..AttendOptions::plain(step.execution.attention, step.dropout)
        };
        let mixed = match step.cache {
            None => {
                let query = Tensor::f_cat(&[plain, rotated], -1)?;
                let [query, keys, values] = self.expanded(&query, &latent, &key, fused)?;
                let mixed = attend(&query, &keys, &values, step.mask, &options)?;
                self.values_of(&mixed)?
            }
            Some(cache) => {
                let row = Tensor::f_cat(&[&latent, &key], -1)?;
                // As values, the channels of the latent vector count, and the rotated ones are computed for nothing.
                if self.kv_b.active_adapter().is_some() {
                    // The adapter's product is computed for each token that the cache holds.
                    let appended = cache.append(step.layer, &row, &row);
                    let mut view = appended.map_err(|error| match error {
                        CacheError::NotDense { cache } => {
                            let supported = format!(
                                "all other layers over {cache}; merge the adapter into the weights to use it there"
                            );
                            Error::unsupported("target_modules", "`kv_b_proj`", supported)
                        }
                        other => other.into(),
                    })?;
                    let [rank, rope] = [self.sizes.kv_lora_rank, self.sizes.qk_rope_head_dim];
                    let latent = view.keys.f_narrow(-1, 0, rank)?;
                    let key = view.keys.f_narrow(-1, rank, rope)?;
                    let query = Tensor::f_cat(&[plain, rotated], -1)?;
                    let [query, keys, values] = self.expanded(&query, &latent, &key, fused)?;
                    (view.keys, view.values) = (keys, values);
                    let mixed = attend_to_view(&query, &view, &view_options(step.mask, &options))?;
                    self.values_of(&mixed.f_transpose(1, 2)?.f_flatten(2, 3)?)?
                } else {
                    let weight = self.expansion()?;
                    let (nope, value) = (self.sizes.qk_nope_head_dim, self.sizes.v_head_dim);
                    let [to_key, to_value] = [
                        weight.f_narrow(1, 0, nope)?,
                        weight.f_narrow(1, nope, value)?,
                    ];
                    let query = by_head(&plain, &to_key, true, fused)?;
                    let query = Tensor::f_cat(&[query, rotated], -1)?;
                    let cache = Some((step.layer, cache));
                    let mixed = attend_with_cache(&query, &row, &row, step.mask, &options, cache)?;
                    let mixed = mixed.f_unflatten(-1, [self.heads, -1])?;
                    let mixed = mixed.f_narrow(-1, 0, self.sizes.kv_lora_rank)?;
                    let mixed = by_head(&mixed.f_transpose(1, 2)?, &to_value, false, fused)?;
                    mixed.f_transpose(1, 2)?.f_flatten(2, 3)?
                }
            }
        };
        Ok(self.o.forward_with(&mixed, fused)?)
    }

    /// Returns the channels of the queries without positions and the rotated ones, `(B, H, T, ·)`, the latent vectors
    /// `(B, 1, T, R)` and the rotated channels of keys `(B, 1, T, ·)`.
    fn project(&self, x: &Tensor, step: &AttentionStep<'_, '_>) -> Result<[Tensor; 4]> {
        let fused = step.execution.fused_kernels;
        let query = match &self.low_rank {
            None => self.query.forward_with(x, fused)?,
            Some((a, norm)) => {
                let latent = norm.forward(&a.forward_with(x, fused)?, fused)?;
                self.query.forward_with(&latent, fused)?
            }
        };
        let query = query.f_unflatten(-1, [self.heads, -1])?;
        let [nope, rope] = [self.sizes.qk_nope_head_dim, self.sizes.qk_rope_head_dim];
        let (plain, rotated) = (
            query.f_narrow(-1, 0, nope)?,
            query.f_narrow(-1, nope, rope)?,
        );
        let joint = self.kv_a.forward_with(x, fused)?;
        let rank = self.sizes.kv_lora_rank;
        let latent = self
            .kv_a_norm
            .forward(&joint.f_narrow(-1, 0, rank)?.f_contiguous()?, fused)?;
        let key = joint.f_narrow(-1, rank, rope)?.f_unsqueeze(2)?;
        let rotation = step.rotation;
        let (rotated, key) = if fused {
            let options = RotaryOptions {
                layout: Layout::Bthd,
                convention: rotation.convention,
            };
            rotary(&rotated, &key, &rotation.cos, &rotation.sin, &options)?
        } else {
            (rotation.apply(&rotated)?, rotation.apply(&key)?)
        };
        Ok([
            plain.f_transpose(1, 2)?,
            rotated.f_transpose(1, 2)?,
            latent.f_unsqueeze(1)?,
            key.f_transpose(1, 2)?,
        ])
    }

    /// Returns queries, keys and values `(B, H, ·, D)` of one width: what is narrower is filled up with zeros, which
    /// change neither scores nor sums.
    fn expanded(
        &self,
        query: &Tensor,
        latent: &Tensor,
        key: &Tensor,
        fused: bool,
    ) -> Result<[Tensor; 3]> {
        let joint = self.kv_b.forward_with(&latent.f_squeeze_dim(1)?, fused)?;
        let joint = joint.f_unflatten(-1, [self.heads, -1])?.f_transpose(1, 2)?;
        let [nope, value] = [self.sizes.qk_nope_head_dim, self.sizes.v_head_dim];
        let key = key.f_expand([-1, self.heads, -1, -1], false)?;
        let keys = Tensor::f_cat(&[joint.f_narrow(-1, 0, nope)?, key], -1)?;
        let values = joint.f_narrow(-1, nope, value)?;
        let width = self.sizes.qk_head_dim();
        let filled = |tensor: Tensor, missing: i64| -> Result<Tensor> {
            match missing {
                ..=0 => Ok(tensor),
                missing => Ok(tensor.f_constant_pad_nd([0, missing])?),
            }
        };
        Ok([
            filled(query.shallow_clone(), value - width)?,
            filled(keys, value - width)?,
            filled(values, width - value)?,
        ])
    }

    /// Returns the channels of values in `mixed (B, T, H·D)`, as `(B, T, H·D_v)`.
    fn values_of(&self, mixed: &Tensor) -> Result<Tensor> {
        let by_head = mixed.f_unflatten(-1, [self.heads, -1])?;
        let values = by_head.f_narrow(-1, 0, self.sizes.v_head_dim)?;
        Ok(values.f_flatten(2, 3)?)
    }

    /// Returns the weight of `kv_b_proj` as `(H, D_nope + D_v, R)`.
    fn expansion(&self) -> Result<Tensor> {
        let weight = match self.kv_b.in_use().0 {
            LinearWeight::Dense { weight, .. } => weight.shallow_clone(),
            // Of a file that holds it quantized; this crate keeps it dense.
            weight => weight.to_dense(self.kv_a_norm.kind())?,
        };
        Ok(weight.f_unflatten(0, [self.heads, -1])?)
    }
}

/// Multiplies `x (B, H, T, I)` by a matrix of each head: `weight (H, I, O)` if `transposed`, else `(H, O, I)`.
fn by_head(x: &Tensor, weight: &Tensor, transposed: bool, fused: bool) -> Result<Tensor> {
    if !fused || x.device() != Device::Cpu {
        let weight = match transposed {
            true => weight.shallow_clone(),
            false => weight.f_transpose(1, 2)?,
        };
        return Ok(x.f_matmul(&weight)?);
    }
    // One product a head, whose result for a row does not depend on the other rows, as that of a batched matmul may.
    let heads = (0..weight.size()[0]).map(|head| {
        let weight = weight.f_select(0, head)?;
        let weight = match transposed {
            true => weight.f_tr()?.f_contiguous()?,
            false => weight,
        };
        Ok(linear(
            &x.f_select(1, head)?.f_contiguous()?,
            &weight,
            None,
        )?)
    });
    Ok(Tensor::f_stack(&heads.collect::<Result<Vec<_>>>()?, 1)?)
}
