//! What can go wrong in this crate.

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of checkpointing, offloading or planning.
///
/// Those that arise in backward come out of it as its error: whole, as the source of
/// [`overdrive_sys::Error::Callback`], from [`overdrive_autograd::backward`]; as text from tch's own
/// `f_backward`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option is outside its range.
    #[error("{option} is {value}, expected {expected}")]
    InvalidOption {
        /// Name of the option.
        option: &'static str,
        /// What it was set to.
        value: String,
        /// What it may be.
        expected: &'static str,
    },

    /// The closure returned an error in the first pass.
    #[error(transparent)]
    Closure(Box<dyn std::error::Error + Send + Sync>),

    /// The closure returned an error when it was run again.
    #[error("the recomputation of a checkpoint failed: {source}")]
    Recomputation {
        /// The closure's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// The closure panicked when it was run again.
    #[error("the recomputation of a checkpoint panicked: {message}")]
    Panic {
        /// What the panic said.
        message: String,
    },

    /// The recomputation saved another tensor than the first pass.
    #[error(
        "the recomputation of a checkpoint differs from its first pass at saved tensor {index}{operator}: first {first}, now {now}; a checkpointed closure must compute the same each time (modes, shapes, global state){log}"
    )]
    Mismatch {
        /// Which of the saved tensors, from 0.
        index: usize,
        /// The operator that saves it in the recomputation, as `, saved by aten::…`, or empty.
        operator: String,
        /// Shape, dtype and device in the first pass.
        first: String,
        /// Shape, dtype and device in the recomputation.
        now: String,
        /// The operators of both passes, with [`crate::CheckpointOptions::debug`]; else empty.
        log: String,
    },

    /// The recomputation saved another number of tensors than the first pass.
    #[error(
        "the recomputation of a checkpoint saved {now} tensors{operator}, its first pass {first}; a checkpointed closure must compute the same each time (modes, shapes, global state){log}"
    )]
    Count {
        /// How many in the first pass.
        first: usize,
        /// How many in the recomputation; `more than …` where it was stopped there.
        now: String,
        /// The operator that saved one too many, as `, the last by aten::…`, or empty.
        operator: String,
        /// The operators of both passes, with [`crate::CheckpointOptions::debug`]; else empty.
        log: String,
    },

    /// The recomputation called an operator more often than the first pass, and its policy keeps it.
    #[error(
        "the recomputation of a checkpoint calls {operator} for the {occurrence}. time, its first pass called it {first} times, and its results are kept by policy: a checkpointed closure must compute the same each time"
    )]
    KeptOperator {
        /// The operator.
        operator: String,
        /// Which call it is, from 1.
        occurrence: usize,
        /// How many calls there were in the first pass.
        first: usize,
    },

    /// A saved tensor was changed in place before backward used it.
    #[error(
        "a tensor of shape {shape:?} that backward needs was changed in place after an operator saved it; use the operator's form without the trailing underscore there"
    )]
    ChangedInPlace {
        /// Its shape.
        shape: Vec<i64>,
    },

    /// A closure ran backward over itself.
    #[error(
        "the recomputation of a checkpoint needs a tensor of that same checkpoint: its closure runs backward over what it is computing"
    )]
    Recursion,

    /// A plan cannot be met.
    #[error(
        "a budget of {budget_bytes} bytes cannot be met: recomputing every block still peaks at {least_bytes} bytes; split the blocks, shrink the micro-batch, or offload"
    )]
    Budget {
        /// What was asked for.
        budget_bytes: u64,
        /// The least that recomputation can reach.
        least_bytes: u64,
    },

    /// A plan does not fit the blocks it is used with.
    #[error("the plan is for {planned} blocks and there are {given}; measure these")]
    Plan {
        /// How many it has.
        planned: usize,
        /// How many there are.
        given: usize,
    },

    /// The file for offloaded tensors failed.
    #[error("offloading to a file: {operation}: {source}")]
    File {
        /// What was being done.
        operation: &'static str,
        /// The system's error.
        source: std::io::Error,
    },

    /// The autograd layer failed.
    #[error(transparent)]
    Autograd(#[from] overdrive_autograd::Error),

    /// The shim or libtorch failed.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),

    /// A tensor operation failed.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}
