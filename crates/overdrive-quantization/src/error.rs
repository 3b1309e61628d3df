use std::path::PathBuf;

use crate::Scheme;

/// What can go wrong with quantized weights.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// There is no scheme of that name.
    #[error("no quantization scheme is called `{name}`; there are: {}", Scheme::NAMES.join(", "))]
    UnknownScheme {
        /// What was asked for.
        name: String,
    },
    /// A tensor has the wrong shape or kind.
    #[error("`{name}` is {found}: expected {expected}")]
    BadInput {
        /// Which tensor.
        name: &'static str,
        /// Its shape or kind.
        found: String,
        /// What fits.
        expected: String,
    },
    /// Options that do not fit the weight or one another.
    #[error("`{option}` is {found}: expected {expected}")]
    BadOption {
        /// Which option.
        option: &'static str,
        /// Its value.
        found: String,
        /// What fits.
        expected: String,
    },
    /// A quantized weight in a file is damaged or not what its description says.
    #[error("the quantized weight `{name}` cannot be read: {reason}")]
    BadWeight {
        /// Its name.
        name: String,
        /// What is wrong with it, and the way out.
        reason: String,
    },
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: "read", "map", "write", …
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: std::io::Error,
    },
    /// A GGUF file is cut short, damaged, or of a form that is not read here.
    #[error("{} cannot be read as GGUF: {reason}", path.display())]
    BadGguf {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// A folder that is read or written cannot be.
    #[error("{}: {reason}", path.display())]
    BadCheckpoint {
        /// The folder or a file in it.
        path: PathBuf,
        /// What is wrong with it, and the way out.
        reason: String,
    },
    /// A tensor of a checkpoint cannot be quantized.
    #[error("the tensor `{name}`: {source}")]
    Tensor {
        /// Its name.
        name: String,
        /// Why not.
        source: Box<Error>,
    },
    /// An error of a custom function.
    #[error(transparent)]
    Autograd(#[from] overdrive_autograd::Error),
    /// An error of the shim.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of a weight file.
    #[error(transparent)]
    File(#[from] overdrive_safetensors::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;
