//! The errors of this crate.

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of gradient accumulation or of a batch plan.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option out of its range, or a loss that does not have one element.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),

    /// The batch sizes of a plan do not divide.
    #[error("{problem}; {remedy}")]
    UnevenPlan {
        /// The numbers that do not divide.
        problem: String,
        /// The nearest numbers that do.
        remedy: String,
    },

    /// Backward was called more often than the window announced.
    #[error(
        "all {announced} micro-batches that the window announced have run; call step before the next backward"
    )]
    WindowFull {
        /// The number of announced micro-batches.
        announced: usize,
    },

    /// A step was requested before all announced micro-batches had run.
    #[error(
        "the window announced {announced} micro-batches, of which {seen} have run; their gradients are weighted for all of them: run the others, or call abandon"
    )]
    WindowIncomplete {
        /// The number of announced micro-batches.
        announced: usize,
        /// The number of backward passes in the window.
        seen: usize,
    },

    /// A window was opened before the previous one was stepped.
    #[error(
        "the previous window has {seen} micro-batches that were not stepped; call step or abandon before opening the next"
    )]
    WindowOpen {
        /// The number of backward passes since the last step.
        seen: usize,
    },

    /// The loss of a micro-batch has another number of terms than the first of its window.
    #[error(
        "the loss of micro-batch {position} has {given} terms; it must have {expected} as every micro-batch of the window (a term without elements has the count 0)"
    )]
    Terms {
        /// The position in the window, from 0.
        position: usize,
        /// The expected number of terms.
        expected: usize,
        /// The given number of terms.
        given: usize,
    },

    /// Backward was called without a window.
    #[error(
        "backward was called without an open window, so the count of the loss is not known; call open before the first backward of each step, or pass the count to backward_counted"
    )]
    NotAnnounced,

    /// A count was passed although a window had announced it.
    #[error(
        "backward_counted was called although the open window has announced the counts of its micro-batches; call backward"
    )]
    Announced,

    /// A pass of the caller's was given to an accumulator with a scaler or several processes.
    #[error(
        "backward_by supports neither a loss scaler nor several processes, which need a backward pass by the accumulator; call backward"
    )]
    OwnPass,

    /// A call after a backward or a step that failed halfway.
    #[error(
        "a backward or step of this window failed, and its gradients are incomplete or already changed; call abandon before the next window"
    )]
    Failed,

    /// A step was requested without a backward since the last step.
    #[error(
        "step was called without a backward since the last step: there are no gradients to apply"
    )]
    NothingAccumulated,

    /// A loss does not depend on a parameter that is trained.
    #[error(
        "the loss requires no gradient, so there is nothing to accumulate; compute it outside of no_grad, from at least one parameter that requires a gradient"
    )]
    NoGradient,

    /// The synchronization over processes failed.
    #[error("synchronizing over processes failed: {source}")]
    Sync {
        /// The error of the [`GradientSync`](crate::GradientSync).
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// An error of the optimizer or of clipping.
    #[error(transparent)]
    Optimizer(#[from] overdrive_optim::Error),

    /// An error of the gradient scaler.
    #[error(transparent)]
    Precision(#[from] overdrive_precision::Error),

    /// An error of libtorch through overdrive-sys.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),

    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}
