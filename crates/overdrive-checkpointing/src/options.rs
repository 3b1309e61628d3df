//! The options of a checkpoint.

use serde::{Deserialize, Serialize};

use crate::SavePolicy;

/// The options of [`checkpoint_with`](crate::checkpoint_with); the defaults are those of
/// `torch.utils.checkpoint.checkpoint(use_reentrant=False)`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointOptions {
    /// If `true` (the default), the random generators of the CPU and of the inputs' GPUs are set to their
    /// states of the first pass for the recomputation, so that dropout drops the same elements. It costs
    /// about 5 kB per checkpoint; disable it for closures without random operators.
    ///
    /// The CPU's generator is shared by the process: threads that draw from it during a recomputation of
    /// another thread get repeated numbers.
    pub preserve_rng_state: bool,
    /// The properties that are compared between the two passes. Default: [`DeterminismCheck::Default`].
    pub determinism_check: DeterminismCheck,
    /// If `true`, the recomputation stops at the last tensor that backward needs. The operator that saves
    /// it returns an error, which the closure should return. If the closure unwraps it, the panic is
    /// caught and not printed; it poisons a `std::sync::Mutex` that the closure holds at this point, but
    /// not a [`Shared`](crate::Shared). Default: `true`, and `false` in programs built with `panic =
    /// "abort"`.
    pub early_stop: bool,
    /// The policy that chooses the results that are kept instead of recomputed. Default:
    /// [`SavePolicy::Nothing`].
    #[serde(skip_serializing_if = "SavePolicy::is_custom")]
    pub policy: SavePolicy,
    /// If `true`, the operators of both passes are recorded and listed in errors about a difference. It
    /// costs about a microsecond per operator and the memory of the list. Default: `false`.
    pub debug: bool,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        Self {
            preserve_rng_state: true,
            determinism_check: DeterminismCheck::Default,
            // An early stop may panic in the closure, which could not be caught under `panic = "abort"`.
            early_stop: cfg!(panic = "unwind"),
            policy: SavePolicy::Nothing,
            debug: false,
        }
    }
}

impl CheckpointOptions {
    /// Returns the defaults with a policy (selective checkpointing).
    pub fn keeping(policy: SavePolicy) -> Self {
        Self {
            policy,
            ..Self::default()
        }
    }
}

/// The properties of saved tensors that are compared between the first pass and the recomputation. Their
/// number is always compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeterminismCheck {
    /// The shape, dtype and device of each saved tensor; the error names the operator.
    #[default]
    Default,
    /// None.
    None,
}
