//! How the model computes: kernels, attention, activation checkpointing.

use overdrive_checkpointing::{CheckpointOptions, DeterminismCheck, SavePolicy, Schedule};
use overdrive_transformer::{AttentionImplementation, Execution};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::TrainingArguments;

/// How `gradient_checkpointing` recomputes: the keys of `torch.utils.checkpoint`, and ours about what is
/// recomputed.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradientCheckpointingArguments {
    /// Taken and not needed: recomputation goes through saved-tensor hooks and is never reentrant.
    pub use_reentrant: Option<bool>,
    /// Repeats the random numbers of the first pass, so that dropout drops the same. Default true.
    pub preserve_rng_state: bool,
    /// Compares what the two passes save. Default `default`.
    pub determinism_check: DeterminismCheck,
    /// Which blocks are recomputed: `every_block`, `every_nth: N`, `segments: N`, `sqrt_segments`.
    /// Default `every_block`.
    pub schedule: Schedule,
    /// What is kept none the less: `nothing`, `matmuls`, `attention`, `matmuls_and_attention`. Default
    /// `nothing`.
    pub policy: SavePolicy,
}

impl Default for GradientCheckpointingArguments {
    fn default() -> Self {
        Self {
            use_reentrant: None,
            preserve_rng_state: true,
            determinism_check: DeterminismCheck::default(),
            schedule: Schedule::EveryBlock,
            policy: SavePolicy::default(),
        }
    }
}

impl TrainingArguments {
    /// What `attn_implementation`, `fused_kernels` and `gradient_checkpointing` come to.
    pub fn execution(&self) -> Execution {
        let mut execution = Execution::default();
        execution.fused_kernels = self.fused_kernels;
        execution.attention = self.attn_implementation;
        if self.gradient_checkpointing {
            let how = &self.gradient_checkpointing_kwargs;
            execution.checkpointing = how.schedule.clone();
            execution.checkpoint_options = CheckpointOptions {
                preserve_rng_state: how.preserve_rng_state,
                determinism_check: how.determinism_check,
                ..CheckpointOptions::keeping(how.policy.clone())
            };
        }
        execution
    }
}

/// Reads and writes an attention implementation by its name in transformers.
pub(crate) mod attention_by_name {
    use super::{AttentionImplementation, Deserialize, Deserializer, Serializer};

    pub(crate) fn serialize<S: Serializer>(
        attention: &AttentionImplementation,
        serializer: S,
    ) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(attention.name())
    }

    pub(crate) fn deserialize<'de, D: Deserializer<'de>>(
        deserializer: D,
    ) -> Result<AttentionImplementation, D::Error> {
        let name = String::deserialize(deserializer)?;
        let known = &["eager", "sdpa", "flash_attention_2"];
        name.parse()
            .map_err(|_| serde::de::Error::unknown_variant(&name, known))
    }
}
