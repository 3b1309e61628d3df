/// What can go wrong with adapters.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The layers are part of a graph that has not been differentiated yet.
    #[error(
        "the model's layers are still held by a checkpointed graph: call `backward` or drop the loss before changing them"
    )]
    InUse,
    /// An error of a quantized base.
    #[error(transparent)]
    Quantization(#[from] overdrive_quantization::Error),
    /// An error of a fused kernel.
    #[error(transparent)]
    Fused(#[from] overdrive_fused::Error),
    /// An error of a weight file.
    #[error(transparent)]
    File(#[from] overdrive_safetensors::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
