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
    /// A negative length.
    #[error("a length must not be negative, and {len} is")]
    NegativeLength {
        /// What was given.
        len: i64,
    },
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

/// Result of a cache operation.
pub type Result<T> = std::result::Result<T, Error>;
