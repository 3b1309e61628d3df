use std::path::{Path, PathBuf};

/// What can go wrong when a model is written as ONNX.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The model has a feature that the graph cannot hold.
    #[error("{feature} is {found}, which cannot be written as ONNX: {way_out}")]
    Unsupported {
        /// What it is: a key of the configuration, a weight by name, …
        feature: String,
        /// How the model has it.
        found: String,
        /// What can be done.
        way_out: String,
    },
    /// The output of a layer depends on adapters, which a graph cannot hold.
    #[error(
        "the layer `{layer}` has the adapters {}, and a graph holds plain weights; merge them with `overdrive_lora::merge_and_unload`, or remove them with `unload`",
        names.join(", ")
    )]
    Adapters {
        /// The name of the layer.
        layer: String,
        /// The names of the adapters.
        names: Vec<String>,
    },
    /// An option has a value that there is not.
    #[error("option `{option}` is {found}: expected {expected}")]
    BadOption {
        /// Its name.
        option: &'static str,
        /// Its value.
        found: String,
        /// What fits.
        expected: String,
    },
    /// A parameter that the configuration calls for is not in the model.
    #[error("the model has no parameter `{name}`, which its configuration calls for")]
    MissingParameter {
        /// Its name in a Hugging Face checkpoint.
        name: String,
    },
    /// A file could not be written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// An error of the files beside the graph.
    #[error(transparent)]
    File(#[from] overdrive_safetensors::Error),
    /// An error of the model.
    #[error(transparent)]
    Transformer(#[from] overdrive_transformer::Error),
    /// An error of the layers.
    #[error(transparent)]
    Nn(#[from] overdrive_nn::Error),
    /// An error of a quantized weight.
    #[error(transparent)]
    Quantization(#[from] overdrive_quantization::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(std::io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::Io {
            action,
            path,
            source,
        }
    }

    pub(crate) fn unsupported(
        feature: impl Into<String>,
        found: impl Into<String>,
        way_out: impl Into<String>,
    ) -> Error {
        Error::Unsupported {
            feature: feature.into(),
            found: found.into(),
            way_out: way_out.into(),
        }
    }
}
