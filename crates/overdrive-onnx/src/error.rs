/// The errors of writing a model as ONNX.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An option out of its range, or a file that cannot be written.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// The model has a feature that the graph cannot hold.
    #[error("{feature} is {found}, which cannot be written as ONNX; {remedy}")]
    Unsupported {
        /// The feature: a key of the configuration, a weight by name, …
        feature: String,
        /// The value that the model has.
        found: String,
        /// The remedy.
        remedy: String,
    },
    /// The output of a layer depends on adapters, which a graph cannot hold.
    #[error(
        "the layer `{layer}` has unmerged adapters ({}), which an ONNX graph cannot hold; merge them with `overdrive_lora::merge_and_unload`, or remove them with `unload`",
        names.join(", ")
    )]
    Adapters {
        /// The name of the layer.
        layer: String,
        /// The names of the adapters.
        names: Vec<String>,
    },
    /// The model lacks a parameter that its configuration requires.
    #[error("the model lacks the parameter `{name}`, which its configuration requires")]
    MissingParameter {
        /// The name in a Hugging Face checkpoint.
        name: String,
    },
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
    Tch(#[from] tch::TchError),
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// Returns the error of a feature that the graph cannot hold.
    pub(crate) fn unsupported(
        feature: impl Into<String>,
        found: impl Into<String>,
        remedy: impl Into<String>,
    ) -> Error {
        Error::Unsupported {
            feature: feature.into(),
            found: found.into(),
            remedy: remedy.into(),
        }
    }
}
