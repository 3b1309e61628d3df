/// The errors of layers.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A tensor of the wrong shape, dtype or device, or an option out of its range.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// A checkpointed graph that has not run its backward pass yet still uses the layers.
    #[error(
        "a checkpointed graph still uses the model's layers; call `backward` or drop the loss before you change them"
    )]
    InUse,
    /// An error of an adapter, or of a visitor of [`AdapterHost`](crate::AdapterHost).
    #[error(transparent)]
    Adapter(Box<dyn std::error::Error + Send + Sync>),
    /// An error of a fused kernel.
    #[error(transparent)]
    Fused(#[from] overdrive_fused::Error),
    /// An error of a quantized weight.
    #[error(transparent)]
    Quantization(#[from] overdrive_quantization::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Tch(#[from] tch::TchError),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
