//! The errors of this crate.

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error of an optimizer, a clipping function, a schedule or a stored state.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error of tch.
    #[error(transparent)]
    Tch(#[from] tch::TchError),

    /// An error of libtorch through overdrive-sys.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),

    /// An error of the GPU kernels.
    #[error(transparent)]
    Gpu(#[from] overdrive_gpu::Error),

    /// An option out of its range, a parameter of an unsupported dtype, or a state file that cannot be
    /// read or written.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),

    /// An option does not apply to the schedule, is out of its range, or is missing.
    #[error("learning-rate schedule `{schedule}`: option `{option}` {problem}")]
    ScheduleOption {
        /// The name of the schedule in transformers.
        schedule: &'static str,
        /// The name of the option.
        option: &'static str,
        /// The reason, with the remedy.
        problem: String,
    },

    /// Two parameters have the same name.
    #[error(
        "parameter `{name}` is listed twice; states are stored by name, so names must be unique"
    )]
    DuplicateParameter {
        /// The name.
        name: String,
    },

    /// Two parameters share memory, which would be updated twice.
    #[error(
        "parameters `{first}` and `{second}` share their memory and would be updated twice; list tied parameters once"
    )]
    SharedParameter {
        /// The name that is listed first.
        first: String,
        /// The name that is listed later.
        second: String,
    },

    /// A parameter shares memory with a tensor of its own state, such as after `set_data` with a tensor of a
    /// `state_dict`.
    #[error(
        "parameter `{name}` shares its memory with `{part}` of its optimizer state, and a step writes both; give the parameter a copy"
    )]
    SharedState {
        /// The name of the parameter.
        name: String,
        /// The tensor of the state.
        part: &'static str,
    },

    /// A parameter cannot be updated in place.
    #[error(
        "parameter `{name}` is {problem}, and cannot be updated in place; pass a copy with memory of its own, as `Tensor::copy` makes"
    )]
    UnwritableParameter {
        /// The name of the parameter.
        name: String,
        /// The property that prevents the update.
        problem: &'static str,
    },

    /// A parameter is the result of an operation.
    #[error(
        "parameter `{name}` is not a leaf of the autograd graph, so it gets no gradient; pass the tensor from which it was computed"
    )]
    NonLeafParameter {
        /// The name of the parameter.
        name: String,
    },

    /// A parameter of Muon is not a matrix.
    #[error(
        "parameter `{name}` has shape {size:?}, but Muon updates matrices only; pass this parameter to an AdamW beside it, as norms, biases, embeddings and output layers"
    )]
    NotAMatrix {
        /// The name of the parameter.
        name: String,
        /// The shape of the parameter.
        size: Vec<i64>,
    },

    /// The system rejected advice about mapped memory.
    #[error("cannot page the optimizer state: {0}")]
    Paging(#[from] std::io::Error),

    /// The number of norm limits differs from the number of parameter groups.
    #[error(
        "there are {given} norm limits for {groups} parameter groups; pass one for each group, None for groups that are not clipped"
    )]
    BoundCount {
        /// The number of limits.
        given: usize,
        /// The number of parameter groups.
        groups: usize,
    },

    /// The fused kernel was requested, but it does not support a parameter.
    #[error(
        "the fused AdamW kernel does not apply to parameter `{name}`: {reason}; use Implementation::Auto or Implementation::Plain"
    )]
    NoFusedKernel {
        /// The name of the parameter.
        name: String,
        /// The reason.
        reason: String,
    },

    /// A gradient cannot be applied to its parameter.
    #[error("the gradient of parameter `{name}` is {found}; it must be {expected}")]
    UnfitGradient {
        /// The name of the parameter.
        name: String,
        /// The layout, dtype and device, or shape of the gradient.
        found: String,
        /// The expected layout, dtype and device, or shape.
        expected: String,
    },

    /// A parameter changed its device, dtype or shape after its optimizer state was created.
    #[error(
        "parameter `{name}` is {now}, but its optimizer state is {state}; move, convert or resize the model before the first step, or create a new optimizer and load the state_dict of this one"
    )]
    MovedParameter {
        /// The name of the parameter.
        name: String,
        /// The dtype and device, or the shape, of the parameter now.
        now: String,
        /// The dtype and device, or the shape, of the state.
        state: String,
    },

    /// The number of learning rates differs from the number of parameter groups.
    #[error(
        "there are {given} learning rates for {groups} parameter groups; pass one for each group"
    )]
    LearningRateCount {
        /// The number of learning rates.
        given: usize,
        /// The number of parameter groups.
        groups: usize,
    },

    /// The gradients contain an infinity or NaN, and `error_if_nonfinite` is set.
    #[error(
        "the total gradient norm of order {norm_type} is {norm}, so the gradients cannot be clipped; check the loss for divergence, or set error_if_nonfinite to false to ignore this"
    )]
    NonFiniteNorm {
        /// The order of the norm.
        norm_type: f64,
        /// The norm.
        norm: f64,
    },

    /// A stored state does not fit this optimizer.
    #[error("the optimizer state does not fit: {problem}")]
    StateMismatch {
        /// The names of missing, unexpected or misshapen tensors or groups.
        problem: String,
    },

    /// The optimizer does not support a method.
    #[error("{optimizer} does not support {what}; {instead}")]
    Unsupported {
        /// The optimizer.
        optimizer: &'static str,
        /// The method.
        what: &'static str,
        /// The alternative.
        instead: &'static str,
    },

    /// tch's own optimizer panicked. Its API has no fallible form.
    #[error("tch's optimizer failed: {message}")]
    TchOptimizer {
        /// The message of the panic.
        message: String,
    },
}
