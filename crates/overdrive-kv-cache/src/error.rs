/// The errors of the caches.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option out of its range, or a tensor of another shape, dtype or device than the cache needs.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// A GPU kernel or the CUDA driver failed.
    #[error(transparent)]
    Gpu(#[from] overdrive_gpu::Error),
    /// A layer index is outside `0..layers`.
    #[error(
        "layer {layer} does not exist in a cache of {layers} layers; create the cache with the model's number of layers"
    )]
    NoSuchLayer {
        /// The index of the layer.
        layer: usize,
        /// The number of layers of the cache.
        layers: usize,
    },
    /// The new keys or values are part of an autograd graph.
    #[error(
        "the keys or values of layer {layer} require a gradient, which a cache does not support; run the model under `tch::no_grad`, or train without a cache"
    )]
    RequiresGrad {
        /// The layer.
        layer: usize,
    },
    /// A truncation to more tokens than the cache holds.
    #[error("cannot truncate to {len} tokens: the cache holds {held}; give at most {held}")]
    TruncateBeyondEnd {
        /// The number of tokens to keep.
        len: i64,
        /// The number of tokens held.
        held: i64,
    },
    /// A truncation to a length that needs tokens that the cache has dropped.
    #[error(
        "cannot truncate to {len} tokens: layer {layer} has dropped the tokens before {first}, and its window of {window} needs some of them; raise `slack`, or reset the cache and run the sequence again"
    )]
    AlreadyDropped {
        /// The number of tokens to keep.
        len: i64,
        /// The first layer that cannot be truncated.
        layer: usize,
        /// The position of the first token after the sinks that the layer keeps.
        first: i64,
        /// The window of the layer.
        window: i64,
    },
    /// A truncation to a length whose recurrent states are gone.
    #[error(
        "cannot truncate to {len} of {held} tokens: the recurrent layers have their state after {earlier} tokens and now, and between the two only if the steps were short; fork the cache at a length to return to, raise `slack`, or reset it and run the sequence again"
    )]
    StateDropped {
        /// The number of tokens to keep.
        len: i64,
        /// The number of tokens held.
        held: i64,
        /// The number of tokens of the earlier state.
        earlier: i64,
    },
    /// The new tokens do not fit a cache of fixed size.
    #[error(
        "the cache has room for {capacity} tokens per row: it holds {held}, and {new} more do not fit; create a larger cache, or generate fewer tokens"
    )]
    Full {
        /// The capacity in tokens.
        capacity: i64,
        /// The number of tokens held.
        held: i64,
        /// The number of new tokens.
        new: i64,
    },
    /// The cache cannot return its tokens as one tensor.
    #[error(
        "{cache} stores its sequences separately and cannot return them as one tensor; call `attend` instead of `append`"
    )]
    NotDense {
        /// The kind of cache.
        cache: &'static str,
    },
    /// An operation that this kind of cache does not support.
    #[error("{cache} cannot {what}: {hint}")]
    Unsupported {
        /// The kind of cache.
        cache: &'static str,
        /// The operation.
        what: &'static str,
        /// The remedy.
        hint: &'static str,
    },
    /// A saved state does not fit the cache.
    #[error(
        "tensor {name:?} of the saved cache is {found}; load it into a cache of the same kind, created for the same model"
    )]
    BadState {
        /// The name of the tensor.
        name: String,
        /// The property that does not fit.
        found: String,
    },
    /// The file holds another kind of cache, or a cache with other settings.
    #[error(
        "{path} has {key} {found:?} and this cache has {key} {expected:?}; create the cache with the settings of the saved one"
    )]
    OtherCache {
        /// The file.
        path: String,
        /// The setting that differs; `cache` is the kind.
        key: String,
        /// The value in the file.
        found: String,
        /// The value of the cache.
        expected: String,
    },
    /// An error of a safetensors file.
    #[error(transparent)]
    File(#[from] overdrive_safetensors::Error),
    /// A step of a paged cache needs more blocks than there are.
    #[error(
        "the step needs {needed} blocks, but {free} are free; run fewer sequences or tokens at once, release sequences, or raise `num_blocks`"
    )]
    OutOfBlocks {
        /// The number of blocks that the new tokens need.
        needed: usize,
        /// The number of blocks that can be taken.
        free: usize,
    },
    /// A paged cache does not hold this sequence.
    #[error("sequence {id} is not in this cache: it was released, or belongs to another cache")]
    NoSuchSequence {
        /// The sequence.
        id: crate::SequenceId,
    },
    /// A step has the same sequence twice.
    #[error("sequence {id} occurs twice in one step; pass all its new tokens in one entry")]
    SequenceTwice {
        /// The sequence.
        id: crate::SequenceId,
    },
    /// Layers share the keys and values of a layer that has not attended in this step.
    #[error(
        "layer {layer} holds no keys and values of this step for other layers; it must attend first, with `AttendOptions::keep`"
    )]
    NotKept {
        /// The layer whose keys and values are shared.
        layer: usize,
    },
    /// A layer attends twice in one step.
    #[error("layer {layer} has already attended in this step; `truncate(0)` restarts the step")]
    LayerTwice {
        /// The layer.
        layer: usize,
    },
    /// A step is committed before every layer of the model has run.
    #[error(
        "the step cannot be committed: layer {layer} has not received its tokens; run the model with this batch as its cache first"
    )]
    StepNotRun {
        /// The first layer without its tokens.
        layer: usize,
    },
    /// An error of overdrive-sys.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of the attention kernel.
    #[error(transparent)]
    Attention(#[from] overdrive_attention::Error),
    /// An error of the delta rule or its convolution.
    #[error(transparent)]
    LinearAttention(#[from] overdrive_linear_attention::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Tch(#[from] tch::TchError),
}

/// The result of a cache operation.
pub type Result<T> = std::result::Result<T, Error>;
