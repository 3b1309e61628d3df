//! What can go wrong in this crate.

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of gradient accumulation or of a batch plan.
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

    /// The batch sizes of a plan do not divide.
    #[error("{problem}; {remedy}")]
    UnevenPlan {
        /// The numbers that do not go together.
        problem: String,
        /// The nearest numbers that do.
        remedy: String,
    },

    /// A loss is not one number.
    #[error(
        "the loss of a micro-batch has shape {shape:?}, expected one number: the sum over its tokens (Reduction::Sum)"
    )]
    LossShape {
        /// The shape that was given.
        shape: Vec<i64>,
    },

    /// More micro-batches came than the window announced.
    #[error(
        "the window announced {announced} micro-batches and all have come; call step before the next backward"
    )]
    WindowFull {
        /// How many were announced.
        announced: usize,
    },

    /// A step was asked for before all announced micro-batches had come.
    #[error(
        "the window announced {announced} micro-batches and {seen} have come; each was weighted for all of them, so run the rest, or call abandon"
    )]
    WindowIncomplete {
        /// How many were announced.
        announced: usize,
        /// How many backward passes there were.
        seen: usize,
    },

    /// A window was opened while another was under way.
    #[error(
        "a window is under way with {seen} micro-batches; call step or abandon before opening the next"
    )]
    WindowOpen {
        /// Backward passes since the last step.
        seen: usize,
    },

    /// A micro-batch has another token count than the window announced.
    #[error(
        "micro-batch {position} of the window has {given} tokens, but the window announced {announced}; the weights of its predecessors rest on that number"
    )]
    TokenCount {
        /// Position in the window, from 0.
        position: usize,
        /// What the window said.
        announced: u64,
        /// What backward was given.
        given: u64,
    },

    /// The loss of a micro-batch has another number of terms than the window's first.
    #[error(
        "micro-batch {position} has a loss of {given} terms, expected {expected}; every micro-batch of a window has the same terms (with a count of 0 where a term has nothing)"
    )]
    Terms {
        /// Position in the window, from 0.
        position: usize,
        /// The number of terms expected.
        expected: usize,
        /// The number of terms given.
        given: usize,
    },

    /// A loss of several terms came without an announced window.
    #[error(
        "a loss of several terms needs their counts ahead, since gradients that are added up cannot be divided term by term; open a window by Window::of_terms first"
    )]
    TermsNotAnnounced,

    /// A step was asked for without any backward before it.
    #[error(
        "step was called without a backward since the last step; there are no gradients to apply"
    )]
    NothingAccumulated,

    /// A gradient scaler was given to some calls of a window and not to others.
    #[error(
        "{call} was called {now} a gradient scaler, but the window's earlier ones {before}; give the same scaler to every backward and to step"
    )]
    ScalerMismatch {
        /// The method.
        call: &'static str,
        /// How it was called now.
        now: &'static str,
        /// How the earlier ones were.
        before: &'static str,
    },

    /// The hook that reduces over processes failed.
    #[error("synchronizing over processes failed: {source}")]
    Sync {
        /// The hook's error.
        source: Box<dyn std::error::Error + Send + Sync>,
    },

    /// The optimizer or clipping failed.
    #[error(transparent)]
    Optimizer(#[from] overdrive_optim::Error),

    /// The gradient scaler failed.
    #[error(transparent)]
    Precision(#[from] overdrive_precision::Error),

    /// The shim or libtorch failed.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),

    /// A tensor operation failed.
    #[error(transparent)]
    Tch(#[from] tch::TchError),
}
