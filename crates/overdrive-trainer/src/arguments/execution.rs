//! The arguments about execution: kernels, attention, activation checkpointing.

use overdrive_checkpointing::{CheckpointOptions, DeterminismCheck, SavePolicy, Schedule};
use overdrive_transformer::{AttentionImplementation, Execution};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::TrainingArguments;

/// The options of `gradient_checkpointing`: the keys of `torch.utils.checkpoint`, and Overdrive's keys for the
/// choice of blocks and operators.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct GradientCheckpointingArguments {
    /// Accepted and ignored: recomputation uses saved-tensor hooks and is never reentrant.
    pub use_reentrant: Option<bool>,
    /// If `true`, recomputation repeats the random numbers of the first pass, so that dropout drops the same
    /// elements. Default `true`.
    pub preserve_rng_state: bool,
    /// The comparison of the tensors that the two passes save. Default `default`.
    pub determinism_check: DeterminismCheck,
    /// The blocks that are recomputed: `every_block`, `every_nth: N`, `segments: N`, `sqrt_segments`.
    /// Default `every_block`.
    pub schedule: Schedule,
    /// The results that are kept nevertheless: `nothing`, `matmuls`, `attention`, `matmuls_and_attention`.
    /// Default `nothing`.
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
    /// Returns the execution options of `attn_implementation`, `fused_kernels` and `gradient_checkpointing`.
    pub fn execution(&self) -> Execution {
        let mut execution = Execution::default();
        execution.fused_kernels = self.fused_kernels;
        execution.attention = self.attn_implementation;
        if self.gradient_checkpointing {
            let options = &self.gradient_checkpointing_kwargs;
            execution.checkpointing = options.schedule.clone();
            execution.checkpoint_options = CheckpointOptions {
                preserve_rng_state: options.preserve_rng_state,
                determinism_check: options.determinism_check,
                ..CheckpointOptions::keeping(options.policy.clone())
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
