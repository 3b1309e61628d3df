use std::path::PathBuf;

/// The result of this crate's functions.
pub type Result<T> = std::result::Result<T, Error>;

/// An error while reading a file of `torch.save`.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// The file could not be read.
    #[error(transparent)]
    Common(#[from] overdrive_core::Error),
    /// The file is truncated, damaged, in another format, or holds something other than weights.
    #[error("{} is not a weight file written by torch.save: {reason}", path.display())]
    BadFile {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// The file names a function or class that weights do not need. It was not run.
    #[error(
        "{} names `{global}`, which weights do not need; no code was run. If you trust the file's author, load it in \
         Python and save `model.state_dict()` as safetensors",
        path.display()
    )]
    Refused {
        /// The file.
        path: PathBuf,
        /// The name, such as `os.system`.
        global: String,
    },
    /// An error of overdrive-safetensors.
    #[error(transparent)]
    Safetensors(#[from] overdrive_safetensors::Error),
}

/// A fault in a file; the path is added later.
#[derive(Debug)]
pub(crate) enum Fault {
    Bad(String),
    Refused(String),
}

pub(crate) type Checked<T> = std::result::Result<T, Fault>;

/// Returns the fault with this reason.
pub(crate) fn bad<T>(reason: impl Into<String>) -> Checked<T> {
    Err(Fault::Bad(reason.into()))
}
