//! The names of experts and routers in checkpoints.

use crate::LlamaFamily;

/// The name of gate and up of an expert in one layer (gpt-oss, Gemma 4, Qwen3-VL).
const GATE_UP: &str = "gate_up_proj";

/// The names of gate, up and down of an expert: of Mixtral, and of the others.
const PARTS: [[&str; 3]; 2] = [["w1", "w3", "w2"], ["gate_proj", "up_proj", "down_proj"]];

/// The names of the layers of an expert, without `.weight`.
pub(crate) struct ExpertModules {
    /// Gate and up, in one layer or two.
    pub(crate) joint: Vec<String>,
    pub(crate) down: String,
}

/// Returns the names of the layers of an expert in the block `prefix`.
pub(crate) fn expert_modules(family: LlamaFamily, prefix: &str, expert: i64) -> ExpertModules {
    let block = match family {
        LlamaFamily::Mixtral => format!("{prefix}.block_sparse_moe"),
        LlamaFamily::Gemma4 => prefix.to_owned(),
        _ => format!("{prefix}.mlp"),
    };
    let name = |part: &str| format!("{block}.experts.{expert}.{part}");
    let [gate, up, down] = match family {
        LlamaFamily::Mixtral => PARTS[0],
        _ => PARTS[1],
    };
    let joint = match family.has_packed_experts() {
        true => vec![name(GATE_UP)],
        false => vec![name(gate), name(up)],
    };
    ExpertModules {
        joint,
        down: name(down),
    }
}

/// Returns the name of the router, without `.weight`.
pub(crate) fn router_module(family: LlamaFamily, prefix: &str) -> String {
    match family {
        LlamaFamily::GptOss => format!("{prefix}.mlp.router"),
        LlamaFamily::Gemma4 => format!("{prefix}.router.proj"),
        LlamaFamily::Mixtral => format!("{prefix}.block_sparse_moe.gate"),
        _ => format!("{prefix}.mlp.gate"),
    }
}

/// Returns `true` for the name of a weight or layer of an expert, with or without the prefix of an adapter.
pub(crate) fn is_of_expert(name: &str) -> bool {
    name.contains(".experts.")
}

/// Returns `true` for a layer that PEFT 0.21 with transformers 5 gives no adapter by its name.
pub(crate) fn is_unknown_to_peft(family: LlamaFamily, module: &str) -> bool {
    use LlamaFamily::{DeepseekV2, DeepseekV3, Qwen2Moe, Qwen3Moe, Qwen3Next, Qwen35Moe};
    let is_expert = is_of_expert(module);
    match family {
        // PEFT takes these names for those of the experts' parameters, and the layers of that name outside get nothing.
        Qwen3Moe | Qwen3Next | DeepseekV2 | DeepseekV3 => {
            let name = module.rsplit('.').next().unwrap_or_default();
            !is_expert && PARTS[1].contains(&name)
        }
        // Experts and routers are parameters. The router of Gemma 4 has a linear layer inside.
        _ if family.has_packed_experts() || matches!(family, Qwen2Moe | Qwen35Moe) => {
            is_expert || module.ends_with(".mlp.router") || module.ends_with(".mlp.gate")
        }
        _ => false,
    }
}

/// Returns the names of the factors of the channels and of the experts in a router of Gemma 4.
pub(crate) fn router_scale_names(prefix: &str) -> [String; 2] {
    ["scale", "per_expert_scale"].map(|name| format!("{prefix}.router.{name}"))
}

/// Returns the name of the corrections of a router's scores (DeepSeek-V3).
pub(crate) fn correction_name(prefix: &str) -> String {
    format!("{prefix}.mlp.gate.e_score_correction_bias")
}

/// Returns `true` for a parameter that training never changes: the corrections of a router's scores.
pub(crate) fn is_correction(name: &str) -> bool {
    name.ends_with(".e_score_correction_bias")
}

/// Returns the names of gate, up and down of the expert that computes every token, without `.weight`.
pub(crate) fn shared_modules(family: LlamaFamily, prefix: &str) -> [String; 3] {
    let block = match family.is_deepseek() {
        true => "shared_experts",
        false => "shared_expert",
    };
    PARTS[1].map(|part| format!("{prefix}.mlp.{block}.{part}"))
}

/// Returns the name of the gate of that expert's output, without `.weight`.
pub(crate) fn shared_gate_module(prefix: &str) -> String {
    format!("{prefix}.mlp.shared_expert_gate")
}

/// Returns the layer, the expert and the part (0 gate, 1 up, 2 down, 3 gate and up) that `module` names, if it is a part
/// of an expert.
pub(crate) fn expert_of(module: &str) -> Option<(&str, usize, usize)> {
    let (layer, rest) = module.strip_prefix("model.layers.")?.split_once('.')?;
    let rest = rest
        .strip_prefix("block_sparse_moe.experts.")
        .or_else(|| rest.strip_prefix("mlp.experts."))
        .or_else(|| rest.strip_prefix("experts."))?;
    let (expert, part) = rest.split_once('.')?;
    if part == GATE_UP {
        return Some((layer, expert.parse().ok()?, 3));
    }
    let mut parts = PARTS.iter().flat_map(|parts| parts.iter().enumerate());
    let (part, _) = parts.find(|(_, name)| **name == part)?;
    Some((layer, expert.parse().ok()?, part))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_of_experts_are_read_as_they_are_written() {
        for family in [
            LlamaFamily::Mixtral,
            LlamaFamily::Qwen2Moe,
            LlamaFamily::Qwen3Moe,
            LlamaFamily::Gemma4,
        ] {
            let ExpertModules { joint, down } = expert_modules(family, "model.layers.7", 12);
            let parts: &[usize] = match joint.len() {
                1 => &[3, 2],
                _ => &[0, 1, 2],
            };
            for (&part, name) in parts.iter().zip(joint.iter().chain([&down])) {
                assert_eq!(expert_of(name), Some(("7", 12, part)), "{name}");
            }
            let router = router_module(family, "model.layers.7");
            assert_eq!(expert_of(&router), None);
        }
        assert_eq!(expert_of("model.layers.0.mlp.gate_proj"), None);
        for name in shared_modules(LlamaFamily::Qwen2Moe, "model.layers.0") {
            assert_eq!(expert_of(&name), None);
        }
    }
}
