//! The errors of this crate.

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of checkpointing, offloading or planning.
///
/// The backward pass returns the errors of a recomputation: [`overdrive_autograd::backward`] as the source of
/// [`overdrive_sys::Error::Callback`], tch's own `f_backward` as text.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option out of its range, or a file for offloaded tensors that cannot be created, written or read.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),

    /// The closure returned an error in the first pass.
    #[error(transparent)]
    Closure(Box<dyn std::error::Error + Send + Sync>),

    /// The closure returned an error in the recomputation.
    #[error("the recomputation of a checkpoint failed: {source}")]
    Recomputation {
        /// The closure's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// The closure panicked in the recomputation.
    #[error("the recomputation of a checkpoint panicked: {message}")]
    Panic {
        /// The message of the panic.
        message: String,
    },

    /// The recomputation saved a different tensor than the first pass.
    #[error(
        "the recomputation of a checkpoint differs from the first pass at saved tensor {index}{operator}: first {first}, now {now}; a checkpointed closure must compute the same in both passes (modes, shapes, global state){log}"
    )]
    Mismatch {
        /// The index of the saved tensor, from 0.
        index: usize,
        /// The operator that saves it in the recomputation, as `, saved by aten::…`; may be empty.
        operator: String,
        /// The shape, dtype and device in the first pass.
        first: String,
        /// The shape, dtype and device in the recomputation.
        now: String,
        /// The operators of both passes, with [`crate::CheckpointOptions::debug`]; else empty.
        log: String,
    },

    /// The recomputation saved another number of tensors than the first pass.
    #[error(
        "the recomputation of a checkpoint saved {now} tensors{operator}, the first pass {first}; a checkpointed closure must compute the same in both passes (modes, shapes, global state){log}"
    )]
    Count {
        /// The number in the first pass.
        first: usize,
        /// The number in the recomputation; `more than …` if it was stopped there.
        now: String,
        /// The operator that saved one too many, as `, the last by aten::…`; may be empty.
        operator: String,
        /// The operators of both passes, with [`crate::CheckpointOptions::debug`]; else empty.
        log: String,
    },

    /// The recomputation called an operator whose results the policy keeps more often than the first pass.
    #[error(
        "the recomputation of a checkpoint called {operator} {occurrence} times, the first pass {first} times, and the policy keeps its results; a checkpointed closure must compute the same in both passes"
    )]
    KeptOperator {
        /// The operator.
        operator: String,
        /// The number of calls in the recomputation so far.
        occurrence: usize,
        /// The number of calls in the first pass.
        first: usize,
    },

    /// A saved tensor was changed in place before backward used it.
    #[error(
        "a tensor of shape {shape:?} that backward needs was changed in place after an operator saved it; use the operator without the trailing underscore there"
    )]
    ChangedInPlace {
        /// The shape of the tensor.
        shape: Vec<i64>,
    },

    /// A closure ran backward over its own checkpoint.
    #[error(
        "the recomputation of a checkpoint needs a tensor of the same checkpoint: its closure must not run backward over tensors that it is computing"
    )]
    Recursion,

    /// No plan meets the memory budget.
    #[error(
        "a budget of {budget_bytes} bytes is too small: with every block recomputed, memory still peaks at {least_bytes} bytes; split the blocks, reduce the micro-batch, or offload"
    )]
    Budget {
        /// The requested budget.
        budget_bytes: u64,
        /// The smallest peak that recomputation can reach.
        least_bytes: u64,
    },

    /// A plan was made for another number of blocks.
    #[error(
        "the plan is for {planned} blocks, but there are {given}; measure these blocks and plan again"
    )]
    Plan {
        /// The number of blocks in the plan.
        planned: usize,
        /// The number of blocks in the chain.
        given: usize,
    },

    /// An error of overdrive-autograd.
    #[error(transparent)]
    Autograd(#[from] overdrive_autograd::Error),

    /// An error of libtorch through overdrive-sys.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),

    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}
