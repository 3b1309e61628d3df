use overdrive_fused::{Layout, RotaryOptions, rotary, rotary_single};
use overdrive_nn::Linear;
use tch::Tensor;

use crate::attend::{AttendOptions, attend, attend_with_cache, view_options};
use crate::attention::AttentionStep;
use crate::parameters::ParameterMap;
use crate::projections::{JointLinear, LinearVisitor, ParameterVisitor, visit_linear};
use crate::rms_norm::{RmsNorm, normalised_without_weight};
use crate::{Error, LlamaConfig, Result};

/// Attention of Gemma 3n and 4: queries and keys are normalised head by head, and so are values, without a weight. Some
/// layers attend to the keys and values of an earlier layer in place of their own.
#[derive(Debug)]
pub(crate) struct PerLayerAttention {
    /// Query, key and value; query and key where keys are values; the query where another layer's keys are shared.
    qkv: JointLinear,
    o: Linear,
    q_norm: RmsNorm,
    keys: Keys,
    heads: i64,
    kv_heads: i64,
    head_dim: i64,
    eps: f64,
    /// The factor of the scores.
    scale: f64,
}

/// The keys and values of a layer.
#[derive(Debug)]
enum Keys {
    Own {
        norm: RmsNorm,
        /// If `true`, later layers attend to them, too.
        are_shared: bool,
    },
    /// Those of an earlier layer.
    Of(usize),
}

impl PerLayerAttention {
    /// Returns the names of the layers whose weights lie together, without `.weight`.
    pub(crate) fn joint_names(prefix: &str, config: &LlamaConfig, layer: i64) -> Vec<String> {
        let parts: &[&str] = match (config.shares_kv(layer), config.keys_are_values(layer)) {
            (true, _) => &["q"],
            (false, true) => &["q", "k"],
            (false, false) => &["q", "k", "v"],
        };
        let name = |part: &&str| format!("{prefix}.self_attn.{part}_proj");
        parts.iter().map(name).collect()
    }

    pub(crate) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
        layer: i64,
    ) -> Result<PerLayerAttention> {
        let names = Self::joint_names(prefix, config, layer);
        let bias = config.attention_bias;
        let name = |part: &str| format!("{prefix}.self_attn.{part}");
        Ok(PerLayerAttention {
            qkv: JointLinear::take(parameters, &names, bias)?,
            o: parameters.take_linear(&name("o_proj"), bias)?,
            q_norm: RmsNorm::take(parameters, &name("q_norm"), config)?,
            keys: match config.kv_source(layer) {
                Some(source) => Keys::Of(source.unsigned_abs() as usize),
                None => Keys::Own {
                    norm: RmsNorm::take(parameters, &name("k_norm"), config)?,
                    are_shared: config.keeps_kv(layer),
                },
            },
            heads: config.num_attention_heads,
            kv_heads: config.kv_heads_of(layer),
            head_dim: config.head_dim_of(layer),
            eps: config.rms_norm_eps,
            scale: config.attention_scale().unwrap_or(1.0),
        })
    }

    /// Computes attention of `x (B, T, C)`, as `(B, T, C)`.
    pub(crate) fn forward(&self, x: &Tensor, step: AttentionStep<'_, '_>) -> Result<Tensor> {
        let fused = step.execution.fused_kernels;
        let options = AttendOptions {
            scale: Some(self.scale),
            ..AttendOptions::plain(step.execution.attention, step.dropout)
        };
        let layer = step.layer;
        let (query, own) = self.heads(x, &step)?;
        let mixed = match (&self.keys, own, step.cache) {
            (Keys::Own { are_shared, .. }, Some([key, value]), cache) => match cache {
                Some(cache) if *are_shared => {
                    check_dropout(step.dropout)?;
                    let mut options = view_options(step.mask, &options);
                    options.keep = true;
                    joined(&cache.attend(layer, &query, &key, &value, &options)?)?
                }
                cache => {
                    if *are_shared {
                        step.shared_kv.borrow_mut().put(layer, &key, &value);
                    }
                    let cache = cache.map(|cache| (layer, cache));
                    attend_with_cache(&query, &key, &value, step.mask, &options, cache)?
                }
            },
            (Keys::Of(source), _, Some(cache)) => {
                check_dropout(step.dropout)?;
                let options = view_options(step.mask, &options);
                joined(&cache.attend_shared(*source, &query, &options)?)?
            }
            (Keys::Of(source), _, None) => {
                let held = step.shared_kv.borrow().of(*source);
                let [key, value] = held.ok_or_else(|| no_keys(*source))?;
                attend(&query, &key, &value, step.mask, &options)?
            }
            (Keys::Own { .. }, None, _) => return Err(no_keys(layer)),
        };
        Ok(self.o.forward_with(&mixed, fused)?)
    }

    /// Returns the query `(B, H, T, D)`, and key and value if the layer has its own.
    fn heads(
        &self,
        x: &Tensor,
        step: &AttentionStep<'_, '_>,
    ) -> Result<(Tensor, Option<[Tensor; 2]>)> {
        let (fused, rotation) = (step.execution.fused_kernels, step.rotation);
        let (queries, keys) = (self.heads * self.head_dim, self.kv_heads * self.head_dim);
        let count = self.qkv.layers().count();
        let widths = &[queries, keys, keys][..count];
        let parts = self.qkv.forward_split(x, widths, fused)?;
        let mut parts = parts
            .iter()
            .map(|part| part.f_unflatten(-1, [-1, self.head_dim]));
        let mut next = || parts.next().transpose();
        let options = RotaryOptions {
            layout: Layout::Bthd,
            convention: rotation.convention,
        };
        let query = next()?.ok_or_else(|| no_keys(step.layer))?;
        let query = self.q_norm.forward(&query, fused)?;
        let (Keys::Own { norm, .. }, Some(key)) = (&self.keys, next()?) else {
            let query = match fused {
                true => rotary_single(&query, &rotation.cos, &rotation.sin, &options)?,
                false => rotation.apply(&query)?,
            };
            return Ok((query.f_transpose(1, 2)?, None));
        };
        let value = next()?;
        let value = value.as_ref().unwrap_or(&key);
        let value = normalised_without_weight(value, self.eps, fused)?;
        let key = norm.forward(&key, fused)?;
        let (query, key) = match fused {
            true => rotary(&query, &key, &rotation.cos, &rotation.sin, &options)?,
            false => (rotation.apply(&query)?, rotation.apply(&key)?),
        };
        let by_head = |part: Tensor| part.f_transpose(1, 2);
        Ok((by_head(query)?, Some([by_head(key)?, by_head(value)?])))
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.qkv.layers().chain([&self.o])
    }

    pub(crate) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        self.qkv.visit(visit)?;
        visit_linear(&mut self.o, visit)
    }

    pub(crate) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        let name = format!("{prefix}.self_attn.q_norm");
        self.q_norm.visit_parameters(&name, visit)?;
        match &mut self.keys {
            Keys::Own { norm, .. } => {
                norm.visit_parameters(&format!("{prefix}.self_attn.k_norm"), visit)
            }
            Keys::Of(_) => Ok(()),
        }
    }
}

/// Joins heads `(B, H, T, D)` to `(B, T, H·D)`.
fn joined(mixed: &Tensor) -> Result<Tensor> {
    Ok(mixed.f_transpose(1, 2)?.f_flatten(2, 3)?)
}

/// Checks that attention over a cache, whose layers share keys and values, is asked for no dropout.
fn check_dropout(dropout: f64) -> Result<()> {
    if dropout == 0.0 {
        return Ok(());
    }
    Err(Error::unsupported(
        "attention_dropout",
        dropout,
        "0 over a cache, for a model whose layers share keys and values; call `set_training(false)`",
    ))
}

fn no_keys(layer: usize) -> Error {
    overdrive_core::Error::internal(format!("layer {layer} has no keys and values")).into()
}
