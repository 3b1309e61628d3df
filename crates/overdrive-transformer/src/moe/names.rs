//! The names of experts and routers in checkpoints.

use crate::LlamaFamily;

/// The names of gate, up and down of an expert: of Mixtral, and of Qwen's mixtures.
const PARTS: [[&str; 3]; 2] = [["w1", "w3", "w2"], ["gate_proj", "up_proj", "down_proj"]];

/// Returns the name of the module of the experts in the block `prefix`, and those of the parts of an expert.
fn modules(family: LlamaFamily, prefix: &str) -> (String, [&'static str; 3]) {
    match family {
        LlamaFamily::Mixtral => (format!("{prefix}.block_sparse_moe"), PARTS[0]),
        _ => (format!("{prefix}.mlp"), PARTS[1]),
    }
}

/// Returns the names of gate, up and down of an expert, without `.weight`.
pub(crate) fn expert_modules(family: LlamaFamily, prefix: &str, expert: i64) -> [String; 3] {
    let (block, parts) = modules(family, prefix);
    parts.map(|part| format!("{block}.experts.{expert}.{part}"))
}

/// Returns the names of the two layers of an expert of gpt-oss, gate and up in one, without `.weight`.
pub(crate) fn packed_expert_modules(prefix: &str, expert: i64) -> [String; 2] {
    ["gate_up_proj", "down_proj"].map(|part| format!("{prefix}.mlp.experts.{expert}.{part}"))
}

/// Returns the name of the router, without `.weight`.
pub(crate) fn router_module(family: LlamaFamily, prefix: &str) -> String {
    match family {
        LlamaFamily::GptOss => format!("{prefix}.mlp.router"),
        _ => format!("{}.gate", modules(family, prefix).0),
    }
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

/// Returns the layer, the expert and the part (0 gate, 1 up, 2 down) that `module` names, if it is a part of an
/// expert.
pub(crate) fn expert_of(module: &str) -> Option<(&str, usize, usize)> {
    let (layer, rest) = module.strip_prefix("model.layers.")?.split_once('.')?;
    let rest = rest
        .strip_prefix("block_sparse_moe.experts.")
        .or_else(|| rest.strip_prefix("mlp.experts."))?;
    let (expert, part) = rest.split_once('.')?;
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
        ] {
            let names = expert_modules(family, "model.layers.7", 12);
            for (part, name) in names.iter().enumerate() {
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
