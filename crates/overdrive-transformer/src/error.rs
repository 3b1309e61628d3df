use std::path::PathBuf;

use crate::checkpoint::CheckpointProblems;

/// What can go wrong with a model or its files.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: "read", "write", …
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A file is not the JSON it should be.
    #[error("{} is not valid JSON: {source}", path.display())]
    Json {
        /// The file.
        path: PathBuf,
        /// What the parser says.
        source: serde_json::Error,
    },
    /// A key of the model's configuration has a value of the wrong type or range.
    #[error("config key `{key}` is {found}: expected {expected}")]
    BadConfig {
        /// The key.
        key: String,
        /// Its value, as JSON.
        found: String,
        /// What fits.
        expected: String,
    },
    /// The configuration asks for what this crate does not compute.
    #[error("config key `{key}` is {found}, which is not supported; supported: {supported}")]
    Unsupported {
        /// The key.
        key: String,
        /// Its value.
        found: String,
        /// What is supported.
        supported: String,
    },
    /// The checkpoint's tensors are not those that the configuration calls for.
    #[error("the checkpoint in {} does not fit its configuration: {problems}", path.display())]
    Checkpoint {
        /// The folder.
        path: PathBuf,
        /// All that is missing, unexpected or misshapen.
        problems: Box<CheckpointProblems>,
    },
    /// A weight file is damaged, or not a safetensors file.
    #[error("{} is not a complete safetensors file ({reason}): fetch or write it again", path.display())]
    BadWeightFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The folder holds no weights.
    #[error(
        "{} holds neither model.safetensors nor model.safetensors.index.json: a checkpoint in another format can be converted by `save_pretrained` of transformers",
        path.display()
    )]
    NoWeights {
        /// The folder.
        path: PathBuf,
    },
    /// A file that the index names is not there.
    #[error(
        "{} is missing, in which {tensors} tensors should be according to model.safetensors.index.json: fetch it again",
        path.display()
    )]
    MissingShard {
        /// The file.
        path: PathBuf,
        /// How many tensors the index says are in it.
        tensors: usize,
    },
    /// Another error of a weight file.
    #[error(transparent)]
    WeightFile(overdrive_safetensors::Error),
    /// An input tensor has the wrong shape or kind.
    #[error("`{name}` is {found}: expected {expected}")]
    BadInput {
        /// Which input.
        name: &'static str,
        /// Its shape or kind.
        found: String,
        /// What fits.
        expected: String,
    },
    /// More positions than the model has.
    #[error(
        "{positions} positions exceed the model's context of {limit}: shorten the input, or raise `{key}` where the positions allow it"
    )]
    ContextExceeded {
        /// Past and new tokens together.
        positions: i64,
        /// What the model can take.
        limit: i64,
        /// The key of the configuration that says so.
        key: &'static str,
    },
    /// The cache was made for a model with another number of layers.
    #[error("the cache has {cache} layers and the model {model}: make it with the model's number")]
    CacheLayers {
        /// Layers of the cache.
        cache: usize,
        /// Layers of the model.
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
    Torch(#[from] tch::TchError),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn io(
        action: &'static str,
        path: &std::path::Path,
    ) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::Io {
            action,
            path,
            source,
        }
    }
}

impl From<overdrive_safetensors::Error> for Error {
    fn from(error: overdrive_safetensors::Error) -> Error {
        use overdrive_safetensors::Error as File;
        match error {
            File::Common(overdrive_core::Error::Io {
                action,
                path,
                source,
            }) => Error::Io {
                action,
                path,
                source,
            },
            File::BadFile { path, reason } => Error::BadWeightFile { path, reason },
            File::Torch(error) => Error::Torch(error),
            other => Error::WeightFile(other),
        }
    }
}
