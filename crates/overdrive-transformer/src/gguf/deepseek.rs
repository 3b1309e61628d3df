//! DeepSeek-V2 and V3 in GGUF files.

use tch::Tensor;

use super::config::Keys;
use crate::config::{ExpertsConfig, LlamaConfig, LlamaFamily, MlaConfig};
use crate::{Error, Result};

/// `expert_gating_func` of routers whose scores are sigmoids (DeepSeek-V3).
const SIGMOID: i64 = 2;

impl Keys<'_> {
    /// Returns the family of a file of `deepseek2`, an architecture of both.
    pub(super) fn deepseek_family(&self) -> Result<LlamaFamily> {
        Ok(match self.integer("expert_gating_func")? {
            Some(SIGMOID) => LlamaFamily::DeepseekV3,
            _ => LlamaFamily::DeepseekV2,
        })
    }

    /// Reads the sizes of attention and the options of experts.
    pub(super) fn deepseek(&self, config: &mut LlamaConfig) -> Result<()> {
        let LlamaConfig {
            family,
            mla: Some(sizes),
            experts: Some(experts),
            ..
        } = config
        else {
            return Ok(());
        };
        self.latent_sizes(sizes)?;
        self.deepseek_experts(*family, experts)?;
        config.head_dim = None;
        // Keys and values of all heads come from one vector, and a file may count it as one head of keys.
        config.num_key_value_heads = Some(config.num_attention_heads);
        Ok(())
    }

    fn latent_sizes(&self, sizes: &mut MlaConfig) -> Result<()> {
        sizes.q_lora_rank = self.integer("attention.q_lora_rank")?;
        sizes.kv_lora_rank = self.required("attention.kv_lora_rank")?;
        sizes.qk_rope_head_dim = self.required("rope.dimension_count")?;
        // Files from before 2025-04 have the sizes of heads under the other keys.
        let of_heads = |key: &str| match self.integer(&format!("{key}_mla"))? {
            Some(size) => Ok(size),
            None => self.required(key),
        };
        sizes.v_head_dim = of_heads("attention.value_length")?;
        sizes.qk_nope_head_dim = of_heads("attention.key_length")? - sizes.qk_rope_head_dim;
        Ok(())
    }

    fn deepseek_experts(&self, family: LlamaFamily, experts: &mut ExpertsConfig) -> Result<()> {
        experts.n_shared_experts = self.integer("expert_shared_count")?.unwrap_or(0);
        let first = self.integer("leading_dense_block_count")?;
        experts.first_k_dense_replace = first.unwrap_or(0);
        let scale = self.number("expert_weights_scale")?;
        // As in llama.cpp, 0 stands for none.
        experts.routed_scaling_factor = scale.filter(|&scale| scale != 0.0).unwrap_or(1.0);
        experts.norm_topk_prob = self.flag("expert_weights_norm")?.unwrap_or(false);
        if family == LlamaFamily::DeepseekV2 && experts.norm_topk_prob {
            return Err(Error::unsupported(
                self.key("expert_weights_norm"),
                "true",
                "false, unless the scores are sigmoids (expert_gating_func 2)",
            ));
        }
        experts.n_group = self.integer("expert_group_count")?.or(Some(1));
        experts.topk_group = self.integer("expert_group_used_count")?.or(Some(1));
        experts.group_limited = experts.n_group > Some(1);
        Ok(())
    }
}

/// Returns the tensors in place of `kv_b_proj`, which a file splits into keys and values by head, with their shapes: keys
/// `(H, R, K)` and values `(H, V, R)` of `H` heads.
pub(super) fn keys_and_values(name: &str, config: &LlamaConfig) -> Option<[(String, Vec<i64>); 2]> {
    let sizes = config.mla.as_ref()?;
    let rest = name.strip_prefix("model.layers.")?;
    let layer = rest.strip_suffix(".self_attn.kv_b_proj.weight")?;
    let (heads, rank) = (config.num_attention_heads, sizes.kv_lora_rank);
    Some([
        (
            format!("blk.{layer}.attn_k_b.weight"),
            vec![heads, rank, sizes.qk_nope_head_dim],
        ),
        (
            format!("blk.{layer}.attn_v_b.weight"),
            vec![heads, sizes.v_head_dim, rank],
        ),
    ])
}

/// Returns `kv_b_proj` `(H · (K + V), R)` from the two tensors in its place.
pub(super) fn joined(parts: &[Tensor]) -> Result<Tensor> {
    let [keys, values] = parts else {
        return Err(overdrive_core::Error::internal("`kv_b_proj` has not two parts").into());
    };
    let heads = Tensor::f_cat(&[keys.f_transpose(1, 2)?, values.shallow_clone()], 1)?;
    Ok(heads.f_flatten(0, 1)?)
}
