use std::path::PathBuf;

/// The errors of this crate.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// An error that all crates share: an invalid option, a wrong shape, dtype or device of a tensor, or a file error.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// An error of the GPU kernels.
    #[error(transparent)]
    Gpu(#[from] overdrive_gpu::Error),
    /// A tensor of the right shape and dtype has values that cannot be used.
    #[error("`{tensor}` contains {found}; it must contain {expected}")]
    Values {
        /// The name of the tensor or argument.
        tensor: &'static str,
        /// The first such value and its index.
        found: String,
        /// The values that are allowed.
        expected: String,
    },
    /// A quantized weight in a file is damaged, or does not match its description.
    #[error("the quantized weight `{name}` cannot be read: {reason}")]
    BadWeight {
        /// The name of the weight.
        name: String,
        /// The damage, and the remedy.
        reason: String,
    },
    /// A checkpoint folder cannot be read, or cannot be written to.
    #[error("{}: {reason}", path.display())]
    BadCheckpoint {
        /// The folder, or a file in it.
        path: PathBuf,
        /// The reason, and the remedy.
        reason: String,
    },
    /// A tensor of a checkpoint cannot be quantized.
    #[error("cannot quantize the tensor `{name}`: {source}")]
    Tensor {
        /// The name of the tensor.
        name: String,
        /// The reason.
        source: Box<Error>,
    },
    /// An error of a custom autograd function.
    #[error(transparent)]
    Autograd(#[from] overdrive_autograd::Error),
    /// An error of the C++ shim.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of a safetensors file.
    #[error(transparent)]
    File(#[from] overdrive_safetensors::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Tch(#[from] tch::TchError),
}

impl Error {
    /// Returns the error of `option`, whose `value` is not `expected`.
    pub(crate) fn option(
        option: &'static str,
        value: impl std::fmt::Display,
        expected: impl Into<std::borrow::Cow<'static, str>>,
    ) -> Self {
        overdrive_core::Error::option(option, value, expected).into()
    }

    /// Returns the error of `tensor`, whose shape is not `expected`.
    pub(crate) fn shape(
        tensor: &'static str,
        shape: impl Into<Vec<i64>>,
        expected: impl Into<std::borrow::Cow<'static, str>>,
    ) -> Self {
        overdrive_core::Error::shape(tensor, shape, expected).into()
    }

    /// Returns the error of values in `tensor` that are not `expected`.
    pub(crate) fn values(
        tensor: &'static str,
        found: impl Into<String>,
        expected: impl Into<String>,
    ) -> Self {
        Error::Values {
            tensor,
            found: found.into(),
            expected: expected.into(),
        }
    }
}

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;
