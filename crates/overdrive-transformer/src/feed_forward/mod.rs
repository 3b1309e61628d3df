//! The feed-forward block of a decoder layer.

mod clamped_swiglu;

use overdrive_fused::{Activation, glu, rows};
use overdrive_nn::{Adapter, Linear, LinearWeight, joint_forward_into};
use tch::Tensor;

use self::clamped_swiglu::ClampedSwiglu;
use crate::activation_names::activation_named;
use crate::config::ExpertsConfig;
use crate::moe::{self, ExpertLoad, LoadBalance, MixtureOfExperts};
use crate::parameters::{ParameterMap, ParameterRole};
use crate::per_layer::GaussianTopK;
use crate::projections::{JointLinear, LinearVisitor, visit_linear};
use crate::{LlamaConfig, LlamaFamily, Result};

/// The feed-forward block of a decoder layer.
#[derive(Debug)]
pub(crate) enum FeedForward {
    Gated(GatedMlp),
    Experts(MixtureOfExperts),
}

/// The function of gate and up. A new activation begins at [`Activation`] in overdrive-fused.
#[derive(Debug, Clone, Copy)]
enum Gate {
    /// `act(gate) · up` of gate and up, one after the other.
    Plain(Activation),
    /// gpt-oss's function of gate and up, which alternate.
    Clamped(ClampedSwiglu),
}

/// A weight of a feed-forward block: its name without `.weight`, its shape in a file, and its role.
pub(crate) type WeightSpec = (String, [i64; 2], ParameterRole);

impl FeedForward {
    /// Returns the weights of layer `layer`, in the order of transformers' modules.
    pub(crate) fn weights(config: &LlamaConfig, layer: i64) -> Vec<WeightSpec> {
        let (prefix, hidden) = (config.layer_name(layer), config.hidden_size);
        let Some(experts) = config.experts_of(layer) else {
            let inner = config.intermediate_size_of(layer);
            let (joint, down) = mlp_modules(&prefix, config);
            let outputs = 2 * inner / joint.len() as i64;
            let joint = joint
                .into_iter()
                .map(|name| (name, [outputs, hidden], ParameterRole::Linear));
            let down = (down, [hidden, inner], ParameterRole::Linear);
            return joint.chain([down]).collect();
        };
        moe::weights(config, &prefix, experts)
    }

    /// Returns the groups of modules whose weights lie together, without `.weight`.
    pub(crate) fn adjacent(config: &LlamaConfig, layer: i64) -> Vec<Vec<String>> {
        let prefix = config.layer_name(layer);
        let Some(experts) = config.experts_of(layer) else {
            return vec![mlp_modules(&prefix, config).0];
        };
        moe::adjacent(config, &prefix, experts)
    }

    pub(crate) fn take(
        parameters: &mut ParameterMap,
        layer: i64,
        config: &LlamaConfig,
    ) -> Result<FeedForward> {
        let prefix = config.layer_name(layer);
        Ok(match config.experts_of(layer) {
            Some(experts) => FeedForward::Experts(MixtureOfExperts::take(
                parameters, &prefix, config, experts,
            )?),
            None => {
                let (joint, down) = mlp_modules(&prefix, config);
                let mut mlp = GatedMlp::take(parameters, &joint, &down, config)?;
                mlp.sparsity = GaussianTopK::new(config.activation_sparsity(layer))?;
                FeedForward::Gated(mlp)
            }
        })
    }

    pub(crate) fn layers(&self) -> Box<dyn Iterator<Item = &Linear> + '_> {
        match self {
            FeedForward::Gated(mlp) => Box::new(mlp.layers()),
            FeedForward::Experts(experts) => Box::new(experts.layers()),
        }
    }

    pub(crate) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        match self {
            FeedForward::Gated(mlp) => mlp.visit(visit),
            FeedForward::Experts(experts) => experts.visit(visit),
        }
    }

    /// Computes the block, and the load of its experts if `balance` wants it.
    pub(crate) fn forward(
        &self,
        x: &Tensor,
        fused: bool,
        balance: &LoadBalance,
    ) -> Result<(Tensor, Option<ExpertLoad>)> {
        match self {
            FeedForward::Gated(mlp) => Ok((mlp.forward(x, fused)?, None)),
            FeedForward::Experts(experts) => experts.forward(x, fused, balance),
        }
    }

    /// Computes the block for rows of f32 in slices; `joint` and `inner` are memory to compute in. Returns `false` if
    /// something took operators on tensors.
    pub(crate) fn forward_rows(
        &self,
        x: &[f32],
        joint: &mut Vec<f32>,
        inner: &mut Vec<f32>,
        y: &mut [f32],
    ) -> Result<bool> {
        match self {
            FeedForward::Gated(mlp) => mlp.forward_rows(x, joint, inner, y),
            FeedForward::Experts(experts) => experts.forward_rows(x, joint, inner, y),
        }
    }
}

/// Returns the names of gate and up, in one or two layers, and of down, without `.weight`.
fn mlp_modules(prefix: &str, config: &LlamaConfig) -> (Vec<String>, String) {
    let name = |part: &str| format!("{prefix}.mlp.{part}_proj");
    if config.family == LlamaFamily::GraniteMoeHybrid {
        let name = |part: &str| format!("{prefix}.shared_mlp.{part}_linear");
        return (vec![name("input")], name("output"));
    }
    let joint = match config.has_joint_gate_up() {
        true => vec![name("gate_up")],
        false => vec![name("gate"), name("up")],
    };
    (joint, name("down"))
}

/// The gated feed-forward block: `down(act(gate(x)) · up(x))`, or that with gpt-oss's gate.
#[derive(Debug)]
pub(crate) struct GatedMlp {
    gate_up: JointLinear,
    down: Linear,
    gate: Gate,
    /// The gates that are set to zero before the activation (Gemma 3n).
    sparsity: Option<GaussianTopK>,
}

impl GatedMlp {
    /// Takes the block of the modules `joint`, gate and up in one or two layers, and `down`.
    pub(crate) fn take(
        parameters: &mut ParameterMap,
        joint: &[String],
        down: &str,
        config: &LlamaConfig,
    ) -> Result<GatedMlp> {
        let bias = config.mlp_bias;
        Ok(GatedMlp {
            gate_up: JointLinear::take(parameters, joint, bias)?,
            down: parameters.take_linear(down, bias)?,
            gate: Gate::Plain(activation_named("hidden_act", &config.hidden_act)?),
            sparsity: None,
        })
    }

    /// Takes an expert whose weights a file has as `(I, O)` (gpt-oss, Qwen3-VL).
    pub(crate) fn take_transposed(
        parameters: &mut ParameterMap,
        joint: &[String],
        down: &str,
        config: &LlamaConfig,
        experts: &ExpertsConfig,
    ) -> Result<GatedMlp> {
        let bias = config.has_mlp_bias();
        Ok(GatedMlp {
            gate_up: JointLinear::take_conv1d(parameters, joint, bias)?,
            down: parameters.take_conv1d(down, bias)?,
            gate: match config.family {
                LlamaFamily::GptOss => Gate::Clamped(ClampedSwiglu::new(experts)),
                _ => Gate::Plain(activation_named("hidden_act", &config.hidden_act)?),
            },
            sparsity: None,
        })
    }

    pub(crate) fn layers(&self) -> impl Iterator<Item = &Linear> {
        self.gate_up.layers().chain([&self.down])
    }

    pub(crate) fn visit(&mut self, visit: LinearVisitor<'_>) -> overdrive_nn::Result<()> {
        self.gate_up.visit(visit)?;
        visit_linear(&mut self.down, visit)
    }

    /// Returns the activation; `None` for the gate of gpt-oss.
    pub(crate) fn activation(&self) -> Option<Activation> {
        match self.gate {
            Gate::Plain(activation) => Some(activation),
            Gate::Clamped(_) => None,
        }
    }

    /// Returns `true` if backward computes a gradient for a weight or an adapter of the block.
    pub(crate) fn is_trained(&self) -> bool {
        self.layers().any(|layer| {
            layer.adapter().is_some_and(Adapter::is_active)
                || matches!(layer.in_use(), (LinearWeight::Dense { weight, .. }, _) if weight.requires_grad())
        })
    }

    pub(crate) fn forward(&self, x: &Tensor, fused: bool) -> Result<Tensor> {
        let inner = match self.gate {
            Gate::Clamped(gate) => gate.forward(&self.gate_up.forward_single(x, fused)?, fused)?,
            Gate::Plain(activation) if fused && self.sparsity.is_none() => {
                glu(&self.gate_up.forward_joint(x)?, activation)?
            }
            Gate::Plain(activation) => {
                let inner = self.gate_up.outputs() as i64 / 2;
                let [gate, up] = self.gate_up.split(x, [inner, inner], fused)?;
                let gate = match self.sparsity {
                    Some(sparsity) => sparsity.forward(&gate)?,
                    None => gate,
                };
                activation.apply(&gate)?.f_mul(&up)?
            }
        };
        Ok(self.down.forward_with(&inner, fused)?)
    }

    /// Computes the block for rows of f32 in slices; `joint` and `inner` are memory to compute in. Returns `false` if
    /// something took operators on tensors.
    pub(crate) fn forward_rows(
        &self,
        x: &[f32],
        joint: &mut Vec<f32>,
        inner: &mut Vec<f32>,
        y: &mut [f32],
    ) -> Result<bool> {
        let both = self.gate_up.outputs();
        let rows = x.len() / self.gate_up.inputs().max(1);
        joint.resize(rows * both, 0.0);
        inner.resize(rows * both / 2, 0.0);
        let joined = self.gate_up.forward_rows(x, joint)?;
        match self.gate {
            Gate::Plain(activation) => rows::glu(joint, both / 2, activation, inner)?,
            Gate::Clamped(gate) => gate.forward_rows(joint, inner),
        }
        Ok(joint_forward_into(inner, &[&self.down], y)? && joined)
    }
}
