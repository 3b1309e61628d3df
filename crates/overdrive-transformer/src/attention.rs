use std::cell::RefCell;

use overdrive_core::Error;
use overdrive_fused::rows::{self, RowAngles};
use overdrive_fused::{Layout, QkvShape, RotaryOptions, rotary, split_qkv_rotary};
use overdrive_kv_cache::{KvCache, QkvRows};
use overdrive_nn::{Linear, joint_forward_into};
use tch::Tensor;

use crate::attend::{AttendOptions, attend_with_cache, rows_options};
use crate::mask::Mask;
use crate::norm::Norm;
use crate::parameters::ParameterMap;
use crate::projections::{JointLinear, LinearVisitor, ParameterVisitor, visit_linear};
use crate::rope::Rotation;
use crate::shared_kv::SharedKv;
use crate::sigmoid_gates;
use crate::{Execution, LlamaConfig, LlamaFamily, Result};

/// Returns the names of the norms of queries and keys, which are LayerNorms in Phi-2.
fn norm_names(of_phi: bool) -> [&'static str; 2] {
    match of_phi {
        true => ["q_layernorm", "k_layernorm"],
        false => ["q_norm", "k_norm"],
    }
}

/// The inputs that a forward pass gives to each attention layer.
pub(crate) struct AttentionStep<'a, 'c> {
    pub(crate) layer: usize,
    pub(crate) rotation: &'a Rotation,
    pub(crate) mask: &'a Mask,
    pub(crate) cache: Option<&'a mut (dyn KvCache + 'c)>,
    pub(crate) dropout: f64,
    /// The dropout of a layer's addition to the residual stream (Phi).
    pub(crate) residual_dropout: f64,
    pub(crate) execution: &'a Execution,
    /// The inputs `(B, T, L, P)` of the layers beside the residual stream (Gemma 3n and 4).
    pub(crate) layer_inputs: Option<&'a Tensor>,
    /// The keys and values that later layers share, without a cache (Gemma 3n and 4).
    pub(crate) shared_kv: &'a RefCell<SharedKv>,
}

/// Grouped-query attention with rotary positions.
#[derive(Debug)]
pub(crate) struct RotaryAttention {
    qkv: JointLinear,
    o: Linear,
    /// The norms of queries and keys (Qwen3, Gemma 3, OLMo and some Phi models).
    norms: Option<(Norm, Norm)>,
    /// If `true`, the norms are of all heads together (OLMo), not of each head.
    norms_all_heads: bool,
    shape: QkvShape,
    /// The factor of the scores; `None` is 1/sqrt(D).
    scale: Option<f64>,
    /// The bound of the scores.
    softcap: Option<f64>,
    /// A logit of each head that takes part in the softmax without a value (gpt-oss).
    sinks: Option<Tensor>,
    /// If `true`, the layer of the queries computes a gate of each head's output beside its query (Qwen3-Next).
    gated: bool,
}

impl RotaryAttention {
    /// Returns the names of the layers whose weights lie together, without `.weight`.
    pub(crate) fn joint_names(prefix: &str, config: &LlamaConfig) -> Vec<String> {
        let name = |part: &str| format!("{prefix}.self_attn.{part}_proj");
        if config.has_joint_qkv() {
            return vec![name("qkv")];
        }
        ["q", "k", "v"].map(name).to_vec()
    }

    pub(crate) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
    ) -> Result<RotaryAttention> {
        let names = Self::joint_names(prefix, config);
        let qkv = JointLinear::take(parameters, &names, config.qkv_bias())?;
        let prefix = format!("{prefix}.self_attn");
        let output = match config.family {
            LlamaFamily::Phi => "dense",
            _ => "o_proj",
        };
        let o = parameters.take_linear(&format!("{prefix}.{output}"), config.output_bias())?;
        let sinks = (config.family == LlamaFamily::GptOss)
            .then(|| parameters.take(&format!("{prefix}.sinks")))
            .transpose()?;
        let mut norm = |name: &str| Norm::take(parameters, &format!("{prefix}.{name}"), config);
        let [q_norm, k_norm] = norm_names(config.family == LlamaFamily::Phi);
        let norms = config
            .qk_norm()
            .then(|| Ok::<_, crate::Error>((norm(q_norm)?, norm(k_norm)?)));
        Ok(RotaryAttention {
            qkv,
            o,
            norms: norms.transpose()?,
            norms_all_heads: config.family.is_olmo(),
            shape: Self::shape_of(config),
            scale: config.attention_scale(),
            softcap: config.attention_softcap(),
            sinks,
            gated: config.gates_attention(),
        })
    }

    /// Returns the heads of every layer of a model.
    pub(crate) fn shape_of(config: &LlamaConfig) -> QkvShape {
        QkvShape {
            heads: config.num_attention_heads,
            kv_heads: config.kv_heads(),
            head_dim: config.head_dim(),
        }
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.qkv.layers().chain([&self.o])
    }

    pub(crate) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        if let Some(sinks) = &mut self.sinks {
            visit(&format!("{prefix}.self_attn.sinks"), sinks)?;
        }
        if let Some((q, k)) = &mut self.norms {
            let [q_name, k_name] = norm_names(matches!(q, Norm::Layer(_)));
            q.visit_parameters(&format!("{prefix}.self_attn.{q_name}"), visit)?;
            k.visit_parameters(&format!("{prefix}.self_attn.{k_name}"), visit)?;
        }
        Ok(())
    }

    pub(crate) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        self.qkv.visit(visit)?;
        visit_linear(&mut self.o, visit)
    }

    /// Computes attention of `x (B, T, C)`, as `(B, T, C)`.
    pub(crate) fn forward(&self, x: &Tensor, step: AttentionStep<'_, '_>) -> Result<Tensor> {
        let fused = step.execution.fused_kernels;
        let ([query, key, value], gate) = match (&self.norms, fused) {
            // Norms come between the matmul and the rotation, so they prevent the fused pass.
            (None, true) => (self.heads_in_one_pass(x, step.rotation)?, None),
            _ => self.heads(x, step.rotation, fused)?,
        };
        let options = self.options(&step);
        let cache = step.cache.map(|cache| (step.layer, cache));
        let mut mixed = attend_with_cache(&query, &key, &value, step.mask, &options, cache)?;
        if let Some(gate) = gate {
            mixed = sigmoid_gates::gated(&mixed, &gate, fused)?;
        }
        Ok(self.o.forward_with(&mixed, fused)?)
    }

    /// Computes attention over the cache for `[B, T]` tokens, as rows of f32 in slices; `joint` and `scratch` are
    /// scratch buffers. Returns `false` if it needed operators on tensors.
    pub(crate) fn forward_rows(
        &self,
        x: &[f32],
        step: AttentionStep<'_, '_>,
        angles: &RowAngles,
        joint: &mut Vec<f32>,
        scratch: &mut Vec<f32>,
        y: &mut [f32],
    ) -> Result<bool> {
        let width = self.shape.width().unsigned_abs() as usize;
        let inputs = self.qkv.inputs().max(1);
        joint.resize(x.len() / inputs * width, 0.0);
        let projected = self.qkv.forward_rows(x, joint)?;
        if let Some((q_norm, k_norm)) = &self.norms {
            let heads = |count: i64| (count * self.shape.head_dim).unsigned_abs() as usize;
            let (queries, keys) = (heads(self.shape.heads), heads(self.shape.kv_heads));
            for row in joint.chunks_exact_mut(width) {
                let (query, rest) = row.split_at_mut(queries);
                for (norm, heads) in [(q_norm, query), (k_norm, &mut rest[..keys])] {
                    scratch.clear();
                    scratch.extend_from_slice(heads);
                    norm.forward_rows(scratch, heads)?;
                }
            }
        }
        angles.rotate(joint)?;
        if let Some(scale) = &step.rotation.query_scale {
            let scale = scale.f_contiguous()?;
            let scale = rows::elements(&scale)?;
            let queries = (self.shape.heads * self.shape.head_dim).unsigned_abs() as usize;
            // Rows of a batch may share their positions.
            for (row, factor) in joint.chunks_exact_mut(width).zip(scale.iter().cycle()) {
                row[..queries].iter_mut().for_each(|x| *x *= factor);
            }
        }
        let [batch, tokens] = angles.tokens();
        let options = self.options(&step);
        scratch.resize(
            (batch * tokens * self.shape.heads * self.shape.head_dim) as usize,
            0.0,
        );
        let (layer, mask) = (step.layer, step.mask);
        let Some(cache) = step.cache else {
            return Err(Error::internal("attention on rows was called without a cache").into());
        };
        let new = QkvRows {
            rows: joint,
            batch: batch as usize,
            heads: self.shape.heads as usize,
            kv_heads: self.shape.kv_heads as usize,
            head_dim: self.shape.head_dim as usize,
        };
        let attended = match rows_options(mask, &options) {
            Some(options) => cache.attend_rows(layer, &new, &options, scratch)?,
            None => false,
        };
        if !attended {
            let heads = self.shape.heads + 2 * self.shape.kv_heads;
            let qkv = Tensor::f_from_slice(joint)?;
            let qkv = qkv.f_view([batch, tokens, heads, self.shape.head_dim])?;
            let counts = [self.shape.heads, self.shape.kv_heads, self.shape.kv_heads];
            let parts = qkv
                .f_transpose(1, 2)?
                .f_split_with_sizes(counts.as_slice(), 1)?;
            let cache = Some((layer, cache));
            let mixed = attend_with_cache(&parts[0], &parts[1], &parts[2], mask, &options, cache)?;
            scratch.copy_from_slice(rows::elements(&mixed.f_contiguous()?)?);
        }
        let on_slices = joint_forward_into(scratch, &[&self.o], y)?;
        Ok(projected && attended && on_slices)
    }

    fn options(&self, step: &AttentionStep<'_, '_>) -> AttendOptions<'_> {
        AttendOptions {
            implementation: step.execution.attention,
            dropout: step.dropout,
            scale: self.scale,
            softcap: self.softcap,
            sinks: self.sinks.as_ref(),
        }
    }

    /// Returns the rotated query and key, and the value, `(B, H, T, D)`, computed by one matmul and one pass over
    /// its result.
    fn heads_in_one_pass(&self, x: &Tensor, rotation: &Rotation) -> Result<[Tensor; 3]> {
        let qkv = self.qkv.forward_joint(x)?;
        let (cos, sin) = (&rotation.cos, &rotation.sin);
        let options = RotaryOptions {
            convention: rotation.convention,
            ..RotaryOptions::default()
        };
        let (query, key, value) = split_qkv_rotary(&qkv, cos, sin, self.shape, &options)?;
        Ok([rotation.scale_queries(query)?, key, value])
    }

    /// Computes the same result step by step, with norms of queries and keys if the model has them, and the gates
    /// `(B, T, H·D)` of the outputs.
    fn heads(
        &self,
        x: &Tensor,
        rotation: &Rotation,
        fused: bool,
    ) -> Result<([Tensor; 3], Option<Tensor>)> {
        let (d, kv_heads) = (self.shape.head_dim, self.shape.kv_heads);
        let queries = self.shape.heads * d * if self.gated { 2 } else { 1 };
        let widths = [queries, kv_heads * d, kv_heads * d];
        let [query, key, value] = self.qkv.split(x, widths, fused)?;
        let (query, gate) = match self.gated {
            false => (query, None),
            true => {
                // Head by head, a query and its gate.
                let both = query.f_unflatten(-1, [-1, 2, d])?;
                let part = |number| both.f_select(-2, number)?.f_flatten(-2, -1);
                (part(0)?, Some(part(1)?))
            }
        };
        let by_head = |part: &Tensor| part.f_unflatten(-1, [-1, self.shape.head_dim]);
        let value = by_head(&value)?;
        let (mut query, mut key) = match &self.norms {
            Some((q_norm, k_norm)) if self.norms_all_heads => {
                let query = by_head(&q_norm.forward(&query, fused)?)?;
                (query, by_head(&k_norm.forward(&key, fused)?)?)
            }
            Some((q_norm, k_norm)) => {
                let query = q_norm.forward(&by_head(&query)?, fused)?;
                (query, k_norm.forward(&by_head(&key)?, fused)?)
            }
            None => (by_head(&query)?, by_head(&key)?),
        };
        if fused {
            let options = RotaryOptions {
                layout: Layout::Bthd,
                convention: rotation.convention,
            };
            (query, key) = rotary(&query, &key, &rotation.cos, &rotation.sin, &options)?;
        } else {
            (query, key) = (rotation.apply(&query)?, rotation.apply(&key)?);
        }
        let heads = [
            rotation.scale_queries(query.f_transpose(1, 2)?)?,
            key.f_transpose(1, 2)?,
            value.f_transpose(1, 2)?,
        ];
        Ok((heads, gate))
    }
}
