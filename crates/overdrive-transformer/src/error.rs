use std::fmt::Display;
use std::path::PathBuf;

use crate::checkpoint::CheckpointProblems;

/// The errors of models and their files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A key of the configuration or an option is out of range, an input tensor has the wrong shape, dtype or
    /// device, or a file cannot be read, written or parsed.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// The configuration asks for something that this crate does not implement.
    #[error("`{key}` is {found}, which is not supported; supported: {supported}")]
    Unsupported {
        /// The key of the configuration.
        key: String,
        /// Its value.
        found: String,
        /// The values that are supported.
        supported: String,
    },
    /// The tensors of a checkpoint do not match its configuration.
    #[error("the checkpoint in {} does not fit its configuration: {problems}", path.display())]
    Checkpoint {
        /// The folder.
        path: PathBuf,
        /// The tensors that are missing, unexpected or of another shape.
        problems: Box<CheckpointProblems>,
    },
    /// A weight file is damaged, or not a safetensors file.
    #[error("{} is not a complete safetensors file: {reason}; download or write it again", path.display())]
    BadWeightFile {
        /// The file.
        path: PathBuf,
        /// The damage.
        reason: String,
    },
    /// The folder holds no weights.
    #[error(
        "{} holds neither model.safetensors nor pytorch_model.bin, nor an index of either (model.safetensors.index.json); a checkpoint in another format can be converted by `save_pretrained` of transformers",
        path.display()
    )]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
    /// A weight file in PyTorch's own format is damaged, or names code to run.
    #[error(transparent)]
    Pickle(#[from] overdrive_pickle::Error),
    /// Another error of a weight file.
    #[error(transparent)]
    WeightFile(overdrive_safetensors::Error),
    /// The input has more positions than the model.
    #[error(
        "{positions} positions exceed the model's context of {limit}; shorten the input, or raise `{key}` if the model \
         supports it"
    )]
    ContextExceeded {
        /// The number of past and new tokens.
        positions: i64,
        /// The largest number of positions.
        limit: i64,
        /// The key of the configuration that sets the limit.
        key: &'static str,
    },
    /// The input has images, and the model sees none.
    #[error(
        "the input has image tokens or three positions for each token, and this model sees no images; use a model with a \
         `vision_config` that is read, such as Qwen3-VL"
    )]
    NoVision,
    /// The cache was made for a model with another number of layers.
    #[error(
        "the cache has {cache} layers and the model has {model}; create the cache with the model's number of layers"
    )]
    CacheLayers {
        /// The number of layers of the cache.
        cache: usize,
        /// The number of layers of the model.
        model: usize,
    },
    /// An error of a fused kernel.
    #[error(transparent)]
    Fused(#[from] overdrive_fused::Error),
    /// An error of activation checkpointing.
    #[error(transparent)]
    Checkpointing(#[from] overdrive_checkpointing::Error),
    /// An error of attention.
    #[error(transparent)]
    Attention(#[from] overdrive_attention::Error),
    /// An error of linear attention.
    #[error(transparent)]
    LinearAttention(#[from] overdrive_linear_attention::Error),
    /// An error of a quantized weight.
    #[error(transparent)]
    Quantization(#[from] overdrive_quantization::Error),
    /// An error of a layer.
    #[error(transparent)]
    Nn(#[from] overdrive_nn::Error),
    /// An error of the key/value cache.
    #[error(transparent)]
    Cache(#[from] overdrive_kv_cache::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Tch(#[from] tch::TchError),
}

impl Error {
    /// Returns the error for a `key` whose value this crate does not implement.
    pub(crate) fn unsupported(
        key: impl Into<String>,
        found: impl Display,
        supported: impl Into<String>,
    ) -> Error {
        Error::Unsupported {
            key: key.into(),
            found: found.to_string(),
            supported: supported.into(),
        }
    }
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

impl From<overdrive_safetensors::Error> for Error {
    fn from(error: overdrive_safetensors::Error) -> Error {
        use overdrive_safetensors::Error as File;
        match error {
            // The two kinds that a caller handles are variants of this crate's own.
            File::Common(error) => Error::Common(error),
            File::BadFile { path, reason } => Error::BadWeightFile { path, reason },
            File::Tch(error) => Error::Tch(error),
            other => Error::WeightFile(other),
        }
    }
}
