use tch::{Device, Kind};

/// What can go wrong in a cache.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A layer outside `0..layers` was named.
    #[error(
        "layer {layer} does not exist in a cache of {layers} layers: make the cache with the model's number of layers"
    )]
    NoSuchLayer {
        /// The layer asked for.
        layer: usize,
        /// How many there are.
        layers: usize,
    },
    /// Keys and values are not both `(B, H, T, D)` with equal `B`, `H` and `T`.
    #[error(
        "keys of shape {keys:?} and values of shape {values:?} do not fit together: expected (B, H, T, D) with equal B, H and T"
    )]
    BadShape {
        /// Shape of the keys.
        keys: Vec<i64>,
        /// Shape of the values.
        values: Vec<i64>,
    },
    /// The new entries do not fit what the layer already holds.
    #[error(
        "layer {layer} holds {held:?} entries of shape {held_shape:?} (B, H, D) on {held_device:?}, and {got:?} ones of shape {got_shape:?} on {got_device:?} cannot join them: reset the cache before another batch or model uses it"
    )]
    Mismatch {
        /// The layer.
        layer: usize,
        /// Element type held.
        held: Kind,
        /// `(B, H, D)` held.
        held_shape: Vec<i64>,
        /// Device of what is held.
        held_device: Device,
        /// Element type offered.
        got: Kind,
        /// `(B, H, D)` offered.
        got_shape: Vec<i64>,
        /// Device of what is offered.
        got_device: Device,
    },
    /// Keys and values of different kinds or devices.
    #[error(
        "layer {layer}: the keys are {keys:?} on {keys_device:?} and the values {values:?} on {values_device:?}: a cache keeps both in one kind on one device"
    )]
    ValuesUnlikeKeys {
        /// The layer.
        layer: usize,
        /// Element type of the keys.
        keys: Kind,
        /// Device of the keys.
        keys_device: Device,
        /// Element type of the values.
        values: Kind,
        /// Device of the values.
        values_device: Device,
    },
    /// The new entries are part of an autograd graph.
    #[error(
        "the keys or values of layer {layer} require a gradient, which a cache cannot carry: run the model under `tch::no_grad`, or without a cache to train"
    )]
    RequiresGrad {
        /// The layer.
        layer: usize,
    },
    /// The cache was asked to keep more than it holds.
    #[error("cannot truncate to {len} tokens: the cache holds {held}")]
    TruncateBeyondEnd {
        /// Tokens asked for.
        len: i64,
        /// Tokens held.
        held: i64,
    },
    /// The cache was asked to go back to where it would need tokens that it has dropped.
    #[error(
        "cannot truncate to {len} tokens: layer {layer} keeps none before token {first}, and a window of {window} would need some: keep more (`slack`), or reset the cache and feed the text again"
    )]
    AlreadyDropped {
        /// Tokens asked for.
        len: i64,
        /// The layer.
        layer: usize,
        /// The first token after the sinks that it keeps.
        first: i64,
        /// Its window.
        window: i64,
    },
    /// A negative length.
    #[error("a length must not be negative, and {len} is")]
    NegativeLength {
        /// What was given.
        len: i64,
    },
    /// More tokens than a cache of fixed size can take.
    #[error(
        "the cache takes {capacity} tokens a row, {held} are held and {new} more do not fit: make it larger, or generate fewer"
    )]
    Full {
        /// Tokens it can take.
        capacity: i64,
        /// Tokens held.
        held: i64,
        /// Tokens offered.
        new: i64,
    },
    /// A mask that does not cover the tokens of the cache.
    #[error(
        "the mask has {columns} columns for {tokens} tokens, past and new: it needs one for each"
    )]
    BadMask {
        /// Columns of the mask.
        columns: i64,
        /// Tokens so far.
        tokens: i64,
    },
    /// A view was asked for that does not exist as one tensor.
    #[error(
        "{cache} keeps its rows apart and cannot show them as one tensor: call `attend` instead of `append`"
    )]
    NotDense {
        /// The kind of cache.
        cache: &'static str,
    },
    /// Something that this kind of cache does not do.
    #[error("{cache} cannot {what}: {hint}")]
    Unsupported {
        /// The kind of cache.
        cache: &'static str,
        /// What was asked.
        what: &'static str,
        /// The way out.
        hint: &'static str,
    },
    /// A saved state that does not fit the cache.
    #[error(
        "tensor {name:?} of the saved cache is {found}: was it saved by another kind of cache or for another model?"
    )]
    BadState {
        /// The tensor.
        name: String,
        /// What is wrong with it.
        found: String,
    },
    /// A setting outside its range.
    #[error("cache config: `{key}` is {found}: expected {expected}")]
    BadConfig {
        /// The setting.
        key: &'static str,
        /// Its value.
        found: String,
        /// What fits.
        expected: &'static str,
    },
    /// A name that no kind of cache has.
    #[error("unknown cache {name:?}: expected one of {known}")]
    UnknownImplementation {
        /// The name.
        name: String,
        /// Those there are.
        known: &'static str,
    },
    /// A file that another cache wrote.
    #[error(
        "{path} holds {key} {found:?} and this cache has {key} {expected:?}: make the cache as the one that was saved"
    )]
    OtherCache {
        /// The file.
        path: String,
        /// The setting in which the two differ; `cache` is the kind.
        key: String,
        /// That of the file.
        found: String,
        /// That of the cache.
        expected: String,
    },
    /// An error of a safetensors file.
    #[error(transparent)]
    File(#[from] overdrive_safetensors::Error),
    /// A step of a paged cache needs more blocks than there are.
    #[error(
        "the step needs {needed} blocks and {free} are free: run fewer texts or tokens at once, release texts, or make the cache larger"
    )]
    OutOfBlocks {
        /// Blocks that the new tokens need.
        needed: usize,
        /// Blocks that could be taken.
        free: usize,
    },
    /// A text that a paged cache does not hold.
    #[error("text {id} is not in this cache: it was released, or belongs to another one")]
    NoSuchSequence {
        /// The text.
        id: crate::SequenceId,
    },
    /// A text has two parts in one step.
    #[error("text {id} is twice in one step: give all its new tokens at once")]
    SequenceTwice {
        /// The text.
        id: crate::SequenceId,
    },
    /// Keys that are not one row of the new tokens of a step.
    #[error(
        "keys of shape {got:?} in a step of {tokens} new tokens: expected (1, H, {tokens}, D), the tokens of all texts one after another"
    )]
    NotOneRow {
        /// Shape of the keys.
        got: Vec<i64>,
        /// New tokens of the step.
        tokens: i64,
    },
    /// A layer attends twice in one step.
    #[error("layer {layer} has had its turn in this step: `truncate(0)` starts the step again")]
    LayerTwice {
        /// The layer.
        layer: usize,
    },
    /// A step is committed that the model has not run.
    #[error(
        "the step cannot be committed, layer {layer} was not given its tokens: run the model with this batch as its cache first"
    )]
    StepNotRun {
        /// The first such layer.
        layer: usize,
    },
    /// An error of the layer under this crate.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of the attention kernel.
    #[error(transparent)]
    Attention(#[from] overdrive_attention::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

/// Result of a cache operation.
pub type Result<T> = std::result::Result<T, Error>;
