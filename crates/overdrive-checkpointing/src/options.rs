//! How a region is checkpointed.

use serde::{Deserialize, Serialize};

use crate::SavePolicy;

/// Options of [`checkpoint`](crate::checkpoint()); the defaults are those of
/// `torch.utils.checkpoint.checkpoint(use_reentrant=False)`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(default, deny_unknown_fields)]
pub struct CheckpointOptions {
    /// Sets the random generators of the CPU and of the inputs' GPUs, for the recomputation, to what
    /// they were in the first pass, so that dropout drops the same. Default `true`. About 5 kB a
    /// checkpoint; switch it off for closures without random operators.
    ///
    /// The CPU's generator is the process's: threads that draw from it while another recomputes see
    /// its numbers repeat.
    pub preserve_rng_state: bool,
    /// What is compared between the two passes. Default [`DeterminismCheck::Default`].
    pub determinism_check: DeterminismCheck,
    /// Stops the recomputation at the last tensor that backward needs. It does so by an error from the
    /// operator that saves it, which the closure is expected to pass on; closures that unwrap panic
    /// instead, which is caught and printed nowhere (it poisons a `std::sync::Mutex` that the closure
    /// holds just then, and no [`Shared`](crate::Shared)). Default `true`, and `false` in programs
    /// built with `panic = "abort"`.
    pub early_stop: bool,
    /// Which results are kept rather than recomputed. Default [`SavePolicy::Nothing`].
    #[serde(skip_serializing_if = "SavePolicy::is_custom")]
    pub policy: SavePolicy,
    /// Records the operators of both passes and lists them in errors about their difference. Costs
    /// about a microsecond an operator and the memory of the list. Default `false`.
    pub debug: bool,
}

impl Default for CheckpointOptions {
    fn default() -> Self {
        Self {
            preserve_rng_state: true,
            determinism_check: DeterminismCheck::Default,
            early_stop: cfg!(panic = "unwind"),
            policy: SavePolicy::Nothing,
            debug: false,
        }
    }
}

impl CheckpointOptions {
    /// The defaults with a policy: selective checkpointing.
    pub fn keeping(policy: SavePolicy) -> Self {
        Self {
            policy,
            ..Self::default()
        }
    }
}

/// What is compared between the first pass and the recomputation. The number of saved tensors always is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DeterminismCheck {
    /// Shape, dtype and device of each saved tensor; a difference names the operator.
    #[default]
    Default,
    /// Nothing.
    None,
}
