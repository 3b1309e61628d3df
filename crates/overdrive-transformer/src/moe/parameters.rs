//! The weights of a mixture of experts, and those that lie together.

use super::names::{
    ExpertModules, expert_modules, router_module, shared_gate_module, shared_modules,
};
use crate::config::{ExpertsConfig, LlamaConfig, LlamaFamily};
use crate::feed_forward::WeightSpec;
use crate::parameters::ParameterRole;

/// Returns the weights of the block `prefix`, in the order of transformers' modules.
pub(crate) fn weights(
    config: &LlamaConfig,
    prefix: &str,
    experts: &ExpertsConfig,
) -> Vec<WeightSpec> {
    let hidden = config.hidden_size;
    let router = router_module(config.family, prefix);
    let router = (router, [experts.num_experts, hidden], ParameterRole::Router);
    let of_expert = |expert| of_expert(config, prefix, expert);
    let mut weights: Vec<WeightSpec> = (0..experts.num_experts).flat_map(of_expert).collect();
    // transformers has the router last in Qwen3-MoE, Qwen3-VL and DeepSeek, and first in the others.
    match config.family {
        LlamaFamily::Qwen3Moe
        | LlamaFamily::Qwen3VlMoe
        | LlamaFamily::DeepseekV2
        | LlamaFamily::DeepseekV3 => weights.push(router),
        _ => weights.insert(0, router),
    }
    if let Some(inner) = experts.shared_width() {
        let [gate, up, down] = shared_modules(config.family, prefix);
        weights.push((gate, [inner, hidden], ParameterRole::Linear));
        weights.push((up, [inner, hidden], ParameterRole::Linear));
        weights.push((down, [hidden, inner], ParameterRole::Linear));
        if !config.family.is_deepseek() {
            let gate = shared_gate_module(prefix);
            weights.push((gate, [1, hidden], ParameterRole::Router));
        }
    }
    weights
}

fn of_expert(config: &LlamaConfig, prefix: &str, expert: i64) -> Vec<WeightSpec> {
    let (hidden, inner) = (config.hidden_size, config.expert_intermediate_size());
    let ExpertModules { joint, down } = expert_modules(config.family, prefix, expert);
    let outputs = 2 * inner / joint.len() as i64;
    let weight = |name, [outputs, inputs]: [i64; 2]| match config.family.has_transposed_experts() {
        true => (name, [inputs, outputs], ParameterRole::Conv1d),
        false => (name, [outputs, inputs], ParameterRole::Linear),
    };
    let joint = joint
        .into_iter()
        .map(|name| weight(name, [outputs, hidden]));
    let mut weights: Vec<WeightSpec> = joint.collect();
    // Mixtral has them in the order w1, w2, w3.
    let place = match config.family {
        LlamaFamily::Mixtral => 1,
        _ => weights.len(),
    };
    weights.insert(place, weight(down, [hidden, inner]));
    weights
}

/// Returns the groups of modules of the block `prefix` whose weights lie together, without `.weight`: all experts
/// contiguously, as a grouped matmul needs them, and a file with one tensor for all.
pub(crate) fn adjacent(
    config: &LlamaConfig,
    prefix: &str,
    experts: &ExpertsConfig,
) -> Vec<Vec<String>> {
    let (mut inner, mut outer) = (Vec::new(), Vec::new());
    for expert in 0..experts.num_experts {
        let ExpertModules { joint, down } = expert_modules(config.family, prefix, expert);
        inner.extend(joint);
        outer.push(down);
    }
    let mut groups = vec![inner, outer];
    if experts.shared_width().is_some() {
        let [gate, up, _] = shared_modules(config.family, prefix);
        groups.push(vec![gate, up]);
    }
    groups
}
