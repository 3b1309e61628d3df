use serde_json::{Map, Value, json};

use super::family::LlamaFamily;
use super::fields::{Fields, bad, positive};
use super::sizes::check_size;
use crate::Result;

/// The sizes of multi-head latent attention, MLA (DeepSeek-AI 2024, arXiv:2405.04434), with the keys and defaults of
/// transformers' `DeepseekV2Config` and `DeepseekV3Config`. Keys and values of all heads are computed from one vector of
/// a token, and a cache holds that vector in their place.
#[derive(Debug, Clone, PartialEq)]
pub struct MlaConfig {
    /// The width of the vector that the queries of a token are computed from; `None`: the hidden states. Default 1536.
    pub q_lora_rank: Option<i64>,
    /// The width of the vector that keys and values of a token are computed from; default 512.
    pub kv_lora_rank: i64,
    /// The number of a head's channels without positions; default 128.
    pub qk_nope_head_dim: i64,
    /// The number of a head's channels with rotary positions, whose keys all heads share; default 64.
    pub qk_rope_head_dim: i64,
    /// The number of channels of a head's values; default 128.
    pub v_head_dim: i64,
    /// If `true`, neighbouring channels are rotated together (always in DeepSeek-V2); default `true`.
    pub rope_interleave: bool,
}

impl MlaConfig {
    /// Returns the defaults of transformers, or `None` for a family with other attention.
    pub(super) fn of(family: LlamaFamily) -> Option<MlaConfig> {
        family.is_deepseek().then_some(MlaConfig {
            q_lora_rank: Some(1536),
            kv_lora_rank: 512,
            qk_nope_head_dim: 128,
            qk_rope_head_dim: 64,
            v_head_dim: 128,
            rope_interleave: true,
        })
    }

    pub(super) fn read(&mut self, family: LlamaFamily, fields: &mut Fields) -> Result<()> {
        // An absent key is the default, and null is none.
        if let Some(value) = fields.take_nullable("q_lora_rank") {
            let rank = value.map(|value| positive("q_lora_rank", &value));
            self.q_lora_rank = rank.transpose()?;
        }
        fields.positive("kv_lora_rank", &mut self.kv_lora_rank)?;
        fields.positive("qk_nope_head_dim", &mut self.qk_nope_head_dim)?;
        fields.positive("qk_rope_head_dim", &mut self.qk_rope_head_dim)?;
        fields.positive("v_head_dim", &mut self.v_head_dim)?;
        if family == LlamaFamily::DeepseekV3 {
            fields.boolean("rope_interleave", &mut self.rope_interleave)?;
        }
        Ok(())
    }

    pub(super) fn write(&self, family: LlamaFamily, map: &mut Map<String, Value>) {
        let sizes = json!({
            "q_lora_rank": self.q_lora_rank,
            "kv_lora_rank": self.kv_lora_rank,
            "qk_nope_head_dim": self.qk_nope_head_dim,
            "qk_rope_head_dim": self.qk_rope_head_dim,
            "v_head_dim": self.v_head_dim,
        });
        if let Value::Object(sizes) = sizes {
            map.extend(sizes);
        }
        if family == LlamaFamily::DeepseekV3 {
            map.insert("rope_interleave".to_owned(), self.rope_interleave.into());
        }
    }

    pub(super) fn validate(&self, family: LlamaFamily) -> Result<()> {
        for (key, size) in [
            ("q_lora_rank", self.q_lora_rank.unwrap_or(1)),
            ("kv_lora_rank", self.kv_lora_rank),
            ("qk_nope_head_dim", self.qk_nope_head_dim),
            ("qk_rope_head_dim", self.qk_rope_head_dim),
            ("v_head_dim", self.v_head_dim),
        ] {
            check_size(key, size)?;
        }
        if self.qk_rope_head_dim % 2 != 0 {
            let expected = "even, as rotary positions rotate pairs of channels";
            return Err(bad(
                "qk_rope_head_dim",
                &self.qk_rope_head_dim.into(),
                expected,
            ));
        }
        if family == LlamaFamily::DeepseekV2 && !self.rope_interleave {
            return Err(bad(
                "rope_interleave",
                &false.into(),
                "true for deepseek_v2",
            ));
        }
        Ok(())
    }

    /// Returns the number of channels of a head's queries and keys.
    pub(crate) fn qk_head_dim(&self) -> i64 {
        self.qk_nope_head_dim + self.qk_rope_head_dim
    }

    /// Returns the number of channels of a token in a cache.
    pub(crate) fn cached_dim(&self) -> i64 {
        self.kv_lora_rank + self.qk_rope_head_dim
    }
}
