//! What can go wrong in this crate.

use tch::Kind;

/// The result of everything in this crate that can fail.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of an optimizer, a clipping function, a schedule or a stored state.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// libtorch refused an operation that tch binds.
    #[error(transparent)]
    Torch(#[from] tch::TchError),

    /// libtorch refused an operation that goes through overdrive-sys.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),

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

    /// An option was given that the chosen schedule does not know, or one that it needs is absent.
    #[error("learning-rate schedule `{schedule}`: option `{option}` {problem}")]
    ScheduleOption {
        /// Name of the schedule, as transformers spells it.
        schedule: &'static str,
        /// Name of the option.
        option: &'static str,
        /// What is wrong with it and what to do.
        problem: String,
    },

    /// Two parameters carry the same name.
    #[error("parameter `{name}` is listed twice; state is kept by name, so names must be unique")]
    DuplicateParameter {
        /// The name.
        name: String,
    },

    /// Two names stand for the same memory, which would be stepped twice.
    #[error(
        "parameters `{first}` and `{second}` share their memory and would be stepped twice; list tied parameters once"
    )]
    SharedParameter {
        /// The name listed first.
        first: String,
        /// The name listed later.
        second: String,
    },

    /// The result of an operation was given as a parameter.
    #[error(
        "parameter `{name}` is not a leaf of the autograd graph, so backward leaves no gradient on it; give the tensor it was computed from"
    )]
    NonLeafParameter {
        /// Name of the parameter.
        name: String,
    },

    /// A parameter has a kind that no optimizer steps.
    #[error(
        "parameter `{name}` is {kind:?}; optimizers and averages take floating-point parameters only (Float, Double, Half, BFloat16), exclude this one"
    )]
    UnsupportedKind {
        /// Name of the parameter.
        name: String,
        /// Its kind.
        kind: Kind,
    },

    /// A parameter that is no matrix was given to an optimizer of matrices.
    #[error(
        "parameter `{name}` has the shape {size:?}, and Muon steps two-dimensional parameters only; give this one to an AdamW beside it, as norms, biases, embeddings and output layers"
    )]
    NotAMatrix {
        /// Name of the parameter.
        name: String,
        /// Its shape.
        size: Vec<i64>,
    },

    /// A file that holds or is to hold an optimizer's state failed.
    #[error("cannot {action} `{}`: {source}", path.display())]
    StateFile {
        /// What was being done to it.
        action: &'static str,
        /// The file, or its folder.
        path: std::path::PathBuf,
        /// What the system said.
        source: std::io::Error,
    },

    /// The system refused a piece of advice about mapped memory.
    #[error("the system refuses to page the optimizer state: {0}")]
    Paging(#[from] std::io::Error),

    /// The number of bounds is not the number of parameter groups.
    #[error(
        "{given} bounds for {groups} parameter groups; give one for each group, None where it is not clipped"
    )]
    BoundCount {
        /// How many were given.
        given: usize,
        /// How many parameter groups there are.
        groups: usize,
    },

    /// The fused kernel was demanded where it does not apply.
    #[error(
        "the fused AdamW kernel does not apply to parameter `{name}`: {reason}; use Implementation::Auto or Implementation::Plain"
    )]
    NoFusedKernel {
        /// Name of the parameter.
        name: String,
        /// Why not.
        reason: String,
    },

    /// A gradient cannot be applied to its parameter.
    #[error("the gradient of parameter `{name}` is {found}, expected {expected}")]
    UnfitGradient {
        /// Name of the parameter.
        name: String,
        /// What the gradient is.
        found: String,
        /// What it has to be.
        expected: String,
    },

    /// A parameter changed device, kind or shape after its optimizer state was made.
    #[error(
        "parameter `{name}` is {now} but its optimizer state is {state}; move, convert or resize the model before the first step, or make a new optimizer and load the state_dict of this one"
    )]
    MovedParameter {
        /// Name of the parameter.
        name: String,
        /// Kind and device, or shape, of the parameter now.
        now: String,
        /// Kind and device, or shape, of the state.
        state: String,
    },

    /// The number of learning rates is not the number of parameter groups.
    #[error("{given} learning rates for {groups} parameter groups; give one for each group")]
    LearningRateCount {
        /// How many were given.
        given: usize,
        /// How many parameter groups there are.
        groups: usize,
    },

    /// The gradients contain an infinity or NaN and the caller asked to be told.
    #[error(
        "the total gradient norm of order {norm_type} is {norm}, so the gradients cannot be clipped; look for a diverging loss, or set error_if_nonfinite to false to let it pass"
    )]
    NonFiniteNorm {
        /// The order of the norm.
        norm_type: f64,
        /// The norm that was found.
        norm: f64,
    },

    /// A stored state does not fit this optimizer.
    #[error("the optimizer state does not fit: {problem}")]
    StateMismatch {
        /// Which tensors or groups are missing, unexpected or misshapen, by name.
        problem: String,
    },

    /// This optimizer does not offer what was asked for.
    #[error("{optimizer} does not support {what}; {instead}")]
    Unsupported {
        /// The optimizer.
        optimizer: &'static str,
        /// What was asked for.
        what: &'static str,
        /// What to do instead.
        instead: &'static str,
    },

    /// tch's own optimizer panicked; its API has no fallible form.
    #[error("tch's optimizer failed: {message}")]
    TchOptimizer {
        /// The message of the panic.
        message: String,
    },
}
