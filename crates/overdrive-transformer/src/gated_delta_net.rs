//! Linear attention by the gated delta rule (Yang et al. 2024, arXiv:2412.06464), as Qwen3-Next and Qwen3.5 have it.

use overdrive_fused::{Activation, glu_pair};
use overdrive_kv_cache::{DeltaRuleHeads, DeltaRuleStep};
use overdrive_linear_attention::{
    Backend, CausalConv1dOptions, DeltaRuleInputs, DeltaRuleOptions, causal_conv1d,
    causal_conv1d_varlen, gated_delta_rule, gated_delta_rule_varlen,
};
use overdrive_nn::Linear;
use tch::{Kind, Tensor};

use crate::attention::AttentionStep;
use crate::config::DeltaNetConfig;
use crate::mask::Mask;
use crate::parameters::{ParameterMap, ParameterRole, ParameterSpec};
use crate::projections::{JointLinear, LinearVisitor, ParameterVisitor, visit_linear};
use crate::rms_norm::RmsNorm;
use crate::sigmoid_gates::decay_and_rate;
use crate::{AttentionImplementation, Init, LlamaConfig, Result};

/// The parameters that are not of a linear layer, besides the norm.
const OWN: [&str; 3] = ["dt_bias", "A_log", "conv1d.weight"];

/// A layer that keeps a state of fixed size for each head, which decays and is corrected at each token, in place of keys
/// and values.
#[derive(Debug)]
pub(crate) struct GatedDeltaNet {
    projections: Projections,
    out: Linear,
    /// The norm of the heads' outputs, before the gate.
    norm: RmsNorm,
    /// The bias of the step sizes, the logarithm of the speeds of decay, `(H,)`, and the convolution `(C, 1, K)`.
    own: [Tensor; 3],
    heads: DeltaRuleHeads,
}

/// The projections of a layer's input.
#[derive(Debug)]
enum Projections {
    /// Qwen3-Next: queries, keys, values and gates in one layer, rates and step sizes in another, both ordered by the
    /// heads of keys.
    ByKeyHead(JointLinear),
    /// Qwen3.5: queries, keys and values in one layer; gates, rates and step sizes in one each.
    ByKind(JointLinear),
}

/// The projections of a layer's input: queries, keys and values side by side, gates, rates and step sizes.
type Projected = [Tensor; 4];

impl GatedDeltaNet {
    /// Returns the parameters of a block in transformers' order.
    pub(crate) fn parameters(
        prefix: &str,
        config: &LlamaConfig,
        sizes: &DeltaNetConfig,
    ) -> Vec<ParameterSpec> {
        let heads = sizes.linear_num_value_heads;
        let normal = Init::Normal {
            std: config.initializer_range,
        };
        let spec = |name: &str, shape: &[i64], init, role| {
            ParameterSpec::new(format!("{prefix}.linear_attn.{name}"), shape, init, role)
        };
        let linear = |(name, [outputs, inputs]): (&str, [i64; 2])| {
            let name = format!("{name}.weight");
            spec(&name, &[outputs, inputs], normal, ParameterRole::Linear)
        };
        let other = |name, shape: &[i64], init| spec(name, shape, init, ParameterRole::Other);
        let [bias, decay, convolution] = OWN;
        let kernel = [sizes.mixed_width(), 1, sizes.linear_conv_kernel_dim];
        let mut all = vec![
            other(bias, &[heads], Init::Ones),
            // Speeds of decay from 0.01 to 16.
            other(
                decay,
                &[heads],
                Init::LogUniform {
                    low: 0.01,
                    high: 16.0,
                },
            ),
            other(convolution, &kernel, normal),
        ];
        let projections = Self::projection_sizes(config, sizes)
            .into_iter()
            .map(linear);
        let norm = other("norm.weight", &[sizes.linear_value_head_dim], Init::Ones);
        let out = linear(("out_proj", [config.hidden_size, sizes.value_width()]));
        if config.family.is_qwen35() {
            all.extend([norm, out]);
            all.extend(projections);
        } else {
            all.extend(projections);
            all.extend([norm, out]);
        }
        all
    }

    /// Returns the layers of the projections, without `.weight`, with their shapes.
    fn projection_sizes(
        config: &LlamaConfig,
        sizes: &DeltaNetConfig,
    ) -> Vec<(&'static str, [i64; 2])> {
        let (hidden, heads) = (config.hidden_size, sizes.linear_num_value_heads);
        let (mixed, values) = (sizes.mixed_width(), sizes.value_width());
        match config.family.is_qwen35() {
            true => vec![
                ("in_proj_qkv", [mixed, hidden]),
                ("in_proj_z", [values, hidden]),
                ("in_proj_b", [heads, hidden]),
                ("in_proj_a", [heads, hidden]),
            ],
            false => vec![
                ("in_proj_qkvz", [mixed + values, hidden]),
                ("in_proj_ba", [2 * heads, hidden]),
            ],
        }
    }

    /// Returns the names of the layers whose weights lie together, without `.weight`.
    pub(crate) fn joint_names(
        prefix: &str,
        config: &LlamaConfig,
        sizes: &DeltaNetConfig,
    ) -> Vec<String> {
        let layers = Self::projection_sizes(config, sizes).into_iter();
        layers
            .map(|(name, _)| format!("{prefix}.linear_attn.{name}"))
            .collect()
    }

    pub(crate) fn take(
        parameters: &mut ParameterMap,
        prefix: &str,
        config: &LlamaConfig,
        sizes: &DeltaNetConfig,
    ) -> Result<GatedDeltaNet> {
        let names = Self::joint_names(prefix, config, sizes);
        let joint = JointLinear::take(parameters, &names, false)?;
        let name = |part: &str| format!("{prefix}.linear_attn.{part}");
        let [bias, decay, convolution] = OWN.map(|part| parameters.take(&name(part)));
        Ok(GatedDeltaNet {
            projections: match config.family.is_qwen35() {
                true => Projections::ByKind(joint),
                false => Projections::ByKeyHead(joint),
            },
            out: parameters.take_linear(&name("out_proj"), false)?,
            norm: RmsNorm::take_plain(parameters, &name("norm"), config.rms_norm_eps)?,
            own: [bias?, decay?, convolution?],
            heads: DeltaRuleHeads {
                keys: sizes.linear_num_key_heads,
                key_dim: sizes.linear_key_head_dim,
                values: sizes.linear_num_value_heads,
                value_dim: sizes.linear_value_head_dim,
            },
        })
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.projections.joint().layers().chain([&self.out])
    }

    pub(crate) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        let (Projections::ByKeyHead(joint) | Projections::ByKind(joint)) = &mut self.projections;
        joint.visit(visit)?;
        visit_linear(&mut self.out, visit)
    }

    pub(crate) fn visit_parameters(
        &mut self,
        prefix: &str,
        visit: ParameterVisitor<'_>,
    ) -> overdrive_nn::Result<()> {
        for (name, tensor) in OWN.into_iter().zip(&mut self.own) {
            visit(&format!("{prefix}.linear_attn.{name}"), tensor)?;
        }
        let name = format!("{prefix}.linear_attn.norm");
        self.norm.visit_parameters(&name, visit)
    }

    /// Computes the layer for `x (B, T, C)`, as `(B, T, C)`.
    pub(crate) fn forward(&self, x: &Tensor, step: AttentionStep<'_, '_>) -> Result<Tensor> {
        let fused = step.execution.fused_kernels;
        // Padding must not change the state: with zeros, it writes nothing to it.
        let x = match step.mask {
            Mask::Marked(marked) => &x.f_mul(&real_tokens(marked, x)?)?,
            _ => x,
        };
        let [mixed, gate, rate, speed] = self.projections.forward(x, self.heads, fused)?;
        let [bias, decay, convolution] = &self.own;
        let [decay, beta] = decay_and_rate([&speed, &rate], [bias, decay], fused)?;
        let fused_rule = fused && step.execution.attention != AttentionImplementation::Eager;
        let inputs = DeltaRuleStep {
            mixed,
            convolution: convolution.f_squeeze_dim(1)?,
            decay,
            beta,
            heads: self.heads,
            options: DeltaRuleOptions {
                qk_l2norm: true,
                backend: if fused_rule {
                    Backend::Auto
                } else {
                    Backend::Math
                },
                ..DeltaRuleOptions::default()
            },
        };
        let mixed = match step.cache {
            Some(cache) => cache.delta_rule(step.layer, &inputs)?,
            None => without_cache(&inputs, step.mask)?,
        };
        let normalised = self.norm.forward(&mixed, fused)?;
        let gate = gate.f_view_as(&normalised)?;
        let gated = match fused {
            true => glu_pair(&gate, &normalised, Activation::Silu)?,
            // In fp32, as in transformers.
            false => normalised.f_mul(&gate.f_to_kind(Kind::Float)?.f_silu()?)?,
        };
        // The weight of the norm may be wider: published files of Qwen3.5 have it in fp32 beside bf16.
        let gated = gated.f_to_kind(mixed.kind())?;
        Ok(self.out.forward_with(&gated.f_flatten(2, 3)?, fused)?)
    }
}

impl Projections {
    fn joint(&self) -> &JointLinear {
        let (Projections::ByKeyHead(joint) | Projections::ByKind(joint)) = self;
        joint
    }

    fn forward(&self, x: &Tensor, heads: DeltaRuleHeads, fused: bool) -> Result<Projected> {
        let (mixed, values) = (heads.width(), heads.values * heads.value_dim);
        match self {
            Projections::ByKind(joint) => {
                joint.split(x, [mixed, values, heads.values, heads.values], fused)
            }
            Projections::ByKeyHead(joint) => {
                let [all, ba] = joint.split(x, [mixed + values, 2 * heads.values], fused)?;
                // The heads of values that share a head of keys.
                let shared = heads.values / heads.keys;
                let group = shared * heads.value_dim;
                let parts = |all: &Tensor, widths: &[i64]| {
                    let by_head = all.f_unflatten(-1, [heads.keys, -1])?;
                    by_head
                        .f_split_with_sizes(widths, -1)?
                        .iter()
                        .map(|part| part.f_flatten(-2, -1))
                        .collect::<std::result::Result<Vec<_>, _>>()
                };
                let mut parts_of_all = parts(&all, &[heads.key_dim, heads.key_dim, group, group])?;
                let gate = parts_of_all.pop();
                let mut parts_of_ba = parts(&ba, &[shared, shared])?;
                let (speed, rate) = (parts_of_ba.pop(), parts_of_ba.pop());
                let (Some(gate), Some(rate), Some(speed)) = (gate, rate, speed) else {
                    let what = "a projection was not split into its parts";
                    return Err(overdrive_core::Error::internal(what).into());
                };
                Ok([Tensor::f_cat(&parts_of_all, -1)?, gate, rate, speed])
            }
        }
    }
}

/// Computes the recurrence from states of zeros, `(B, T, H, D_v)`.
fn without_cache(inputs: &DeltaRuleStep, mask: &Mask) -> Result<Tensor> {
    let convolution = CausalConv1dOptions {
        backend: inputs.options.backend,
        ..CausalConv1dOptions::default()
    };
    let weight = &inputs.convolution;
    let Mask::Packed { sequences, .. } = mask else {
        let (convolved, _) = causal_conv1d(&inputs.mixed, weight, None, None, &convolution)?;
        let [query, key, value] = inputs.heads.split(&convolved)?;
        let tensors = DeltaRuleInputs {
            query: &query,
            key: &key,
            value: &value,
            decay: &inputs.decay,
            beta: &inputs.beta,
        };
        return Ok(gated_delta_rule(tensors, None, &inputs.options)?.0);
    };
    let ends = sequences.query_lengths().scan(0, |end, length| {
        *end += length;
        Some(*end)
    });
    let offsets: Vec<i64> = [0].into_iter().chain(ends).collect();
    let flat = |tensor: &Tensor| tensor.f_squeeze_dim(0);
    let mixed = flat(&inputs.mixed)?;
    let convolved = causal_conv1d_varlen(&mixed, weight, None, &offsets, &convolution)?;
    let [query, key, value] = inputs.heads.split(&convolved)?;
    let tensors = DeltaRuleInputs {
        query: &query,
        key: &key,
        value: &value,
        decay: &flat(&inputs.decay)?,
        beta: &flat(&inputs.beta)?,
    };
    let output = gated_delta_rule_varlen(tensors, &offsets, &inputs.options)?;
    Ok(output.f_unsqueeze(0)?)
}

/// Returns 1 for tokens and 0 for padding, `(B, T, 1)` in the dtype of `x`: a token sees itself unless it is padding.
fn real_tokens(marked: &Tensor, x: &Tensor) -> Result<Tensor> {
    let (tokens, keys) = (x.size()[1], marked.size()[3]);
    let own = marked.f_select(1, 0)?.f_narrow(2, keys - tokens, tokens)?;
    let own = own.f_diagonal(0, -2, -1)?;
    Ok(own.f_unsqueeze(-1)?.f_to_kind(x.kind())?)
}
