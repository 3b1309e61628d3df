use std::io;
use std::path::{Path, PathBuf};

use tch::Kind;

/// Result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

/// What can go wrong with a safetensors file.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A file could not be read or written.
    #[error("cannot {action} {}: {source}", path.display())]
    Io {
        /// What was tried: "read", "map", "write", …
        action: &'static str,
        /// The file.
        path: PathBuf,
        /// Why not.
        source: io::Error,
    },
    /// A file is cut short, damaged, or something else.
    #[error("{} is not a complete safetensors file ({reason}): fetch or write it again", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        reason: String,
    },
    /// The file has no tensor of this name.
    #[error("{} holds no tensor `{name}`", path.display())]
    NoTensor {
        /// The file.
        path: PathBuf,
        /// The name that was asked for.
        name: String,
    },
    /// A stored tensor has a format that tch knows no kind for.
    #[error("the tensor `{name}` is stored as {format}, which tch has no kind for")]
    UnreadableFormat {
        /// Its name.
        name: String,
        /// The format's name in the header.
        format: String,
    },
    /// A tensor to write has a kind that the format does not have.
    #[error(
        "the tensor `{name}` is {kind:?}, which safetensors files cannot hold: convert it first"
    )]
    UnwritableKind {
        /// Its name.
        name: String,
        /// Its kind.
        kind: Kind,
    },
    /// A name of a tensor to write cannot be used.
    #[error("a tensor cannot be written as `{name}`: {reason}")]
    BadName {
        /// The name.
        name: String,
        /// What is wrong with it.
        reason: &'static str,
    },
    /// The tensor to copy into has another shape.
    #[error(
        "the tensor `{name}` is stored as {found:?}: it cannot be copied into one of {expected:?}"
    )]
    WrongShape {
        /// The stored tensor's name.
        name: String,
        /// Its shape in the file.
        found: Vec<i64>,
        /// The shape of the tensor to copy into.
        expected: Vec<i64>,
    },
    /// An error of libtorch, with its message.
    #[error("libtorch: {0}")]
    Torch(#[from] tch::TchError),
}

impl Error {
    pub(crate) fn io(action: &'static str, path: &Path) -> impl FnOnce(io::Error) -> Error {
        let path = path.to_path_buf();
        move |source| Error::Io {
            action,
            path,
            source,
        }
    }
}
