use std::path::PathBuf;

use tch::Kind;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error while reading or writing a safetensors file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read or written, or the target of a copy does not have the shape of the stored tensor.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// A file is truncated, damaged, or in another format.
    #[error(
    "{} is not a complete safetensors file: {reason}; download or write it again",
    path.display()
    )]
    BadFile {
        /// The file.
        path: PathBuf,
        /// The reason, as the parser states it.
        reason: String,
    },
    /// A file that the index names does not exist.
    #[error("{} is missing, but {index} lists {tensors} tensors in it; fetch it again", path.display())]
    MissingShard {
        /// The file.
        path: PathBuf,
        /// The name of the index.
        index: String,
        /// The number of tensors that the index assigns to it.
        tensors: usize,
    },
    /// The file has no tensor of this name.
    #[error("{} has no tensor `{name}`", path.display())]
    NoTensor {
        /// The file.
        path: PathBuf,
        /// The name of the missing tensor.
        name: String,
    },
    /// A stored tensor has a dtype that tch does not support.
    #[error(
        "the tensor `{name}` is stored as {format}, a dtype that tch does not support; write it in another dtype"
    )]
    UnreadableFormat {
        /// The name of the tensor.
        name: String,
        /// The dtype's name in the header.
        format: String,
    },
    /// A tensor to write has a dtype that safetensors files do not support.
    #[error(
        "the tensor `{name}` is {kind:?}, which safetensors files do not support; convert it to another dtype first"
    )]
    UnwritableKind {
        /// The name of the tensor.
        name: String,
        /// The kind of the tensor.
        kind: Kind,
    },
    /// A tensor to write has no dense elements.
    #[error("the tensor `{name}` cannot be written: it is {problem}")]
    UnwritableTensor {
        /// The name of the tensor.
        name: String,
        /// The property that prevents the writing, with the remedy.
        problem: &'static str,
    },
    /// A tensor to write has a name that cannot be used.
    #[error("a tensor cannot be named `{name}`: {reason}")]
    BadName {
        /// The name.
        name: String,
        /// The reason.
        reason: &'static str,
    },
    /// An error of libtorch through overdrive-sys.
    #[error(transparent)]
    Sys(#[from] overdrive_sys::Error),
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Tch(#[from] tch::TchError),
}
